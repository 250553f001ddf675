//! Descriptors of this library in a process whose program does not know them.
//!
//! A program counts on the numbers of its descriptors: the next one is the lowest free number, all
//! beyond some number can be closed, and a chosen number can be overwritten. After [`hide_from`]
//! the library's descriptors have high numbers and are listed, so that the functions that replace
//! the C library's leave them alone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Maximum number of listed descriptors; further ones stay where they are.
const CAPACITY: usize = 4096;

/// Lowest number for descriptors of the library; 0 while they are not hidden.
static FLOOR: AtomicI32 = AtomicI32::new(0);
/// Listed descriptors: 0 is a free slot, `fd + 1` can change its number, `-(fd + 1)` cannot.
static SLOTS: [AtomicI32; CAPACITY] = [const { AtomicI32::new(0) }; CAPACITY];
/// Slots from here on were never used.
static USED_SLOTS: AtomicUsize = AtomicUsize::new(0);
/// Lowest number that was ever listed.
static LOWEST: AtomicI32 = AtomicI32::new(i32::MAX);

/// Gives descriptors of the library numbers from `floor` on from now on, and lists them.
pub fn hide_from(floor: RawFd) {
    FLOOR.store(floor, Ordering::Relaxed);
}

/// Lowest number for descriptors of the library, if they are hidden.
pub fn floor() -> Option<RawFd> {
    Some(FLOOR.load(Ordering::Relaxed)).filter(|&floor| floor > 0)
}

fn used_slots() -> &'static [AtomicI32] {
    &SLOTS[..USED_SLOTS.load(Ordering::Acquire)]
}

/// Lists an entry; returns its slot.
fn insert(entry: i32) -> Option<usize> {
    let is_free =
        |slot: &AtomicI32| slot.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Relaxed);
    let slot = SLOTS.iter().position(|slot| is_free(slot).is_ok())?;
    USED_SLOTS.fetch_max(slot + 1, Ordering::Release);
    LOWEST.fetch_min(entry.abs() - 1, Ordering::Release);
    Some(slot)
}

/// Lists an open descriptor of the library whose number cannot change.
pub fn list_fixed(fd: RawFd) {
    if !is_own(fd) {
        insert(-(fd + 1));
    }
}

/// True for a descriptor of the library.
#[inline]
pub fn is_own(fd: RawFd) -> bool {
    fd >= LOWEST.load(Ordering::Acquire) && entry_of(fd).is_some()
}

#[cold]
fn entry_of(fd: RawFd) -> Option<&'static AtomicI32> {
    used_slots().iter().find(|slot| slot.load(Ordering::Acquire).abs() == fd + 1)
}

/// Lowest descriptor of the library from `first` on.
pub fn next_own(first: RawFd) -> Option<RawFd> {
    let numbers = used_slots().iter().map(|slot| slot.load(Ordering::Acquire).abs() - 1);
    numbers.filter(|&fd| fd >= first.max(0)).min()
}

