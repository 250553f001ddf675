//! The fuzz targets of the DNS server without a fuzzer: their corpora.

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
fn corpus_of_dns_answer() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut server = dns_answer::server(&here.join("tests/zones"));
    for path in corpus("dns_answer") {
        println!("{}", path.display());
        dns_answer::check(&mut server, &std::fs::read(path).unwrap());
    }
    // Good queries among the seeds were answered, so the checks saw answers.
    assert!(server.counters().answers() >= 20, "{:?}", server.counters());
}

#[test]
fn corpus_of_zone_file() {
    let folder = tempfile::tempdir().unwrap();
    for path in corpus("zone_file") {
        println!("{}", path.display());
        let input = std::fs::read(&path).unwrap();
        let is_zone = zone_file::check(&folder.path().join("seed.zone"), &input);
        // The names of the seeds say what they are.
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(is_zone, name.starts_with("zone_"), "{name}");
    }
}
