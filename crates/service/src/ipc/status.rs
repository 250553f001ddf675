//! Status word of a socket, written by the daemon and read by the application.

use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use super::error_code;

/// State of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketState {
    /// No socket in this slot.
    #[default]
    Free,
    /// UDP socket.
    Datagram,
    /// Listener.
    Listening,
    /// Connection that is not established yet.
    Connecting,
    /// Established connection.
    Connected,
    /// Connection that has ended.
    Over,
}

const STATES: [SocketState; 6] = [
    SocketState::Free,
    SocketState::Datagram,
    SocketState::Listening,
    SocketState::Connecting,
    SocketState::Connected,
    SocketState::Over,
];

/// Status of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Generation of the socket's handle.
    pub generation: u32,
    /// State of the socket.
    pub state: SocketState,
    /// No more data arrives than the stream already holds.
    pub read_closed: bool,
    /// No more data can be sent.
    pub write_closed: bool,
    /// Connections wait in the accept queue.
    pub accept_ready: bool,
    /// Several processes hold the socket.
    pub shared: bool,
    /// Last error.
    pub error: Option<ErrorKind>,
    /// Counts errors (wraps around), to tell a new error from an old error.
    pub error_count: u8,
}

const READ_CLOSED: u64 = 1 << 8;
const WRITE_CLOSED: u64 = 1 << 9;
const ACCEPT_READY: u64 = 1 << 10;
const SHARED: u64 = 1 << 11;

impl Status {
    /// Encodes the status.
    pub fn to_word(self) -> u64 {
        let flag = |set: bool, bit| if set { bit } else { 0 };
        let index = STATES.iter().position(|&phase| phase == self.state).unwrap_or(0);
        index as u64
            | flag(self.read_closed, READ_CLOSED)
            | flag(self.write_closed, WRITE_CLOSED)
            | flag(self.accept_ready, ACCEPT_READY)
            | flag(self.shared, SHARED)
            | u64::from(self.error.map_or(0, error_code::to_number)) << 16
            | u64::from(self.error_count) << 24
            | u64::from(self.generation) << 32
    }

    /// Decodes a status. Every word is a valid status.
    pub fn from_word(word: u64) -> Self {
        Self {
            generation: (word >> 32) as u32,
            state: STATES.get(usize::from(word as u8)).copied().unwrap_or_default(),
            read_closed: word & READ_CLOSED != 0,
            write_closed: word & WRITE_CLOSED != 0,
            accept_ready: word & ACCEPT_READY != 0,
            shared: word & SHARED != 0,
            error: error_code::from_number((word >> 16) as u8),
            error_count: (word >> 24) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_round_trips() {
        for state in STATES {
            let status = Status {
                generation: 0xdead_beef,
                state,
                read_closed: state == SocketState::Over,
                write_closed: state == SocketState::Connected,
                accept_ready: state == SocketState::Listening,
                shared: state == SocketState::Datagram,
                error: Some(ErrorKind::ConnectionReset),
                error_count: 255,
            };
            assert_eq!(Status::from_word(status.to_word()), status);
        }
        assert_eq!(Status::from_word(0), Status::default());
        assert_eq!(Status::from_word(u64::MAX).state, SocketState::Free);
    }
}
