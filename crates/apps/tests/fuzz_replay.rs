//! The fuzz target of the DNS server without a fuzzer: its corpus.

use std::path::Path;

#[path = "../../../fuzz/oracles/dns_answer.rs"]
mod dns_answer;

#[test]
fn corpus_of_dns_answer() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut server = dns_answer::server(&here.join("tests/zones"));
    let corpus = here.join("../../fuzz/corpus/dns_answer");
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        dns_answer::check(&mut server, &std::fs::read(path).unwrap());
    }
    // Good queries among the seeds were answered, so the checks saw answers.
    assert!(server.counters().answers() >= 20, "{:?}", server.counters());
}
