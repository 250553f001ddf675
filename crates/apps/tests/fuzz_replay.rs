//! Replays the corpora of the fuzz targets of the DNS server and of the monitor without a fuzzer.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

#[path = "../../../fuzz/oracles/dns_answer.rs"]
mod dns_answer;
#[path = "../../../fuzz/oracles/monitor_flows.rs"]
mod monitor_flows;
#[path = "../../../fuzz/oracles/zone_file.rs"]
mod zone_file;

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&folder).expect("the corpus is in the repository");
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn replays_dns_answer_corpus() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut server = dns_answer::server(&here.join("tests/zones"));
    for path in corpus("dns_answer") {
        println!("{}", path.display());
        dns_answer::check(&mut server, &std::fs::read(path).unwrap());
    }
    // The seeds contain valid queries, so that the checks have seen replies.
    assert!(server.counters().replies() >= 20, "{:?}", server.counters());
}

#[test]
fn replays_monitor_flows_corpus() {
    let mut frames = 0;
    for path in corpus("monitor_flows") {
        println!("{}", path.display());
        frames += monitor_flows::check(&std::fs::read(path).unwrap());
    }
    // The seeds contain valid frames, so that the checks have seen flows.
    assert!(frames >= 40, "{frames}");
}

proptest! {
    #[test]
    fn any_frames_are_counted_once(
        starts in prop::collection::vec(
            (
                prop::sample::select(vec![&[8_u8, 0, 0x45][..], &[0x86, 0xdd, 0x60], &[0x81, 0], &[8, 6]]),
                prop::collection::vec(any::<u8>(), 0..100),
            ),
            0..20,
        ),
    ) {
        let frame = |(start, rest): (&[u8], Vec<u8>)| [&[2; 12], start, &rest].concat();
        let input = starts.into_iter().map(frame).flat_map(|frame| [&[frame.len() as u8], &frame[..]].concat());
        monitor_flows::check(&input.collect::<Vec<u8>>());
    }
}

#[test]
fn replays_zone_file_corpus() {
    let folder = tempfile::tempdir().unwrap();
    for path in corpus("zone_file") {
        println!("{}", path.display());
        let input = std::fs::read(&path).unwrap();
        let is_zone = zone_file::check(&folder.path().join("seed.zone"), &input);
        // The seeds' names say which of them are valid zones.
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(is_zone, name.starts_with("zone_"), "{name}");
    }
}
