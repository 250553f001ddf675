#![no_main]

use std::path::Path;
use std::sync::{LazyLock, Mutex};

use tidegate_apps::dns::DnsServer;

#[path = "../oracles/dns_answer.rs"]
mod oracle;

static SERVER: LazyLock<Mutex<DnsServer>> = LazyLock::new(|| {
    let zones = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/apps/tests/zones");
    Mutex::new(oracle::server(Path::new(zones)))
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut server = SERVER.lock().expect("a panic ends the run");
    oracle::check(&mut server, input);
});
