//! What proves that a process is a child of one that is attached.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes of a ticket.
pub const TICKET_BYTES: usize = 16;

/// A number that nobody can guess: whoever knows it may take over the sockets of
/// the application that it was given to.
#[derive(Clone, Copy)]
pub struct Ticket([u8; TICKET_BYTES]);

impl Ticket {
    /// A new one.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new() -> io::Result<Self> {
        Ok(Self(random()?))
    }

    pub(crate) fn from_bytes(bytes: [u8; TICKET_BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; TICKET_BYTES] {
        &self.0
    }

    /// Whether it is the same. It takes as long whatever is different.
    pub fn is(&self, other: &Self) -> bool {
        let different = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(different) == 0
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket")
    }
}

/// Bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            // So few come all at once.
            Ok(_) => return Ok(bytes),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_itself_and_no_other() {
        let (one, other) = (Ticket::new().unwrap(), Ticket::new().unwrap());
        assert!(one.is(&Ticket::from_bytes(*one.bytes())));
        assert!(!one.is(&other));
        for byte in 0..TICKET_BYTES {
            let mut bytes = *one.bytes();
            bytes[byte] ^= 1;
            assert!(!one.is(&Ticket::from_bytes(bytes)));
        }
    }
}
