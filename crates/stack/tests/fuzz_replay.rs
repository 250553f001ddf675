//! The fuzz target of the stack without a fuzzer: its corpus, and bytes by
//! chance.

use std::path::Path;

use proptest::prelude::*;
use tidegate_wire::{DropCounters, DropReason};

#[path = "../../../fuzz/oracles/stack_ingest.rs"]
mod stack_ingest;

const REACHED: &[DropReason] = &[];

#[test]
fn corpus_of_stack_ingest() {
    let corpus =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/stack_ingest");
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
