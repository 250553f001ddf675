//! The word by which the daemon tells how a socket stands.

use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use super::failure;

/// How far a socket has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// There is none in this place.
    #[default]
    Free,
    /// A UDP socket.
    Datagram,
    /// Listens for connections.
    Listening,
    /// A connection that is not established yet.
    Connecting,
    /// A connection.
    Connected,
    /// A connection that is over.
    Over,
}

const PHASES: [Phase; 6] = [
    Phase::Free,
    Phase::Datagram,
    Phase::Listening,
    Phase::Connecting,
    Phase::Connected,
    Phase::Over,
];

/// How a socket stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Which of the sockets that were in this place it is.
    pub generation: u32,
    /// How far it has come.
    pub phase: Phase,
    /// Nothing comes any more but what the stream holds.
    pub read_closed: bool,
    /// Nothing can be sent any more.
    pub write_closed: bool,
    /// Connections wait to be accepted.
    pub acceptable: bool,
    /// Several processes have it.
    pub shared: bool,
    /// The last error.
    pub error: Option<ErrorKind>,
    /// Counts errors, so that a new one is known from an old one.
    pub errors: u8,
}

const READ_CLOSED: u64 = 1 << 8;
const WRITE_CLOSED: u64 = 1 << 9;
const ACCEPTABLE: u64 = 1 << 10;
const SHARED: u64 = 1 << 11;

impl Status {
    /// The status as a word.
    pub fn to_word(self) -> u64 {
        let flag = |set: bool, bit| if set { bit } else { 0 };
        let place = PHASES.iter().position(|&phase| phase == self.phase).unwrap_or(0);
        place as u64
            | flag(self.read_closed, READ_CLOSED)
            | flag(self.write_closed, WRITE_CLOSED)
            | flag(self.acceptable, ACCEPTABLE)
            | flag(self.shared, SHARED)
            | u64::from(self.error.map_or(0, failure::to_number)) << 16
            | u64::from(self.errors) << 24
            | u64::from(self.generation) << 32
    }

    /// Whatever the word is, it is some status.
    pub fn from_word(word: u64) -> Self {
        Self {
            generation: (word >> 32) as u32,
            phase: PHASES.get(usize::from(word as u8)).copied().unwrap_or_default(),
            read_closed: word & READ_CLOSED != 0,
            write_closed: word & WRITE_CLOSED != 0,
            acceptable: word & ACCEPTABLE != 0,
            shared: word & SHARED != 0,
            error: failure::from_number((word >> 16) as u8),
            errors: (word >> 24) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_comes_back_as_it_was() {
        for phase in PHASES {
            let status = Status {
                generation: 0xdead_beef,
                phase,
                read_closed: phase == Phase::Over,
                write_closed: phase == Phase::Connected,
                acceptable: phase == Phase::Listening,
                shared: phase == Phase::Datagram,
                error: Some(ErrorKind::ConnectionReset),
                errors: 255,
            };
            assert_eq!(Status::from_word(status.to_word()), status);
        }
        assert_eq!(Status::from_word(0), Status::default());
        assert_eq!(Status::from_word(u64::MAX).phase, Phase::Free);
    }
}
