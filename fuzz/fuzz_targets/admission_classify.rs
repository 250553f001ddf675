#![no_main]

#[path = "../oracles/admission_classify.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(input);
});
