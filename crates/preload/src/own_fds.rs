//! Descriptors of the library, which the program does not know: above those of the program.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use tidegate_memory::own_fd;

use crate::real;

/// Lowest number of the library's descriptors where the program may have many.
const MAX_FLOOR: u64 = 4096;
/// Numbers from the floor on among which the descriptors of an embedded stack are.
const MAX_STACK_FDS: RawFd = 1024;

/// Gives descriptors of the library high numbers from now on: in the upper quarter of those that
/// the process may have.
pub(crate) fn hide() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes the two numbers.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0 {
        own_fd::hide_from((limit.rlim_cur / 4 * 3).min(MAX_FLOOR) as RawFd);
    }
}

/// Keeps the numbers of further descriptors of the library within a limit that has changed.
pub(crate) fn adapt_to_limit() {
    if own_fd::floor().is_some() {
        hide();
    }
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: reads flags.
    unsafe { real::fcntl64(fd, libc::F_GETFD, 0) != -1 }
}

/// Runs `open`, which opens an embedded stack, while all numbers below the floor are taken. The
/// devices' descriptors are listed afterwards; their numbers cannot change.
pub(crate) fn with_low_numbers_taken<R>(open: impl FnOnce() -> R) -> R {
    let (Some(floor), Ok(null)) = (own_fd::floor(), File::open("/dev/null")) else {
        return open();
    };
    let high = floor..floor.saturating_add(MAX_STACK_FDS);
    let before: Vec<RawFd> = high.clone().filter(|&fd| is_open(fd)).collect();
    let mut taken: Vec<OwnedFd> = Vec::new();
    while let Ok(copy) = null.try_clone() {
        if copy.as_raw_fd() >= floor {
            break;
        }
        taken.push(copy.into());
    }
    let opened = open();
    drop((taken, null));
    high.filter(|fd| is_open(*fd) && !before.contains(fd)).for_each(own_fd::list_fixed);
    opened
}