/// Gives up a descriptor whose number cannot change, before the library closes it. Returns false
/// for other descriptors.
pub fn unlist_fixed(fd: RawFd) -> bool {
    let Some(slot) = entry_of(fd) else { return false };
    slot.compare_exchange(-(fd + 1), 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Moves a descriptor of the library to another number, so that the program can have this one.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if the number cannot change; the kernel's error if there is no
/// other number.
pub fn relocate(fd: RawFd) -> io::Result<()> {
    let Some(slot) = entry_of(fd) else { return Ok(()) };
    if slot.load(Ordering::Acquire) < 0 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    // SAFETY: a listed descriptor is open; at worst its owner closes it now, and the call fails.
    let old = unsafe { BorrowedFd::borrow_raw(fd) };
    let new = rustix::io::fcntl_dupfd_cloexec(old, FLOOR.load(Ordering::Relaxed))?.into_raw_fd();
    LOWEST.fetch_min(new, Ordering::Release);
    if slot.compare_exchange(fd + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // Its owner has closed it meanwhile.
        // SAFETY: nothing else has the new descriptor.
        drop(unsafe { OwnedFd::from_raw_fd(new) });
    }
    Ok(())
}

/// Descriptor of the library. Its number is high and may change if descriptors are hidden.
#[derive(Debug)]
pub struct OwnFd(FdNumber);

#[derive(Debug)]
enum FdNumber {
    /// Descriptors were not hidden, or too many are listed.
    Visible(OwnedFd),
    /// Number in this slot, whose descriptor belongs to this value.
    Listed(usize),
}

impl From<OwnedFd> for OwnFd {
    fn from(fd: OwnedFd) -> Self {
        let Some(floor) = floor() else { return Self(FdNumber::Visible(fd)) };
        let high = match fd.as_raw_fd() >= floor {
            true => None,
            // Without a free high number it stays where it is.
            false => rustix::io::fcntl_dupfd_cloexec(&fd, floor).ok(),
        };
        let fd = high.unwrap_or(fd);
        Self(match insert(fd.as_raw_fd() + 1) {
            Some(slot) => {
                let _ = fd.into_raw_fd();
                FdNumber::Listed(slot)
            }
            None => FdNumber::Visible(fd),
        })
    }
}

impl AsFd for OwnFd {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            FdNumber::Visible(fd) => fd.as_fd(),
            FdNumber::Listed(slot) => {
                let number = SLOTS[*slot].load(Ordering::Acquire) - 1;
                // SAFETY: the descriptor in the slot belongs to this value and is open.
                unsafe { BorrowedFd::borrow_raw(number) }
            }
        }
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        if let FdNumber::Listed(slot) = self.0 {
            let number = SLOTS[slot].swap(0, Ordering::AcqRel) - 1;
            // Not by `OwnedFd`, which checks the descriptor in debug builds by a call that the
            // program may have forbidden (seccomp).
            // Fails in a forked child that has closed all its descriptors.
            // SAFETY: the descriptor in the slot belonged to this value, which ends.
            let _ = unsafe { rustix::io::try_close(number) };
        }
    }
}

#[cfg(all(test, not(miri), not(loom)))]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    /// One test, since the list is the process's.
    #[test]
    fn hidden_descriptors_are_high_listed_and_can_move() {
        let plain = OwnFd::from(event());
        assert!(!is_own(plain.as_fd().as_raw_fd()), "descriptors are not hidden yet");
        const FLOOR: RawFd = 500;
        hide_from(FLOOR);
        let (first, second) = (OwnFd::from(event()), OwnFd::from(event()));
        let number = |fd: &OwnFd| fd.as_fd().as_raw_fd();
        assert!(number(&first) >= FLOOR && number(&second) > number(&first));
        assert_eq!(next_own(0), Some(number(&first)));
        assert_eq!(next_own(number(&first) + 1), Some(number(&second)));
        assert!(is_own(number(&first)) && !is_own(FLOOR - 1) && !unlist_fixed(number(&first)));
        rustix::io::write(&first, &7_u64.to_ne_bytes()).unwrap();
        let old = number(&first);
        relocate(old).unwrap();
        assert!(number(&first) != old && !is_own(old) && is_own(number(&first)));
        let mut value = [0; 8];
        rustix::io::read(&first, &mut value).unwrap();
        assert_eq!(u64::from_ne_bytes(value), 7, "it is the same file");
        let closed = number(&second);
        // SAFETY: as a program does that closes all its descriptors.
        unsafe { rustix::io::try_close(closed) }.unwrap();
        drop(second);
        assert!(!is_own(closed));
        let fixed = event();
        list_fixed(fixed.as_raw_fd());
        let error = relocate(fixed.as_raw_fd()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(unlist_fixed(fixed.as_raw_fd()) && !is_own(fixed.as_raw_fd()));
        // SAFETY: the number was left open by the relocation, and nothing else has it.
        drop(unsafe { OwnedFd::from_raw_fd(old) });
        hide_from(0);
    }
}
