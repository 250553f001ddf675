//! Takeover token: proves that a process is a child of an attached process.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes of a takeover token.
pub const TOKEN_BYTES: usize = 16;

/// Secret random number. A process that has the token may take over the sockets of the
/// application that received it.
#[derive(Clone, Copy)]
pub struct TakeoverToken([u8; TOKEN_BYTES]);

impl TakeoverToken {
    /// Creates a random token.
    ///
    /// # Errors
    /// Errors of `getrandom`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(random_bytes()?))
    }

    pub(crate) fn from_bytes(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; TOKEN_BYTES] {
        &self.0
    }

    /// Compares two tokens in constant time.
    pub fn ct_eq(&self, other: &Self) -> bool {
        let different = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(different) == 0
    }
}

impl std::fmt::Debug for TakeoverToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TakeoverToken")
    }
}

/// Random bytes from the kernel's generator.
pub(super) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            // A request this small is always returned whole.
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
    fn token_equals_only_itself() {
        let (one, other) = (TakeoverToken::new().unwrap(), TakeoverToken::new().unwrap());
        assert!(one.ct_eq(&TakeoverToken::from_bytes(*one.bytes())));
        assert!(!one.ct_eq(&other));
        for byte in 0..TOKEN_BYTES {
            let mut bytes = *one.bytes();
            bytes[byte] ^= 1;
            assert!(!one.ct_eq(&TakeoverToken::from_bytes(bytes)));
        }
    }
}
