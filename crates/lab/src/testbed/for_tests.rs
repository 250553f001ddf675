//! Conditions under which a test of programs can run, and waiting for what it waits for.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Limit of [`wait_until`].
const LIMIT: Duration = Duration::from_secs(60);
/// Time between two looks of [`wait_until`].
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// True if the test can run as root; prints a notice if it is skipped.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        tidegate_needs::skip("root", format!("{test} makes network namespaces"));
    }
    root
}

/// True if all these programs are installed; prints the missing one if not.
pub fn has_programs(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let missing = programs
        .iter()
        .find(|program| !path.split(':').any(|folder| Path::new(folder).join(program).exists()));
    if let Some(program) = missing {
        tidegate_needs::skip(program, format!("{program} is not installed, for {test}"));
    }
    missing.is_none()
}

/// True if a test can run that needs network namespaces and these programs.
pub fn can_run(test: &str, programs: &[&str]) -> bool {
    is_root(test) && has_programs(test, programs)
}

/// Waits until the condition holds.
///
/// # Panics
/// After one minute.
pub fn wait_until(state: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < LIMIT, "timed out waiting until: {state}");
        thread::sleep(CHECK_INTERVAL);
    }
}
