//! Tests of reply comparison: real differences are reported, and no others.

use super::*;

const QUESTION: &[u8] = b"\x03www\x07example\x00\x00\x01\x00\x01";

/// Builds a record with an owner in wire format and TTL 60.
fn record(owner: &[u8], rtype: u8, data: &[u8]) -> Vec<u8> {
    let head = [0, rtype, 0, 1, 0, 0, 0, 60, 0, data.len() as u8];
    [owner, &head, data].concat()
}

fn message(flags: [u8; 2], sections: [&[Vec<u8>]; 3]) -> Vec<u8> {
    let mut message = vec![0, 7, flags[0], flags[1], 0, 1];
    for section in sections {
        message.extend_from_slice(&(section.len() as u16).to_be_bytes());
    }
    message.extend_from_slice(QUESTION);
    message.extend(sections.into_iter().flatten().flatten());
    message
}

const AA: [u8; 2] = [0x84, 0];
const WWW: &[u8] = b"\xc0\x0c";

fn field(expected: &[u8], got: &[u8]) -> &'static str {
    match compare(expected, got) {
        Err(Difference::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_section(
    expected: &[u8],
    got: &[u8],
    name: &str,
    missing_count: usize,
    extra_count: usize,
) {
    match compare(expected, got) {
        Err(Difference::Section { section, missing, extra }) => {
            assert_eq!((section, missing.len(), extra.len()), (name, missing_count, extra_count));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ignores_order_case_and_compression() {
    let (one, two) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    let expected = message(AA, [&[record(WWW, 1, &one), record(WWW, 1, &two)], &[], &[]]);
    let spelled = b"\x03WWW\x07Example\x00";
    let got = message(AA, [&[record(spelled, 1, &two), record(WWW, 1, &one)], &[], &[]]);
    compare(&expected, &got).unwrap();
    // A name in record data, once uncompressed and once with a pointer.
    let expected = message(AA, [&[record(WWW, 5, b"\x01A\x07example\x00")], &[], &[]]);
    let got = message(AA, [&[record(WWW, 5, b"\x01a\xc0\x10")], &[], &[]]);
    compare(&expected, &got).unwrap();
}

#[test]
fn reports_different_header_fields() {
    let expected = message(AA, [&[], &[], &[]]);
    let changed = |at: usize, value: u8| {
        let mut got = expected.clone();
        got[at] = value;
        got
    };
    assert_eq!(field(&expected, &changed(1, 8)), "id");
    assert_eq!(field(&expected, &changed(3, 3)), "rcode");
    assert_eq!(field(&expected, &changed(2, 0x80)), "AA");
    assert_eq!(field(&expected, &changed(2, 0x86)), "TC");
    assert_eq!(field(&expected, &changed(13, b'x')), "question");
    let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0].to_vec();
    assert_eq!(field(&expected, &message(AA, [&[], &[], &[opt]])), "EDNS");
    // RA is not compared: recursion is no subject of an authoritative server.
    compare(&expected, &changed(3, 0x80)).unwrap();
    let unreadable = compare(&expected, &changed(2, 0x04));
    assert!(matches!(unreadable, Err(Difference::Unreadable { side: "got", .. })));
    assert!(compare(&expected, &expected[..20]).is_err());
}

#[test]
fn reports_missing_and_extra_answers() {
    let (one, two) = (record(WWW, 1, &[1; 4]), record(WWW, 1, &[2; 4]));
    let both = message(AA, [&[one.clone(), two.clone()], &[], &[]]);
    let only_one = message(AA, [std::slice::from_ref(&one), &[], &[]]);
    let only_two = message(AA, [&[two], &[], &[]]);
    assert_section(&both, &only_one, "answer", 1, 0);
    assert_section(&only_one, &both, "answer", 0, 1);
    assert_section(&only_one, &only_two, "answer", 1, 1);
    let mut other_ttl = only_one.clone();
    let ttl_at = only_one.len() - 7;
    other_ttl[ttl_at] = 61;
    assert_section(&only_one, &other_ttl, "answer", 1, 1);
}

#[test]
fn requires_authority_section_only_without_answers() {
    let ns = record(b"\xc0\x10", 2, b"\x01n\xc0\x10");
    let a = record(WWW, 1, &[1; 4]);
    let none: &[Vec<u8>] = &[];
    let with = |answer: &[Vec<u8>], authority: &[Vec<u8>]| message(AA, [answer, authority, &[]]);
    let ns = std::slice::from_ref(&ns);
    let a = std::slice::from_ref(&a);
    compare(&with(a, ns), &with(a, none)).unwrap();
    assert_section(&with(a, none), &with(a, ns), "authority", 0, 1);
    assert_section(&with(none, ns), &with(none, none), "authority", 1, 0);
}

#[test]
fn requires_glue_only_inside_the_delegated_zone() {
    let inside = b"\x01n\x03www\x07example\x00";
    let outside = b"\x01n\x05other\x00";
    let servers = [record(WWW, 2, inside), record(WWW, 2, outside)];
    let glue = [record(inside, 1, &[1; 4]), record(outside, 1, &[2; 4])];
    let referral = |glue: &[Vec<u8>]| message([0x80, 0], [&[], &servers, glue]);
    compare(&referral(&glue), &referral(&glue)).unwrap();
    compare(&referral(&glue), &referral(&glue[..1])).unwrap();
    assert_section(&referral(&glue), &referral(&glue[1..]), "additional", 1, 0);
    assert_section(&referral(&glue[..1]), &referral(&glue), "additional", 0, 1);
}

#[test]
fn accepts_partial_but_not_wrong_any_answers() {
    let ask_any = |records: &[Vec<u8>]| {
        let mut message = message(AA, [records, &[], &[]]);
        message[12 + QUESTION.len() - 3] = 255;
        message
    };
    let a = record(WWW, 1, &[1; 4]);
    let other_a = record(WWW, 1, &[2; 4]);
    let txt = record(WWW, 16, b"\x01x");
    let all = ask_any(&[a.clone(), txt.clone()]);
    compare(&all, &ask_any(std::slice::from_ref(&txt))).unwrap();
    compare(&ask_any(&[a]), &ask_any(&[txt])).unwrap();
    assert_section(&all, &ask_any(&[other_a]), "answer", 1, 1);
    assert_section(&all, &ask_any(&[]), "answer", 2, 0);
}
