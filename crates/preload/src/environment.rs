//! What the program that comes next in this process is told by its environment, when
//! it gets sockets: which descriptors have them. It needs this library for them, also
//! where the program before it gives little of its environment down.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

/// The descriptors with sockets.
const HANDED_DOWN: &str = "TIDEGATE_HANDED_DOWN";

/// What loads this library, and says where the stack is.
const NEEDED: [&str; 2] = ["LD_PRELOAD", "TIDEGATE_RUN"];

static AT_BEGIN: OnceLock<Vec<CString>> = OnceLock::new();

fn string(name: &str, value: Vec<u8>) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", &value].concat()).ok()
}

/// Notes what is needed, before the program may change it, and gives the descriptors
/// that the program before this one has handed down.
pub(crate) fn read_at_begin() -> Vec<i32> {
    let value = |name: &&str| string(name, std::env::var_os(name)?.into_vec());
    AT_BEGIN.get_or_init(|| NEEDED.iter().filter_map(value).collect());
    let Ok(told) = std::env::var(HANDED_DOWN) else { return Vec::new() };
    // SAFETY: the library has just been loaded: no other thread is there.
    unsafe { std::env::remove_var(HANDED_DOWN) };
    told.split(',').filter_map(|fd| fd.parse().ok()).collect()
}

/// The environment of the next program, which was to be `given`.
pub(crate) fn of_next<'a>(given: impl Iterator<Item = &'a CStr>, fds: &[i32]) -> Vec<CString> {
    let name = |string: &CStr| {
        let mut parts = string.to_bytes().split(|&byte| byte == b'=');
        parts.next().unwrap_or_default().to_vec()
    };
    let mut all: Vec<CString> = given.map(CStr::to_owned).collect();
    all.retain(|string| name(string) != HANDED_DOWN.as_bytes());
    for needed in AT_BEGIN.get().into_iter().flatten() {
        if !all.iter().any(|string| name(string) == name(needed)) {
            all.push(needed.clone());
        }
    }
    let fds: Vec<String> = fds.iter().map(i32::to_string).collect();
    all.extend(string(HANDED_DOWN, fds.join(",").into_bytes()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_program_is_told_once_and_keeps_the_rest() {
        let given = [c"PATH=/bin", c"TIDEGATE_HANDED_DOWN=9", c"TIDEGATE_HANDED_DOWNS=1", c"odd"];
        let got = of_next(given.into_iter(), &[3, 17]);
        let kept = [c"PATH=/bin", c"TIDEGATE_HANDED_DOWNS=1", c"odd"];
        assert_eq!(got[..3], kept.map(CStr::to_owned));
        assert_eq!(got.last().map(|last| &**last), Some(c"TIDEGATE_HANDED_DOWN=3,17"));
    }
}
