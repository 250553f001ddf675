//! The fuzz target of the stack without a fuzzer: its corpus, and bytes by
//! chance.

use std::path::Path;

use proptest::prelude::*;
use tidegate_wire::{DropCounters, DropReason};

#[path = "../../../fuzz/oracles/stack_ingest.rs"]
mod stack_ingest;

/// What the hostile seeds are dropped as: each class of bad header, fragment,
/// extension header and neighbour message has at least one.
const REACHED: &[DropReason] = &[
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
    // The seeds reach what they were made for.
    println!("{delivered} delivered, {sent} sent, {drops:?}");
    assert!(delivered > 0 && sent > 0);
    for &reason in REACHED {
        assert!(drops.get(reason) > 0, "no seed is dropped as {reason}");
    }
}

proptest! {
    #[test]
    fn any_frames_to_any_stack(
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
