#![no_main]

#[path = "../oracles/saved_stack.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(input);
});
