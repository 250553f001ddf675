//! poll and select.

use std::time::{Duration, Instant};

use libc::{c_int, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::errno;
use crate::{poll as list, raw, real, table};

/// # Safety
/// There are `count` entries; the mask is null or valid.
unsafe fn wait(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    if fds.is_null() || count == 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let (fds, mask) =
        unsafe { (std::slice::from_raw_parts_mut(fds, count as usize), mask.as_ref()) };
    list::has_ours(fds).then(|| errno::count(list::poll(fds, timeout, mask)) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        wait(fds, count, raw::milliseconds(timeout), std::ptr::null())
            .unwrap_or_else(|| real::poll(fds, count, timeout))
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    _room: size_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { poll(fds, count, timeout) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        raw::time(timeout)
            .ok()
            .and_then(|time| wait(fds, count, time, mask))
            .unwrap_or_else(|| real::ppoll(fds, count, timeout, mask))
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    _room: size_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { ppoll(fds, count, timeout, mask) }
}

/// The three sets of `select`. They may be longer than `fd_set` says.
#[derive(Clone, Copy)]
struct Sets([*mut fd_set; 3]);

/// What each set waits for, and what it is told.
const WAITS: [i16; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
const TOLD: [i16; 3] =
    [libc::POLLIN | libc::POLLHUP | libc::POLLERR, libc::POLLOUT | libc::POLLERR, libc::POLLPRI];

const WORD_BITS: usize = usize::BITS as usize;

impl Sets {
    /// # Safety
    /// The set is null or has a word for `fd`.
    unsafe fn has(self, set: usize, fd: usize) -> bool {
        let words = self.0[set].cast::<usize>();
        // SAFETY: the caller's promise.
        !words.is_null() && unsafe { words.add(fd / WORD_BITS).read() } & 1 << (fd % WORD_BITS) != 0
    }

    /// The list of what is in any of the sets.
    ///
    /// # Safety
    /// The sets have room for `count` descriptors.
    unsafe fn list(self, count: usize) -> Vec<pollfd> {
        let one = |fd: usize| {
            let waits = (0..3)
                // SAFETY: the caller's promise.
                .filter(|&set| unsafe { self.has(set, fd) })
                .fold(0, |all, set| all | WAITS[set]);
            (waits != 0).then_some(pollfd { fd: fd as c_int, events: waits, revents: 0 })
        };
        (0..count).filter_map(one).collect()
    }

    /// Writes what was found; gives how many bits are set.
    ///
    /// # Safety
    /// As [`Sets::list`].
    unsafe fn put(self, count: usize, found: &[pollfd]) -> usize {
        let mut bits = 0;
        for set in 0..3 {
            let words = self.0[set].cast::<usize>();
            if words.is_null() {
                continue;
            }
            // SAFETY: the caller's promise, for this and the rest.
            unsafe { words.write_bytes(0, count.div_ceil(WORD_BITS)) };
            let told = found
                .iter()
                .filter(|one| one.events & WAITS[set] != 0 && one.revents & TOLD[set] != 0);
            for one in told {
                let fd = one.fd as usize;
                // SAFETY: it came from `list`, so it is below `count`.
                unsafe { *words.add(fd / WORD_BITS) |= 1 << (fd % WORD_BITS) };
                bits += 1;
            }
        }
        bits
    }
}

/// # Safety
/// The sets have room for `count` descriptors; the mask is null or valid.
unsafe fn select_list(
    count: c_int,
    sets: Sets,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    let count = usize::try_from(count).ok()?;
    // SAFETY: the caller's promise.
    let mut fds = unsafe { sets.list(count) };
    if !fds.iter().any(|fd| table::is_ours(fd.fd)) {
        return None;
    }
    // SAFETY: the caller's promise.
    let result = list::poll(&mut fds, timeout, unsafe { mask.as_ref() });
    let result = result.and_then(|_| {
        match fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
            true => Err(std::io::Error::from_raw_os_error(libc::EBADF)),
            // SAFETY: the caller's promise.
            false => Ok(unsafe { sets.put(count, &fds) }),
        }
    });
    Some(errno::count(result) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn select(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    others: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program's own argument.
    let limit = unsafe { timeout.as_ref() }.map(|time| {
        let us = u32::try_from(time.tv_usec).unwrap_or(0);
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + Duration::from_micros(us.into())
    });
    let began = Instant::now();
    // SAFETY: the program's own arguments.
    unsafe {
        let sets = Sets([reads, writes, others]);
        let Some(result) = select_list(count, sets, limit, std::ptr::null()) else {
            return real::select(count, reads, writes, others, timeout);
        };
        // Linux tells what is left of the time.
        if let (Some(limit), Some(time)) = (limit, timeout.as_mut()) {
            let left = limit.saturating_sub(began.elapsed());
            time.tv_sec = left.as_secs() as i64;
            time.tv_usec = left.subsec_micros().into();
        }
        result
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pselect(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    others: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        raw::time(timeout)
            .ok()
            .and_then(|time| select_list(count, Sets([reads, writes, others]), time, mask))
            .unwrap_or_else(|| real::pselect(count, reads, writes, others, timeout, mask))
    }
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the arguments are made here")]
mod tests {
    use super::*;

    #[test]
    fn sets_become_a_list_and_back() {
        let mut reads = [0usize; 16];
        let mut writes = [0usize; 16];
        reads[0] = 1 << 3;
        writes[0] = 1 << 3;
        writes[130 / WORD_BITS] = 1 << (130 % WORD_BITS);
        let sets =
            Sets([reads.as_mut_ptr().cast(), writes.as_mut_ptr().cast(), std::ptr::null_mut()]);
        let mut fds = unsafe { sets.list(200) };
        assert_eq!(fds.iter().map(|fd| fd.fd).collect::<Vec<_>>(), [3, 130]);
        assert_eq!(fds[0].events, libc::POLLIN | libc::POLLOUT);
        fds[0].revents = libc::POLLHUP;
        fds[1].revents = libc::POLLOUT;
        assert_eq!(unsafe { sets.put(200, &fds) }, 2);
        assert_eq!((reads[0], writes[0], writes[2]), (1 << 3, 0, 1 << 2));
    }
}
