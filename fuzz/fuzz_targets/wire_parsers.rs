#![no_main]

#[path = "../oracles/wire_parsers.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| oracle::check(input));
