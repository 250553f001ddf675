//! `setrlimit`: the memory and the descriptors of a process.
//!
//! The memory that an attached application shares with its daemon takes many addresses but few
//! pages. So a limit of addresses (`RLIMIT_AS`) becomes a limit of the application's own memory
//! (`RLIMIT_DATA`), and the addresses of shared memory come on top.
//!
//! A wait polls some descriptors of the library, and the kernel lets no process poll more
//! descriptors than it may open.

use libc::{c_int, pid_t, rlimit};

use crate::{own_fds, real, runtime};

type Resource = libc::__rlimit_resource_t;

/// Addresses, in bytes, that an application may use beyond its own limit.
const ADDRESS_ALLOWANCE: u64 = 1 << 40;

/// Descriptors that an application may open at least, so that its waits can poll.
const MIN_DESCRIPTORS: u64 = 16;

/// Limit of descriptors in place of one that the application wants, within the present limit.
fn with_polled_descriptors(wanted: rlimit, present: rlimit) -> rlimit {
    let rlim_max = wanted.rlim_max.max(MIN_DESCRIPTORS.min(present.rlim_max));
    rlimit { rlim_cur: wanted.rlim_cur.max(MIN_DESCRIPTORS.min(rlim_max)), rlim_max }
}

/// Limit of addresses in place of one that the application wants, within the present limit.
fn with_allowance(wanted: rlimit, present: rlimit) -> rlimit {
    // An unlimited value is the largest.
    let add = |value: u64| value.saturating_add(ADDRESS_ALLOWANCE);
    let rlim_max = add(wanted.rlim_max).min(present.rlim_max).max(wanted.rlim_max);
    rlimit { rlim_cur: add(wanted.rlim_cur).min(rlim_max), rlim_max }
}

/// Limit of own memory for a limit of addresses, when the process already has `used` bytes.
fn own_memory_limit(wanted: rlimit, present: rlimit, used: u64) -> rlimit {
    let add = |value: u64| value.saturating_add(used);
    rlimit {
        rlim_cur: add(wanted.rlim_cur).min(present.rlim_cur),
        rlim_max: add(wanted.rlim_max).min(present.rlim_max),
    }
}

fn present(resource: Resource) -> rlimit {
    let mut limit = rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel writes the two numbers.
    unsafe { real::prlimit64(0, resource, std::ptr::null(), &raw mut limit) };
    limit
}

/// `prlimit64` of the descriptors of this process. Further descriptors of the library are below the
/// new limit.
///
/// # Safety
/// `before` is null or valid.
unsafe fn limit_descriptors(wanted: rlimit, before: *mut rlimit) -> c_int {
    let wanted = match runtime::uses_daemon() {
        true => with_polled_descriptors(wanted, present(libc::RLIMIT_NOFILE)),
        false => wanted,
    };
    // SAFETY: as the application's call, with another limit.
    let result = unsafe { real::prlimit64(0, libc::RLIMIT_NOFILE, &raw const wanted, before) };
    if result == 0 {
        own_fds::adapt_to_limit();
    }
    result
}

/// Bytes of own memory that this process has; `None` where they cannot be read.
fn used_bytes() -> Option<u64> {
    let counts = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = counts.split(' ').nth(5)?.parse().ok()?;
    // SAFETY: reads a constant of the system.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Some(pages * u64::try_from(page_bytes).ok()?)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prlimit64(
    process: pid_t,
    resource: Resource,
    wanted: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    let is_own = process == 0 || process == std::process::id() as pid_t;
    // SAFETY: the application's own argument.
    let own = unsafe { wanted.as_ref() }.filter(|_| is_own);
    if let Some(own) = own.filter(|_| resource == libc::RLIMIT_NOFILE) {
        // SAFETY: the application's own argument.
        return unsafe { limit_descriptors(*own, before) };
    }
    let given = own.filter(|wanted| {
        let is_limit = wanted.rlim_cur != libc::RLIM_INFINITY;
        resource == libc::RLIMIT_AS && is_limit && runtime::uses_daemon()
    });
    let Some(given) = given else {
        // SAFETY: the application's own call.
        return unsafe { real::prlimit64(process, resource, wanted, before) };
    };
    let addresses = with_allowance(*given, present(libc::RLIMIT_AS));
    // SAFETY: as the application's call, with another limit.
    let result = unsafe { real::prlimit64(process, resource, &raw const addresses, before) };
    if result == 0
        && let Some(used) = used_bytes()
    {
        let own = own_memory_limit(*given, present(libc::RLIMIT_DATA), used);
        // SAFETY: a limit of this process, no higher than the present one.
        unsafe { real::prlimit64(0, libc::RLIMIT_DATA, &raw const own, std::ptr::null_mut()) };
    }
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prlimit(
    process: pid_t,
    resource: Resource,
    wanted: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { prlimit64(process, resource, wanted, before) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setrlimit64(resource: Resource, wanted: *const rlimit) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { prlimit64(0, resource, wanted, std::ptr::null_mut()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setrlimit(resource: Resource, wanted: *const rlimit) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { setrlimit64(resource, wanted) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_of_descriptors_leaves_space_for_a_wait() {
        let limit = |rlim_cur, rlim_max| rlimit { rlim_cur, rlim_max };
        for (wanted, present, expected) in [
            ((0, 0), (1024, 4096), (16, 16)),
            ((0, 4096), (1024, 4096), (16, 4096)),
            ((512, 1024), (1024, 4096), (512, 1024)),
            ((0, 0), (7, 7), (7, 7)),
            ((20, 30), (7, 7), (20, 30)),
        ] {
            let got =
                with_polled_descriptors(limit(wanted.0, wanted.1), limit(present.0, present.1));
            assert_eq!((got.rlim_cur, got.rlim_max), expected, "{wanted:?} within {present:?}");
        }
    }

    #[test]
    fn limit_of_addresses_leaves_space_for_shared_memory() {
        const UNLIMITED: u64 = libc::RLIM_INFINITY;
        let limit = |rlim_cur, rlim_max| rlimit { rlim_cur, rlim_max };
        let numbers = |limit: rlimit| (limit.rlim_cur, limit.rlim_max);
        let unlimited = limit(UNLIMITED, UNLIMITED);
        let addresses = |wanted, present| numbers(with_allowance(wanted, present));
        let more = ADDRESS_ALLOWANCE + 5;
        assert_eq!(addresses(limit(5, 5), unlimited), (more, more));
        assert_eq!(addresses(limit(5, UNLIMITED), unlimited), (more, UNLIMITED));
        // A limit that the process may not raise.
        assert_eq!(addresses(limit(5, 7), limit(100, 100)), (100, 100));
        // The kernel refuses more than the present limit.
        assert_eq!(addresses(limit(5, 200), limit(100, 100)), (200, 200));
        assert_eq!(numbers(own_memory_limit(limit(5, 9), unlimited, 10)), (15, 19));
        assert_eq!(numbers(own_memory_limit(limit(5, 9), limit(12, 12), 10)), (12, 12));
    }
}
