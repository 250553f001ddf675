//! What a serving loop counts.

mod sys;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a serving loop did so far. May be read from another thread while it
/// runs.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ServeCounters {
    /// Datagrams handed to the responder.
    pub requests: AtomicU64,
    /// Answers handed to the stack or taken by the kernel.
    pub answers: AtomicU64,
    /// Datagrams longer than the buffers, not handed to the responder. Always
    /// 0 on Tidegate, which counts them by reason.
    pub oversized: AtomicU64,
    /// Answers that the kernel refused to send: no route, a full buffer. Always
    /// 0 on Tidegate, which counts them by reason.
    pub unsent: AtomicU64,
}

impl ServeCounters {
    /// Counters that all stand at zero.
    pub const fn new() -> Self {
        ServeCounters {
            requests: AtomicU64::new(0),
            answers: AtomicU64::new(0),
            oversized: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    /// Counters that live in a file, made anew, until the process ends: four
    /// numbers of 64 bits in the order of the fields, in the machine's byte
    /// order. Who reads the file disturbs nobody, however busy the server is.
    ///
    /// # Errors
    /// When the file cannot be made or mapped.
    pub fn in_file(path: &Path) -> io::Result<&'static ServeCounters> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(size_of::<ServeCounters>() as u64)?;
        sys::map(&file)
    }

    /// Reads what [`ServeCounters::in_file`] keeps in a file: requests, answers,
    /// oversized, unsent.
    ///
    /// # Errors
    /// When the file cannot be read or is too short.
    pub fn read_file(path: &Path) -> io::Result<[u64; 4]> {
        let bytes = std::fs::read(path)?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        words.try_into().map_err(|_| io::ErrorKind::UnexpectedEof.into())
    }

    /// Adds one batch. Several threads may serve together.
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_in_a_file_are_read_from_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counters");
        let counters = ServeCounters::in_file(&path).unwrap();
        assert_eq!(ServeCounters::read_file(&path).unwrap(), [0; 4]);
        ServeCounters::add(&counters.requests, 7);
        ServeCounters::add(&counters.unsent, 9);
        assert_eq!(ServeCounters::read_file(&path).unwrap(), [7, 0, 0, 9]);
        std::fs::write(folder.path().join("short"), b"short").unwrap();
        assert!(ServeCounters::read_file(&folder.path().join("short")).is_err());
        assert!(ServeCounters::in_file(folder.path()).is_err(), "a folder is no file");
    }
}
