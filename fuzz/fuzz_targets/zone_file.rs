#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

#[path = "../oracles/dns_answer.rs"]
#[allow(dead_code)]
mod dns_answer;
#[path = "../oracles/zone_file.rs"]
mod oracle;

static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("{}.zone", std::process::id())));

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(&FILE, input);
});
