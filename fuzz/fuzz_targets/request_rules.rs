#![no_main]

use tidegate_apps::requests::any_request;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    any_request::check(input);
});
