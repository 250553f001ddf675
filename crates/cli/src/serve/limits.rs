//! Limits of servers for streams, as flags and configuration give them.

use std::time::Duration;

use crate::Failure;

/// Sets the maximum number of connections, if one is given.
///
/// # Errors
/// If it is zero.
pub(super) fn set_connections(limit: &mut usize, given: Option<usize>) -> Result<(), Failure> {
    if given == Some(0) {
        return Err("--connections 0: no client would be served; give 1 or more".into());
    }
    *limit = given.unwrap_or(*limit);
    Ok(())
}

/// Sets the memory in bytes, if a number of MiB is given.
///
/// # Errors
/// If it is less than `min_mib`.
pub(super) fn set_memory(
    limit_bytes: &mut usize,
    given_mib: Option<usize>,
    min_mib: usize,
) -> Result<(), Failure> {
    let Some(mib) = given_mib else { return Ok(()) };
    if mib < min_mib {
        let advice = format!("too few clients would be served; give {min_mib} or more");
        return Err(format!("--memory {mib}: {advice}").into());
    }
    *limit_bytes = mib.saturating_mul(1 << 20);
    Ok(())
}

/// Sets a time limit, if a number of seconds is given; the shortest is a second.
pub(super) fn set_timeout(limit: &mut Duration, seconds: Option<u64>) {
    if let Some(seconds) = seconds {
        *limit = Duration::from_secs(seconds.max(1));
    }
}
