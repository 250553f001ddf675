//! Duplicated descriptors of kernel sockets. When such a socket moves to Tidegate, all its
//! descriptors move.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::fd_table::MAX_FDS;
use crate::socket::options;

const WORD_BITS: usize = u64::BITS as usize;

/// A bit for each descriptor that was duplicated from another one, or to another one. No lock: a
/// forked child may use the set at once.
static DUPLICATED: [AtomicU64; MAX_FDS / WORD_BITS] = [const { AtomicU64::new(0) }; _];
/// True once a bit was set.
static HAS_ANY: AtomicBool = AtomicBool::new(false);

fn word_and_bit(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((DUPLICATED.get(fd / WORD_BITS)?, 1 << (fd % WORD_BITS)))
}

/// Called after `old` was duplicated to `new`, both descriptors of the kernel.
pub(crate) fn note(old: i32, new: i32) {
    if options::protocol_and_family(new).is_none() {
        return forget(new);
    }
    HAS_ANY.store(true, Ordering::Relaxed);
    for (word, bit) in [old, new].into_iter().filter_map(word_and_bit) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Called when a descriptor is closed.
#[inline]
pub(crate) fn forget(fd: i32) {
    if HAS_ANY.load(Ordering::Relaxed)
        && let Some((word, bit)) = word_and_bit(fd)
    {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Other descriptors of the same kernel socket.
pub(crate) fn others(fd: i32) -> Vec<i32> {
    let is_noted = HAS_ANY.load(Ordering::Relaxed)
        && word_and_bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0);
    let Some(cookie) = is_noted.then(|| options::cookie(fd)).flatten() else { return Vec::new() };
    let is_same = |&other: &i32| other != fd && options::cookie(other) == Some(cookie);
    noted().filter(is_same).collect()
}

/// All descriptors whose bit is set.
fn noted() -> impl Iterator<Item = i32> {
    DUPLICATED.iter().enumerate().flat_map(|(index, word)| {
        let bits = word.load(Ordering::Relaxed);
        let set = (0..WORD_BITS).filter(move |bit| bits >> bit & 1 != 0);
        set.map(move |bit| (index * WORD_BITS + bit) as i32)
    })
}
