//! Counters of a serving loop.

mod sys;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a serving loop. Another thread may read them while the loop runs.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ServeCounters {
    /// Datagrams passed to the responder.
    pub requests: AtomicU64,
    /// Replies passed to the stack or accepted by the kernel.
    pub replies: AtomicU64,
    /// Datagrams longer than the buffers, dropped before the responder. Always 0 on Tidegate,
    /// where the stack counts them by drop reason.
    pub oversized: AtomicU64,
    /// Replies that the kernel did not send: no route, or a full buffer. Always 0 on Tidegate,
    /// where the stack counts them by drop reason.
    pub unsent: AtomicU64,
}

impl ServeCounters {
    /// Counters that all start at zero.
    pub const fn new() -> Self {
        ServeCounters {
            requests: AtomicU64::new(0),
            replies: AtomicU64::new(0),
            oversized: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    /// Creates the file `path` and maps counters in it until the process ends: four 64-bit
    /// numbers in the order of the fields, in native byte order. Reading the file does not
    /// disturb the server, however busy the server is.
    ///
    /// # Errors
    /// When the file cannot be created or mapped.
    pub fn create_mapped(path: &Path) -> io::Result<&'static ServeCounters> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(size_of::<ServeCounters>() as u64)?;
        sys::map(&file)
    }

    /// Reads a file made by [`ServeCounters::create_mapped`]: requests, replies, oversized, unsent.
    ///
    /// # Errors
    /// When the file cannot be read or is too short.
    pub fn read_file(path: &Path) -> io::Result<[u64; 4]> {
        let bytes = std::fs::read(path)?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        words.try_into().map_err(|_| io::ErrorKind::UnexpectedEof.into())
    }

    /// Adds `count` to a counter; several threads may share the counters.
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_counters_back_from_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counters");
        let counters = ServeCounters::create_mapped(&path).unwrap();
        assert_eq!(ServeCounters::read_file(&path).unwrap(), [0; 4]);
        ServeCounters::add(&counters.requests, 7);
        ServeCounters::add(&counters.unsent, 9);
        assert_eq!(ServeCounters::read_file(&path).unwrap(), [7, 0, 0, 9]);
        std::fs::write(folder.path().join("short"), b"short").unwrap();
        assert!(ServeCounters::read_file(&folder.path().join("short")).is_err());
        assert!(ServeCounters::create_mapped(folder.path()).is_err(), "a directory is not a file");
    }
}
