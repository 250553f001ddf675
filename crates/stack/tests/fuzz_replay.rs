//! Replay of the stack's fuzz targets without a fuzzer: their corpora, and random input.

use std::path::Path;

use proptest::prelude::*;
use tidegate_wire::{DropCounters, DropReason};

#[path = "../../../fuzz/oracles/stack_ingest.rs"]
mod stack_ingest;

#[path = "../../../fuzz/oracles/tcp_segments.rs"]
mod tcp_segments;

#[path = "../../../fuzz/oracles/saved_stack.rs"]
mod saved_stack;

use saved_stack::Outcome;

/// Drop reasons that the hostile seeds reach: at least one for each class of bad header, fragment,
/// extension header and neighbour message.
const EXPECTED_DROPS: &[DropReason] = &[
    DropReason::EthernetTruncated,
    DropReason::VlanNotForUs,
    DropReason::ArpMalformed,
    DropReason::ArpSenderInvalid,
    DropReason::ArpConflict,
    DropReason::ArpUnsolicited,
    DropReason::NdpMalformed,
    DropReason::NdpHopLimit,
    DropReason::NdpConflict,
    DropReason::NdpUnsolicited,
    DropReason::NdpIgnored,
    DropReason::Ipv4Truncated,
    DropReason::Ipv4Version,
    DropReason::Ipv4HeaderLength,
    DropReason::Ipv4TotalLength,
    DropReason::Ipv4Checksum,
    DropReason::Ipv4Options,
    DropReason::Ipv4SourceRoute,
    DropReason::Ipv4SourceInvalid,
    DropReason::Ipv6Truncated,
    DropReason::Ipv6Version,
    DropReason::Ipv6PayloadLength,
    DropReason::Ipv6SourceInvalid,
    DropReason::Ipv6ExtensionTruncated,
    DropReason::Ipv6ExtensionOrder,
    DropReason::Ipv6ExtensionLimit,
    DropReason::Ipv6OptionUnknown,
    DropReason::Ipv6RoutingHeader,
    DropReason::Ipv6Jumbogram,
    DropReason::Ipv6NextHeaderUnknown,
    DropReason::FragmentInvalid,
    DropReason::FragmentTooBig,
    DropReason::FragmentOverlap,
    DropReason::FragmentDuplicate,
    DropReason::FragmentHeaderChain,
    DropReason::FragmentMemory,
    DropReason::FragmentTimeout,
    DropReason::IcmpTruncated,
    DropReason::IcmpChecksum,
    DropReason::IcmpMtu,
    DropReason::IcmpBroadcast,
    DropReason::UdpLength,
    DropReason::UdpTruncated,
    DropReason::UdpChecksum,
    DropReason::UdpChecksumUnfilled,
    DropReason::UdpChecksumMissing,
    DropReason::UdpPortZero,
    DropReason::UdpNoSocket,
];

#[test]
fn corpus_of_stack_ingest() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/stack_ingest");
    let (mut delivered, mut sent, mut drops) = (0, 0, DropCounters::new());
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        let counters = stack_ingest::check(&std::fs::read(path).unwrap());
        delivered += counters.delivered;
        sent += counters.transmitted;
        drops.merge(&counters.drops);
    }
    // The seeds reach their targets.
    println!("{delivered} delivered, {sent} sent, {drops:?}");
    assert!(delivered > 0 && sent > 0);
    for &reason in EXPECTED_DROPS {
        assert!(drops.get(reason) > 0, "no seed is dropped as {reason}");
    }
}

/// Drop reasons that the seeds of `tcp_segments` reach.
const EXPECTED_TCP_DROPS: &[DropReason] = &[
    DropReason::TcpNoSocket,
    DropReason::TcpFlags,
    DropReason::TcpSequence,
    DropReason::TcpDuplicate,
    DropReason::TcpAckInvalid,
    DropReason::TcpReset,
    DropReason::TcpPaws,
    DropReason::TcpTimestampMissing,
    DropReason::TcpOptions,
];

