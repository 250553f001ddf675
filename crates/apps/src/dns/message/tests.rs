//! Hostile and honest messages (class 8 of the hostile inputs; RFC 9267).

use super::*;
use proptest::prelude::*;

/// A query for `www.example A` with these counts and what follows the
/// question.
fn query(counts: [u16; 4], rest: &[u8]) -> Vec<u8> {
    with_name(counts, b"\x03www\x07example\x00", rest)
}

fn with_name(counts: [u16; 4], name: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut message = vec![0x12, 0x34, 0x01, 0x00];
    message.extend(counts.iter().flat_map(|count| count.to_be_bytes()));
    message.extend_from_slice(name);
    message.extend_from_slice(&[0, 1, 0, 1]);
    message.extend_from_slice(rest);
    message
}

fn opt(owner: &[u8], data: &[u8]) -> Vec<u8> {
    let mut record = owner.to_vec();
    record.extend_from_slice(&[0, 41, 0x04, 0xd0, 0, 0, 0x80, 0]);
    record.extend_from_slice(&(data.len() as u16).to_be_bytes());
    record.extend_from_slice(data);
    record
}

#[track_caller]
fn assert_formerr(message: &[u8]) {
    match Query::parse(message) {
        Err(Rejection::Error { rcode: Rcode::FormErr, front }) => {
            assert!(message.starts_with(front));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plain_query_is_read() {
    let message = query([1, 0, 0, 0], b"");
    let query = Query::parse(&message).unwrap();
    assert_eq!(query.name(), b"\x03www\x07example\x00");
    assert_eq!((query.rtype, query.class, query.edns), (1, 1, None));
    assert_eq!(query.udp_limit_bytes(1232), 512);
}

#[test]
fn the_root_can_be_asked_for() {
    let message = with_name([1, 0, 0, 0], b"\0", b"");
    assert_eq!(Query::parse(&message).unwrap().name(), b"\0");
}

#[test]
fn edns_is_read_and_bounds_the_answer() {
    let message = query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00\x02ab"));
    let query = Query::parse(&message).unwrap();
    let edns = Edns { udp_payload_bytes: 1232, version: 0, dnssec_ok: true };
    assert_eq!(query.edns, Some(edns));
    let limit = |client, server| {
        let edns = Some(Edns { udp_payload_bytes: client, ..edns });
        Query { edns, ..query }.udp_limit_bytes(server)
    };
    assert_eq!(limit(1232, 4096), 1232);
    assert_eq!(limit(65_535, 1232), 1232);
    assert_eq!(limit(0, 1232), 512);
    assert_eq!(limit(511, 1232), 512);
    assert_eq!(limit(4096, 100), 512);
}

#[test]
fn short_messages_and_responses_get_no_answer() {
    let message = query([1, 0, 0, 0], b"");
    for len in 0..12 {
        assert_eq!(Query::parse(&message[..len]).unwrap_err(), Rejection::Truncated);
    }
    let mut response = message;
    response[2] |= 0x80;
    assert_eq!(Query::parse(&response).unwrap_err(), Rejection::Response);
    response[2] |= 0x78;
    assert_eq!(Query::parse(&response).unwrap_err(), Rejection::Response);
}

#[test]
fn every_truncation_is_malformed() {
    let message = query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00\x02ab"));
    assert!(Query::parse(&message).is_ok());
    for len in 12..message.len() {
        assert_formerr(&message[..len]);
    }
}

#[test]
fn pointers_in_the_question_are_malformed() {
    // To itself, forwards, past the end, into the header, and a loop of two.
    let targets: [&[u8]; 5] =
        [b"\xc0\x0c", b"\xc0\x20", b"\xff\xff", b"\xc0\x00", b"\x01a\xc0\x10\xc0\x0c"];
    for name in targets {
        assert_formerr(&with_name([1, 0, 0, 0], name, b""));
    }
}

#[test]
fn bad_labels_and_names_are_malformed() {
    // Label types 01 and 10 are not in use; 64 octets are one too many.
    assert_formerr(&with_name([1, 0, 0, 0], &[&[64], &[b'a'; 64][..], &[0]].concat(), b""));
    assert_formerr(&with_name([1, 0, 0, 0], &[&[0x80], &[b'a'; 128][..], &[0]].concat(), b""));
    let longest = [b"\x01a".repeat(127), vec![0]].concat();
    assert_eq!(longest.len(), 255);
    assert!(Query::parse(&with_name([1, 0, 0, 0], &longest, b"")).is_ok());
    let too_long = [b"\x01a".repeat(128), vec![0]].concat();
    assert_formerr(&with_name([1, 0, 0, 0], &too_long, b""));
    // A name that never ends.
    assert_formerr(&with_name([1, 0, 0, 0], &b"\x01a".repeat(3000), b""));
}

#[test]
fn counts_that_lie_are_malformed() {
    let record = opt(b"\0", b"");
    for counts in [[0, 0, 0, 0], [2, 0, 0, 0], [0xffff, 0, 0, 0]] {
        assert_formerr(&query(counts, b""));
    }
    assert_formerr(&query([1, 1, 0, 0], &record));
    assert_formerr(&query([1, 0, 1, 0], &record));
    assert_formerr(&query([1, 0, 0, 2], &record));
    assert_formerr(&query([1, 0, 0, 0xffff], &record));
    // More bytes than the counts say.
    assert_formerr(&query([1, 0, 0, 0], &record));
    assert_formerr(&query([1, 0, 0, 0], b"x"));
}

#[test]
fn lengths_that_lie_are_malformed() {
    let mut long = opt(b"\0", b"");
    let end = long.len();
    long[end - 1] = 1;
    assert_formerr(&query([1, 0, 0, 1], &long));
    long[end - 2] = 0xff;
    assert_formerr(&query([1, 0, 0, 1], &long));
    // An option longer than the record, and a header of an option cut short.
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00\x03ab")));
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00")));
}

#[test]
fn two_opt_records_are_malformed() {
    let record = opt(b"\0", b"");
    assert!(Query::parse(&query([1, 0, 0, 1], &record)).is_ok());
    assert_formerr(&query([1, 0, 0, 2], &record.repeat(2)));
}

#[test]
fn an_opt_record_belongs_to_the_root() {
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\x01a\0", b"")));
    // Not even by a pointer to the root at the end of the question.
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\xc0\x18", b"")));
}

#[test]
fn other_additional_records_are_passed_over() {
    let other = [b"\xc0\x0c".as_slice(), &[0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 1, 2, 3, 4]].concat();
    let both = [other, opt(b"\0", b"")].concat();
    assert!(Query::parse(&query([1, 0, 0, 2], &both)).unwrap().edns.is_some());
}

#[test]
fn pointers_of_other_records_must_lead_back() {
    let tail = [0, 1, 0, 1, 0, 0, 0, 0, 0, 0];
    let record = |owner: &[u8]| [owner, &tail[..]].concat();
    assert!(Query::parse(&query([1, 0, 0, 1], &record(b"\xc0\x0c"))).is_ok());
    // The record begins at 29: to itself, forwards, past the end, to the header.
    for owner in [&b"\xc0\x1d"[..], b"\xc0\x1e", b"\xff\xff", b"\xc0\x0b", b"\x01a\xc0\x1d"] {
        assert_formerr(&query([1, 0, 0, 1], &record(owner)));
    }
}

#[test]
fn other_opcodes_are_not_implemented() {
    for opcode in 1..16_u8 {
        let mut message = query([1, 0, 0, 0], b"");
        message[2] = opcode << 3;
        match Query::parse(&message) {
            Err(Rejection::Error { rcode: Rcode::NotImp, front }) => assert_eq!(front, message),
            other => panic!("{other:?}"),
        }
        // An update has other sections; only its header is read.
        match Query::parse(&message[..14]) {
            Err(Rejection::Error { rcode: Rcode::NotImp, front }) => assert_eq!(front.len(), 12),
            other => panic!("{other:?}"),
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = Query::parse(&bytes);
    }

    #[test]
    fn a_query_with_any_byte_changed_is_read_without_panic(at in 0_usize..48, byte: u8) {
        let mut message = query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00\x04abcd"));
        let at = at % message.len();
        message[at] = byte;
        if let Ok(query) = Query::parse(&message) {
            prop_assert_eq!(name::wire_len(query.name()), Some(query.name().len()));
        }
    }
}
