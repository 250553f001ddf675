//! Pseudo-random test data whose echo is checked byte by byte.

use std::io::{self, Read, Write};

/// Maximum size in bytes of one piece of data.
pub(super) const MAX_PIECE_BYTES: usize = 16 << 10;

/// Sequence of pseudo-random pieces, different for each seed. The check detects bytes that are
/// lost, duplicated, or from another sequence.
pub(super) struct EchoChecker {
    rng: fastrand::Rng,
    sent: Vec<u8>,
    received: Vec<u8>,
    checked_bytes: u64,
}

impl EchoChecker {
    pub(super) fn new(seed: u64) -> Self {
        let rng = fastrand::Rng::with_seed(seed);
        Self { rng, sent: Vec::new(), received: Vec::new(), checked_bytes: 0 }
    }

    /// Returns the next piece, of 1 to `max_len` bytes.
    pub(super) fn next_piece(&mut self, max_len: usize) -> &[u8] {
        let len = self.rng.usize(1..=max_len);
        self.sent.resize(len, 0);
        self.rng.fill(&mut self.sent);
        &self.sent
    }

    /// Checks that the received bytes are the last piece returned.
    pub(super) fn check(&mut self, received: &[u8]) -> io::Result<()> {
        if received != self.sent {
            let message = format!(
                "sent {} bytes, received {} bytes that differ",
                self.sent.len(),
                received.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        self.checked_bytes += received.len() as u64;
        Ok(())
    }

    /// Sends a piece, receives its echo and checks it.
    pub(super) fn exchange(&mut self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        self.next_piece(MAX_PIECE_BYTES);
        stream.write_all(&self.sent)?;
        let mut received = std::mem::take(&mut self.received);
        received.resize(self.sent.len(), 0);
        stream.read_exact(&mut received)?;
        let checked = self.check(&received);
        self.received = received;
        checked
    }

    /// Number of bytes that were echoed unchanged.
    pub(super) fn checked_bytes(&self) -> u64 {
        self.checked_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_lost_repeated_and_changed_bytes() {
        let mut checker = EchoChecker::new(1);
        let piece = checker.next_piece(100).to_vec();
        checker.check(&piece).unwrap();
        assert_eq!(checker.checked_bytes(), piece.len() as u64);
        checker.next_piece(100);
        checker.check(&piece).unwrap_err();
        let mut other = checker.next_piece(100).to_vec();
        other[0] ^= 1;
        checker.check(&other).unwrap_err();
        other[0] ^= 1;
        checker.check(&other[1..]).unwrap_err();
        checker.check(&other).unwrap();
    }
}
