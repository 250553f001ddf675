#![no_main]

#[path = "../oracles/tcp_segments.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(input);
});
