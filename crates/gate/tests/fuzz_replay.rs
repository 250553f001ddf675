//! Replay of the classifier's fuzz target without a fuzzer: its corpus and random bytes.

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;

#[path = "../../../fuzz/oracles/admission_classify.rs"]
mod admission_classify;

#[test]
fn corpus_of_admission_classify() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/admission_classify");
    let mut reached = BTreeSet::new();
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        reached.extend(admission_classify::check(&std::fs::read(path).unwrap()));
    }
    // The seeds reach every class, the default class included.
    assert_eq!(reached, (0..10).collect());
}

proptest! {
    #[test]
    fn any_bytes_have_a_class(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        admission_classify::check(&bytes);
    }

    #[test]
    fn any_bytes_behind_a_header_have_a_class(
        ethertype in prop::sample::select(vec![[8, 0], [0x86, 0xdd], [8, 6], [0x81, 0]]),
        first in prop::sample::select(vec![0x45_u8, 0x46, 0x60, 0]),
        bytes in prop::collection::vec(any::<u8>(), 0..120),
    ) {
        let frame = [&[b'e'][..], &[2; 12], &ethertype, &[first], &bytes].concat();
        admission_classify::check(&frame);
    }
}
