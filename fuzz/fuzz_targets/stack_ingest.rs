#![no_main]

#[path = "../oracles/stack_ingest.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(input);
});
