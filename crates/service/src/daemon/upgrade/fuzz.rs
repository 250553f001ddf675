//! Untrusted snapshots: body of the fuzz target `daemon_state`, also run on its seeds by the
//! tests. Not compiled into a daemon.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use tidegate_memory::shared::Region;

use super::restore::restore;
use super::snapshot::{DaemonSnapshot, FDS_PER_MEMORY};
use crate::daemon::quota::AppSettings;
use crate::daemon::transfer::table::{SocketTransfer, TransferTable};
use crate::daemon::workers::{AppWaker, UserWorkers};
use crate::ipc::layout::Geometry;

/// Limits of a snapshot under test: words of eight bytes in a memory region, and descriptors.
const MAX_REGION_WORDS: usize = 1 << 20;
const MAX_DESCRIPTORS: usize = 32;

/// Outcome for some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The bytes are no snapshot.
    Unreadable,
    /// A snapshot that no daemon can restore.
    Refused,
    /// A snapshot that a daemon could restore.
    Accepted,
}

/// Restores a daemon from bytes, with as many descriptors as they state, and drives its
/// applications as a core would.
pub fn check(bytes: &[u8]) -> Outcome {
    let Ok(state) = DaemonSnapshot::decode(bytes) else { return Outcome::Unreadable };
    let others = state.count_descriptors() - FDS_PER_MEMORY * state.memories.len();
    let Ok(descriptors) = descriptors(&state.memories, others) else { return Outcome::Refused };
    let (workers, _) = UserWorkers::new();
    let restored = restore(state, descriptors, AppSettings::default(), &workers);
    let Ok((_, mut restored, _)) = restored else { return Outcome::Refused };
    let is_there = |transfer: &SocketTransfer| restored.sockets.get(transfer.key).is_some();
    if TransferTable::restore(restored.transfers, 0, is_there).is_err() {
        return Outcome::Refused;
    }
    let mut waker = AppWaker::new();
    for app in restored.apps.iter_mut().flatten() {
        for place in [0, 3, u32::MAX] {
            let _ = app.notify_changed(place);
            app.slots.remove(place, false);
        }
        let _ = (app.next_command(), app.slots.reserve(), app.publish_notifications(0, &mut waker));
    }
    Outcome::Accepted
}

fn descriptors(memories: &[Geometry], others: usize) -> io::Result<Vec<OwnedFd>> {
    if FDS_PER_MEMORY * memories.len() + others > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut descriptors = Vec::new();
    for geometry in memories {
        let sizes = match geometry.is_valid() {
            true => [geometry.control_words(), geometry.data_words()],
            false => [1, 1],
        };
        for words in sizes {
            if words > MAX_REGION_WORDS {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            descriptors.push(Region::reserve(words)?.as_fd().try_clone_to_owned()?);
        }
    }
    for _ in 0..others {
        descriptors.push(UnixStream::pair()?.0.into());
    }
    Ok(descriptors)
}
