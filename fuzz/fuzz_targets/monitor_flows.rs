#![no_main]

#[path = "../oracles/monitor_flows.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    oracle::check(input);
});
