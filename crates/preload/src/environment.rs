//! Environment of the next program in this process (`exec`).
//!
//! A variable lists the descriptors of the inherited sockets. The next program needs this
//! library for its sockets, even if the `exec` call passes little of the environment on.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

/// Variable with the inherited descriptors of sockets, separated by commas.
const INHERITED_FDS_VAR: &str = "TIDEGATE_HANDED_DOWN";

/// Variable with the descriptor that keeps the application's own daemon running.
const LIFELINE_VAR: &str = "TIDEGATE_LIFELINE";

/// Variables that load this library, and locate the stack and keep it.
const REQUIRED_VARS: [&str; 3] = ["LD_PRELOAD", "TIDEGATE_RUN", LIFELINE_VAR];

static INITIAL_VARS: OnceLock<Vec<CString>> = OnceLock::new();

fn assignment(name: &str, value: Vec<u8>) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", &value].concat()).ok()
}

/// Saves [`REQUIRED_VARS`] before the application may change it; returns the descriptors that the
/// previous program passed on.
pub(crate) fn read_at_load() -> Vec<i32> {
    let value = |name: &&str| assignment(name, std::env::var_os(name)?.into_vec());
    INITIAL_VARS.get_or_init(|| REQUIRED_VARS.iter().filter_map(value).collect());
    let Ok(list) = std::env::var(INHERITED_FDS_VAR) else { return Vec::new() };
    // SAFETY: the library has just been loaded, so the process has no other thread.
    unsafe { std::env::remove_var(INHERITED_FDS_VAR) };
    list.split(',').filter_map(|fd| fd.parse().ok()).collect()
}

/// Descriptor that keeps the application's own daemon running, if it has one.
pub(crate) fn lifeline() -> Option<i32> {
    std::env::var(LIFELINE_VAR).ok()?.parse().ok()
}

/// Environment of the next program: `given`, with [`REQUIRED_VARS`] and the descriptors `fds`
/// added.
pub(crate) fn for_exec<'a>(given: impl Iterator<Item = &'a CStr>, fds: &[i32]) -> Vec<CString> {
    let name = |entry: &CStr| {
        let mut parts = entry.to_bytes().split(|&byte| byte == b'=');
        parts.next().unwrap_or_default().to_vec()
    };
    let mut all: Vec<CString> = given.map(CStr::to_owned).collect();
    all.retain(|string| name(string) != INHERITED_FDS_VAR.as_bytes());
    for required in INITIAL_VARS.get().into_iter().flatten() {
        if !all.iter().any(|string| name(string) == name(required)) {
            all.push(required.clone());
        }
    }
    let numbers: Vec<String> = fds.iter().map(i32::to_string).collect();
    all.extend(assignment(INHERITED_FDS_VAR, numbers.join(",").into_bytes()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_inherited_fds_and_keeps_other_variables() {
        let given = [c"PATH=/bin", c"TIDEGATE_HANDED_DOWN=9", c"TIDEGATE_HANDED_DOWNS=1", c"odd"];
        let got = for_exec(given.into_iter(), &[3, 17]);
        let kept = [c"PATH=/bin", c"TIDEGATE_HANDED_DOWNS=1", c"odd"];
        assert_eq!(got[..3], kept.map(CStr::to_owned));
        assert_eq!(got.last().map(|last| &**last), Some(c"TIDEGATE_HANDED_DOWN=3,17"));
    }
}
