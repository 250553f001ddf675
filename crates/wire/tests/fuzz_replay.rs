//! Fuzz targets of this crate without a fuzzer: replays their corpus and runs them on random
//! bytes.

use std::path::Path;

use proptest::prelude::*;

#[path = "../../../fuzz/oracles/checksum.rs"]
mod checksum;
#[path = "../../../fuzz/oracles/wire_parsers.rs"]
mod wire_parsers;

fn replay(target: &str, check: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&corpus).expect("the fuzz corpus is part of the repository") {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        check(&std::fs::read(path).unwrap());
        seeds += 1;
    }
    assert!(seeds > 0, "{} is empty", corpus.display());
}

#[test]
fn wire_parsers_accept_corpus() {
    replay("wire_parsers", wire_parsers::check);
}

#[test]
fn checksum_accepts_corpus() {
    replay("checksum", checksum::check);
}

proptest! {
    #[test]
    fn parsers_accept_arbitrary_bytes(
        choice in prop::sample::select(b"e46tuos*".to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        wire_parsers::check(&[&[choice], &bytes[..]].concat());
    }

    #[test]
    fn parsers_accept_arbitrary_payload_after_valid_headers(
        (version, protocol) in prop::sample::select(vec![
            (4, 1), (4, 6), (4, 17), (6, 0), (6, 6), (6, 17), (6, 43), (6, 44), (6, 58), (6, 60),
        ]),
        hop_limit in prop::sample::select(vec![1, 64, 255]),
        payload in prop::collection::vec(any::<u8>(), 0..120),
        kind in 128u8..=143,
    ) {
        let mut packet = if version == 4 {
            let total_bytes = (20 + payload.len()) as u16;
            let [high, low] = total_bytes.to_be_bytes();
            vec![
                b'4', 0x45, 0, high, low, 0, 0, 0, 0, 64, protocol, 0, 0,
                192, 0, 2, 1, 192, 0, 2, 2,
            ]
        } else {
            let mut packet =
                vec![b'6', 0x60, 0, 0, 0, 0, payload.len() as u8, protocol, hop_limit];
            packet.extend(u128::to_be_bytes(0xfe80 << 112 | 1));
            packet.extend(u128::to_be_bytes(0x2001_0db8 << 96 | 2));
            packet
        };
        packet.extend(&payload);
        wire_parsers::check(&packet);
        // Mostly small lengths and numbers, as in real headers.
        let at = packet.len() - payload.len();
        packet[at..].iter_mut().for_each(|byte| *byte &= 0x0f);
        wire_parsers::check(&packet);
        if let Some(first) = packet.get_mut(at) {
            *first = kind;
            wire_parsers::check(&packet);
        }
    }
}
