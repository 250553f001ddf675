//! `poll` and `select`.

use std::time::{Duration, Instant};

use libc::{c_int, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use crate::errno;
use crate::{fd_table, poll as list, raw, real};

/// Polls the descriptors if any is Tidegate's; `None` leaves the call to the kernel.
///
/// # Safety
/// `fds` has `count` entries; the mask is null or valid.
unsafe fn poll_if_tidegate(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    if fds.is_null() || count == 0 {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let (fds, mask) =
        unsafe { (std::slice::from_raw_parts_mut(fds, count as usize), mask.as_ref()) };
    list::has_tidegate_fd(fds).then(|| errno::return_count(list::poll(fds, timeout, mask)) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        poll_if_tidegate(fds, count, raw::ms_timeout(timeout), std::ptr::null())
            .unwrap_or_else(|| real::poll(fds, count, timeout))
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    _fds_bytes: size_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { poll(fds, count, timeout) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        raw::timespec_timeout(timeout)
            .ok()
            .and_then(|time| poll_if_tidegate(fds, count, time, mask))
            .unwrap_or_else(|| real::ppoll(fds, count, timeout, mask))
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    _fds_bytes: size_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { ppoll(fds, count, timeout, mask) }
}

/// The three sets of `select`, which may be longer than `fd_set`.
#[derive(Clone, Copy)]
struct FdSets([*mut fd_set; 3]);

/// Events that each set watches, and events that it reports.
const WATCHED_EVENTS: [i16; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
const REPORTED_EVENTS: [i16; 3] =
    [libc::POLLIN | libc::POLLHUP | libc::POLLERR, libc::POLLOUT | libc::POLLERR, libc::POLLPRI];

const WORD_BITS: usize = usize::BITS as usize;

impl FdSets {
    /// True when `fd` is in the set.
    ///
    /// # Safety
    /// The set is null or has a word for `fd`.
    unsafe fn contains(self, set: usize, fd: usize) -> bool {
        let words = self.0[set].cast::<usize>();
        // SAFETY: guaranteed by the caller.
        !words.is_null() && unsafe { words.add(fd / WORD_BITS).read() } & 1 << (fd % WORD_BITS) != 0
    }

    /// Descriptors that are in any of the sets, as a `poll` list.
    ///
    /// # Safety
    /// The sets have space for `count` descriptors.
    unsafe fn to_pollfds(self, count: usize) -> Vec<pollfd> {
        let one = |fd: usize| {
            let watched = (0..3)
                // SAFETY: guaranteed by the caller.
                .filter(|&set| unsafe { self.contains(set, fd) })
                .fold(0, |all, set| all | WATCHED_EVENTS[set]);
            (watched != 0).then_some(pollfd { fd: fd as c_int, events: watched, revents: 0 })
        };
        (0..count).filter_map(one).collect()
    }

    /// Writes the results of `poll`; returns the number of set bits.
    ///
    /// # Safety
    /// As [`FdSets::to_pollfds`].
    unsafe fn write_ready(self, count: usize, found: &[pollfd]) -> usize {
        let mut bits = 0;
        for set in 0..3 {
            let words = self.0[set].cast::<usize>();
            if words.is_null() {
                continue;
            }
            // SAFETY: guaranteed by the caller, for this call and below.
            unsafe { words.write_bytes(0, count.div_ceil(WORD_BITS)) };
            let ready = found.iter().filter(|one| {
                one.events & WATCHED_EVENTS[set] != 0 && one.revents & REPORTED_EVENTS[set] != 0
            });
            for one in ready {
                let fd = one.fd as usize;
                // SAFETY: the descriptor came from `to_pollfds`, so it is below `count`.
                unsafe { *words.add(fd / WORD_BITS) |= 1 << (fd % WORD_BITS) };
                bits += 1;
            }
        }
        bits
    }
}

/// `select` on the sets if any descriptor is Tidegate's; `None` leaves the call to the kernel.
///
/// # Safety
/// The sets have space for `count` descriptors; the mask is null or valid.
unsafe fn select_if_tidegate(
    count: c_int,
    sets: FdSets,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    let count = usize::try_from(count).ok()?;
    // SAFETY: guaranteed by the caller.
    let mut fds = unsafe { sets.to_pollfds(count) };
    if !fds.iter().any(|fd| fd_table::is_tidegate(fd.fd)) {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let result = list::poll(&mut fds, timeout, unsafe { mask.as_ref() });
    let result = result.and_then(|_| {
        match fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
            true => Err(std::io::Error::from_raw_os_error(libc::EBADF)),
            // SAFETY: guaranteed by the caller.
            false => Ok(unsafe { sets.write_ready(count, &fds) }),
        }
    });
    Some(errno::return_count(result) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn select(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the application's own argument.
    let limit = unsafe { timeout.as_ref() }.map(|time| {
        let us = u32::try_from(time.tv_usec).unwrap_or(0);
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + Duration::from_micros(us.into())
    });
    let started = Instant::now();
    // SAFETY: the application's own arguments.
    unsafe {
        let sets = FdSets([reads, writes, exceptional]);
        let Some(result) = select_if_tidegate(count, sets, limit, std::ptr::null()) else {
            return real::select(count, reads, writes, exceptional, timeout);
        };
        // Linux writes the remaining time back.
        if let (Some(limit), Some(time)) = (limit, timeout.as_mut()) {
            let remaining = limit.saturating_sub(started.elapsed());
            time.tv_sec = remaining.as_secs() as i64;
            time.tv_usec = remaining.subsec_micros().into();
        }
        result
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pselect(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        raw::timespec_timeout(timeout)
            .ok()
            .and_then(|time| {
                select_if_tidegate(count, FdSets([reads, writes, exceptional]), time, mask)
            })
            .unwrap_or_else(|| real::pselect(count, reads, writes, exceptional, timeout, mask))
    }
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the tests build the arguments")]
mod tests {
    use super::*;

    #[test]
    fn fd_sets_round_trip_through_pollfds() {
        let mut reads = [0usize; 16];
        let mut writes = [0usize; 16];
        reads[0] = 1 << 3;
        writes[0] = 1 << 3;
        writes[130 / WORD_BITS] = 1 << (130 % WORD_BITS);
        let sets =
            FdSets([reads.as_mut_ptr().cast(), writes.as_mut_ptr().cast(), std::ptr::null_mut()]);
        let mut fds = unsafe { sets.to_pollfds(200) };
        assert_eq!(fds.iter().map(|fd| fd.fd).collect::<Vec<_>>(), [3, 130]);
        assert_eq!(fds[0].events, libc::POLLIN | libc::POLLOUT);
        fds[0].revents = libc::POLLHUP;
        fds[1].revents = libc::POLLOUT;
        assert_eq!(unsafe { sets.write_ready(200, &fds) }, 2);
        assert_eq!((reads[0], writes[0], writes[2]), (1 << 3, 0, 1 << 2));
    }
}
