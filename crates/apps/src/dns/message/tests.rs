//! Malformed and well-formed messages (class 8 of the hostile inputs; RFC 9267).

use super::*;
use proptest::prelude::*;

/// Builds a query for `www.example A` with these section counts; `rest` follows the question.
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
        Err(Rejection::Error { rcode: Rcode::FormErr, header_and_question }) => {
            assert!(message.starts_with(header_and_question));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn parses_query_without_edns() {
    let message = query([1, 0, 0, 0], b"");
    let query = Query::parse(&message).unwrap();
    assert_eq!(query.name(), b"\x03www\x07example\x00");
    assert_eq!((query.rtype, query.class, query.edns), (1, 1, None));
    assert_eq!(query.udp_limit_bytes(1232), 512);
}

#[test]
fn parses_query_for_the_root() {
    let message = with_name([1, 0, 0, 0], b"\0", b"");
    assert_eq!(Query::parse(&message).unwrap().name(), b"\0");
}

#[test]
fn edns_payload_size_limits_the_reply() {
    let message = query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0b\x00\x02ab"));
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
fn rejects_short_messages_and_responses() {
    let message = query([1, 0, 0, 0], b"");
    for len in 0..12 {
        assert_eq!(Query::parse(&message[..len]).unwrap_err(), Rejection::TooShort);
    }
    let mut response = message;
    response[2] |= 0x80;
    assert_eq!(Query::parse(&response).unwrap_err(), Rejection::Response);
    response[2] |= 0x78;
    assert_eq!(Query::parse(&response).unwrap_err(), Rejection::Response);
}

#[test]
fn rejects_every_truncation() {
    let message = query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0b\x00\x02ab"));
    assert!(Query::parse(&message).is_ok());
    for len in 12..message.len() {
        assert_formerr(&message[..len]);
    }
}

#[test]
fn rejects_compression_pointers_in_the_question() {
    // Pointers to itself, forward, past the end, into the header, and a loop of two pointers.
    let targets: [&[u8]; 5] =
        [b"\xc0\x0c", b"\xc0\x20", b"\xff\xff", b"\xc0\x00", b"\x01a\xc0\x10\xc0\x0c"];
    for name in targets {
        assert_formerr(&with_name([1, 0, 0, 0], name, b""));
    }
}

#[test]
fn rejects_bad_labels_and_overlong_names() {
    // Label types 01 and 10 are unused; 64 octets exceed the maximum by one.
    assert_formerr(&with_name([1, 0, 0, 0], &[&[64], &[b'a'; 64][..], &[0]].concat(), b""));
    assert_formerr(&with_name([1, 0, 0, 0], &[&[0x80], &[b'a'; 128][..], &[0]].concat(), b""));
    let longest = [b"\x01a".repeat(127), vec![0]].concat();
    assert_eq!(longest.len(), 255);
    assert!(Query::parse(&with_name([1, 0, 0, 0], &longest, b"")).is_ok());
    let too_long = [b"\x01a".repeat(128), vec![0]].concat();
    assert_formerr(&with_name([1, 0, 0, 0], &too_long, b""));
    // A name without an end.
    assert_formerr(&with_name([1, 0, 0, 0], &b"\x01a".repeat(3000), b""));
}

#[test]
fn rejects_wrong_record_counts() {
    let record = opt(b"\0", b"");
    for counts in [[0, 0, 0, 0], [2, 0, 0, 0], [0xffff, 0, 0, 0]] {
        assert_formerr(&query(counts, b""));
    }
    assert_formerr(&query([1, 1, 0, 0], &record));
    assert_formerr(&query([1, 0, 1, 0], &record));
    assert_formerr(&query([1, 0, 0, 2], &record));
    assert_formerr(&query([1, 0, 0, 0xffff], &record));
    // More bytes than the counts announce.
    assert_formerr(&query([1, 0, 0, 0], &record));
    assert_formerr(&query([1, 0, 0, 0], b"x"));
}

#[test]
fn rejects_wrong_lengths() {
    let mut long = opt(b"\0", b"");
    let end = long.len();
    long[end - 1] = 1;
    assert_formerr(&query([1, 0, 0, 1], &long));
    long[end - 2] = 0xff;
    assert_formerr(&query([1, 0, 0, 1], &long));
    // An option longer than the record, and a truncated option header.
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00\x03ab")));
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\0", b"\x00\x0a\x00")));
}

#[test]
fn rejects_two_opt_records() {
    let record = opt(b"\0", b"");
    assert!(Query::parse(&query([1, 0, 0, 1], &record)).is_ok());
    assert_formerr(&query([1, 0, 0, 2], &record.repeat(2)));
}

#[test]
fn rejects_opt_record_not_owned_by_the_root() {
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\x01a\0", b"")));
    // A pointer to the root at the end of the question is rejected too.
    assert_formerr(&query([1, 0, 0, 1], &opt(b"\xc0\x18", b"")));
}

#[test]
fn skips_other_additional_records() {
    let other = [b"\xc0\x0c".as_slice(), &[0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 1, 2, 3, 4]].concat();
    let both = [other, opt(b"\0", b"")].concat();
    assert!(Query::parse(&query([1, 0, 0, 2], &both)).unwrap().edns.is_some());
}

#[test]
fn rejects_pointers_that_do_not_point_backwards() {
    let tail = [0, 1, 0, 1, 0, 0, 0, 0, 0, 0];
    let record = |owner: &[u8]| [owner, &tail[..]].concat();
    assert!(Query::parse(&query([1, 0, 0, 1], &record(b"\xc0\x0c"))).is_ok());
    // The record begins at 29. Pointers to itself, forward, past the end, into the header.
    for owner in [&b"\xc0\x1d"[..], b"\xc0\x1e", b"\xff\xff", b"\xc0\x0b", b"\x01a\xc0\x1d"] {
        assert_formerr(&query([1, 0, 0, 1], &record(owner)));
    }
}

#[test]
fn answers_other_opcodes_with_notimp() {
    for opcode in 1..16_u8 {
        let mut message = query([1, 0, 0, 0], b"");
        message[2] = opcode << 3;
        match Query::parse(&message) {
            Err(Rejection::Error { rcode: Rcode::NotImp, header_and_question }) => {
                assert_eq!(header_and_question, message);
            }
            other => panic!("{other:?}"),
        }
        // An update has other sections; the server reads only its header.
        match Query::parse(&message[..14]) {
            Err(Rejection::Error { rcode: Rcode::NotImp, header_and_question }) => {
                assert_eq!(header_and_question.len(), 12);
            }
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