#[test]
fn corpus_of_tcp_segments() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tcp_segments");
    let (mut sent, mut drops) = (0, DropCounters::new());
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        let counters = tcp_segments::check(&std::fs::read(path).unwrap());
        sent += counters.transmitted;
        drops.merge(&counters.drops);
    }
    println!("{sent} sent, {drops:?}");
    assert!(sent > 0);
    for &reason in EXPECTED_TCP_DROPS {
        assert!(drops.get(reason) > 0, "no seed is dropped as {reason}");
    }
}

/// Seeds of `saved_stack`, with their file names.
fn corpus_snapshots() -> Vec<(String, Vec<u8>)> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/saved_stack");
    let entries = std::fs::read_dir(&corpus).expect("the corpus is in the repository");
    let paths = entries.map(|entry| entry.unwrap().path());
    let seed = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(path).unwrap())
    };
    paths.map(seed).collect()
}

/// Restores seeds made by `Stack::save`, in every setup. The file names of the other seeds give the
/// expected outcome; those that a fuzzer found have the hash of their content.
#[test]
fn corpus_of_saved_stack() {
    let snapshots = corpus_snapshots();
    assert!(
        snapshots.iter().any(|(name, _)| name.starts_with("good_")),
        "the corpus has no good seed"
    );
    for (name, bytes) in snapshots {
        println!("{name}");
        let expected = match name.split('_').next() {
            Some("good") => Outcome::Restored,
            Some("refused") => Outcome::Refused,
            _ => Outcome::Unreadable,
        };
        let is_found = name.len() == 40;
        for setup in 0..8 {
            let outcome = saved_stack::check(&[&[setup], bytes.get(1..).unwrap_or(&[])].concat());
            assert!(
                is_found || outcome == expected,
                "{name} is {outcome:?}: has the snapshot format changed?"
            );
        }
    }
}

/// Record of `tcp_segments` that is likely to reach deep states.
fn tcp_record() -> impl Strategy<Value = [u8; 8]> {
    let flags = prop_oneof![
        4 => Just(0x10_u8), 3 => Just(0x18), 2 => Just(0x02), 1 => Just(0x12), 1 => Just(0x11),
        1 => Just(0x04), 1 => any::<u8>(),
    ];
    let segment = (0u8..160, flags, any::<[u8; 6]>());
    let segment =
        segment.prop_map(|(choice, flags, [a, b, c, d, e, f])| [choice, flags, a, b, c, d, e, f]);
    prop_oneof![6 => segment, 1 => any::<[u8; 8]>(), 2 => (210u8..=255, any::<[u8; 7]>())
        .prop_map(|(what, [a, b, c, d, e, f, g])| [what, a, b, c, d, e, f, g])]
}

proptest! {
    #[test]
    fn survives_any_segments_on_any_connection(
        setup in any::<u8>(),
        records in prop::collection::vec(tcp_record(), 0..200),
    ) {
        tcp_segments::check(&[&[setup], records.as_flattened()].concat());
    }

    #[test]
    fn rejects_or_survives_corrupted_snapshots(
        setup in 0u8..8,
        which in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let snapshots = corpus_snapshots();
        let (_, mut bytes) = snapshots[which.index(snapshots.len())].clone();
        bytes[0] = setup;
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] ^= value;
        }
        saved_stack::check(&bytes);
    }

    #[test]
    fn survives_any_frames_on_any_stack(
        setup in 0u8..32,
        records in prop::collection::vec(
            (any::<u8>(), prop::collection::vec(any::<u8>(), 0..80)),
            0..8,
        ),
    ) {
        let mut input = vec![setup];
        for (action, frame) in records {
            input.extend([action, 0, frame.len() as u8]);
            input.extend(frame);
        }
        stack_ingest::check(&input);
    }
}
