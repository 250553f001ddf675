//! Search for the file of a handle in the directories that its handle names.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags, RawDir, ResolveFlags, openat2};

use super::handle::FileHandle;
use super::names::Location;

/// No path and no symbolic link leads out of the directory, and no path into another file system,
/// where file numbers would be others.
pub(super) const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Directories between the top one and a file at most.
pub(super) const MAX_DEPTH: usize = 256;

/// Directory entries that a search reads at most: some 50 ms.
const MAX_ENTRIES: usize = 65_536;

/// Time that searches without success may take at once, and the part of the time that they may take
/// from then on: invented handles cost no more.
const MAX_VAIN: Duration = Duration::from_millis(100);
const VAIN_DIVISOR: u32 = 8;

/// Bytes of directory entries read at a time.
const BUFFER_BYTES: usize = 16 << 10;

/// Time that searches take.
#[derive(Debug, Default)]
pub(super) struct Search {
    began: Option<Instant>,
    /// Time of searches without success, less what has been allowed since.
    vain: Duration,
}

impl Search {
    /// Begins a search, unless too many were without success.
    pub(super) fn may_begin(&mut self) -> bool {
        let now = Instant::now();
        let since_last = self.began.replace(now).map_or(Duration::ZERO, |last| now - last);
        self.vain = self.vain.saturating_sub(since_last / VAIN_DIVISOR);
        self.vain < MAX_VAIN
    }

    /// Ends a search.
    pub(super) fn on_end(&mut self, has_found: bool) {
        if !has_found && let Some(began) = self.began {
            self.vain += began.elapsed();
        }
    }
}

/// Finds the file of a handle. Returns the file and the directories above it, by number.
pub(super) fn find(
    top: impl AsFd,
    top_id: u64,
    handle: &FileHandle,
) -> Option<Vec<(u64, Location)>> {
    let mut walk = Walk { handle, entries_left: MAX_ENTRIES, found: Vec::new() };
    let top = open_directory(top, b".")?;
    walk.enter(&top, top_id, 0).then_some(walk.found)
}

struct Walk<'h> {
    handle: &'h FileHandle,
    entries_left: usize,
    found: Vec<(u64, Location)>,
}

impl Walk<'_> {
    /// Searches a directory and those below. Returns true when the file was found.
    fn enter(&mut self, directory: &OwnedFd, directory_id: u64, depth: usize) -> bool {
        let Some(below) = self.read(directory, directory_id, depth) else { return true };
        if depth >= MAX_DEPTH {
            return false;
        }
        for (file_id, name) in below {
            let Some(next) = open_directory(directory, &name) else { continue };
            if self.enter(&next, file_id, depth + 1) {
                self.found.push((file_id, Location { directory_id, name }));
                return true;
            }
        }
        false
    }

    /// Reads a directory. Returns the directories in it that can be above the file, or `None` when
    /// the file is in this directory.
    fn read(
        &mut self,
        directory: &OwnedFd,
        directory_id: u64,
        depth: usize,
    ) -> Option<Vec<(u64, Box<[u8]>)>> {
        let mut below = Vec::new();
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut entries = RawDir::new(directory, &mut buffer);
        while let Some(Ok(entry)) = entries.next() {
            let Some(entries_left) = self.entries_left.checked_sub(1) else { break };
            self.entries_left = entries_left;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if entry.ino() == self.handle.file_id {
                let location = Location { directory_id, name: name.into() };
                self.found.push((entry.ino(), location));
                return None;
            }
            let is_directory = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
            if is_directory && self.handle.can_be_below(entry.ino(), depth) {
                below.push((entry.ino(), name.into()));
            }
        }
        Some(below)
    }
}

fn open_directory(directory: impl AsFd, name: &[u8]) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(directory, name, flags, Mode::empty(), RESOLVE).ok()
}
