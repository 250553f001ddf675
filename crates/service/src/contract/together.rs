//! Sockets of one program that have one port together, each on a core of its own.

use std::io;

use super::ticket::random;

/// Numbers of parties with this bit are of sockets that have a port together; others
/// are those of users.
const TOGETHER: u64 = 1 << 63;

/// What sockets say that have one port together. Only who has made it knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together(u64);

impl Together {
    /// One that nobody else has.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new() -> io::Result<Self> {
        Ok(Self(u64::from_ne_bytes(random()?) | TOGETHER))
    }

    pub(super) fn to_word(together: Option<Self>) -> u64 {
        together.map_or(0, |Self(number)| number)
    }

    /// Whatever the word is, it is some number or none.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        (word & TOGETHER != 0).then_some(Self(word))
    }
}

/// Whether a socket of a user's shares its port, which it may say itself
/// (`SO_REUSEPORT`), and the party with whom it does.
pub fn shares(together: Option<Together>, reuse_port: bool, uid: u32) -> (bool, u64) {
    together.map_or((reuse_port, uid.into()), |Together(number)| (true, number))
}
