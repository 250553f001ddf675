//! Memory and descriptors that a process shares with its restorer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_memory::shared::{Region, SharedWords};

/// Words of the memory: the number of restorations, the end of the change, the length of the
/// record's text in bytes, then the text.
const RESTORATIONS: usize = 0;
const IS_OVER: usize = 1;
const TEXT_BYTES: usize = 2;
const TEXT: usize = 3;

/// Maximum size of the memory, in words.
const MAX_WORDS: usize = 1 << 16;

/// Part of a restorer process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestorerRole {
    /// Starts the leader and ends, so that the leader is no child of the changing process.
    Launcher,
    /// Restores the settings.
    Leader,
    /// Takes the place of the leader, a process with this ID, when the leader dies.
    Standby {
        /// Process ID of the leader.
        leader: u32,
    },
}

impl RestorerRole {
    /// Argument that gives a process this role.
    pub(super) fn argument(self) -> String {
        match self {
            Self::Launcher => "launcher".to_owned(),
            Self::Leader => "leader".to_owned(),
            Self::Standby { leader } => format!("standby:{leader}"),
        }
    }
}

/// A text names no role of a restorer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the role of a restorer: Tidegate starts restorers itself")]
pub struct UnknownRestorerRole(String);

impl FromStr for RestorerRole {
    type Err = UnknownRestorerRole;

    fn from_str(text: &str) -> Result<Self, UnknownRestorerRole> {
        match text {
            "launcher" => Ok(Self::Launcher),
            "leader" => Ok(Self::Leader),
            _ => text
                .strip_prefix("standby:")
                .and_then(|leader| Some(Self::Standby { leader: leader.parse().ok()? }))
                .ok_or_else(|| UnknownRestorerRole(text.to_owned())),
        }
    }
}

/// Memory that the changing process and its restorers share.
pub(super) struct Channel(Region);

impl Channel {
    /// Creates the memory for a change with this text of a record.
    pub(super) fn create(text: &str) -> io::Result<Self> {
        let channel = Self(Region::create(TEXT + text.len().div_ceil(size_of::<u64>()))?);
        channel.word(TEXT_BYTES).store(text.len() as u64, Ordering::Relaxed);
        let chunks = text.as_bytes().chunks(size_of::<u64>());
        for (word, chunk) in channel.0.words().iter().skip(TEXT).zip(chunks) {
            let mut bytes = [0; size_of::<u64>()];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        Ok(channel)
    }

    /// Maps the memory in a restorer.
    pub(super) fn open(fd: OwnedFd) -> io::Result<Self> {
        let region = Region::open(fd, MAX_WORDS)?;
        if region.words().len() < TEXT {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self(region))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.0.words()[index]
    }

    /// Text of the record.
    pub(super) fn text(&self) -> String {
        let words = self.0.words().iter().skip(TEXT);
        let mut bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes.truncate(self.word(TEXT_BYTES).load(Ordering::Relaxed) as usize);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Number of restorations so far: while the changing process was stopped.
    #[inline]
    pub(super) fn restorations(&self) -> u64 {
        self.word(RESTORATIONS).load(Ordering::Acquire)
    }

    /// Counts a restoration, once the settings are restored.
    pub(super) fn count_restoration(&self) {
        self.word(RESTORATIONS).fetch_add(1, Ordering::Release);
    }

    /// Ends the change: the restorers end.
    pub(super) fn end(&self) {
        self.word(IS_OVER).store(1, Ordering::Release);
    }

    /// True once the change has ended.
    pub(super) fn is_over(&self) -> bool {
        self.word(IS_OVER).load(Ordering::Acquire) != 0
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restorer_reads_what_the_process_wrote() {
        for text in ["", "8 bytes.", "interface 7 02:00:00:00:00:01\n"] {
            let channel = Channel::create(text).unwrap();
            let other = Channel::open(channel.as_fd().try_clone_to_owned().unwrap()).unwrap();
            assert_eq!(other.text(), text);
            assert_eq!(channel.restorations(), 0);
            other.count_restoration();
            assert_eq!(channel.restorations(), 1);
            assert!(!other.is_over());
            channel.end();
            assert!(other.is_over());
        }
    }

    #[test]
    fn role_is_parsed_from_its_argument() {
        for role in [
            RestorerRole::Launcher,
            RestorerRole::Leader,
            RestorerRole::Standby { leader: 4_000_000_000 },
        ] {
            assert_eq!(role.argument().parse(), Ok(role));
        }
        for text in ["", "standby", "standby:", "standby:-1", "leader "] {
            assert!(text.parse::<RestorerRole>().is_err(), "{text:?}");
        }
    }
}
