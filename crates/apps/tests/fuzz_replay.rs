//! Replays the corpora of the DNS server's fuzz targets without a fuzzer.

use std::path::{Path, PathBuf};

#[path = "../../../fuzz/oracles/dns_answer.rs"]
mod dns_answer;
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
