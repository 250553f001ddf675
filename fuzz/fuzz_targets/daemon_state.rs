#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    tidegate_service::daemon::fuzz::daemon_state::check(input);
});
