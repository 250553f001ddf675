//! Bytes that say what must come after them.

use std::io::{self, Read, Write};

/// The most bytes that go there before they come back.
pub(super) const PIECE: usize = 16 << 10;

/// A row of numbers, different for each seed: none can be lost, doubled, or
/// another's without being seen.
pub(super) struct Numbers {
    chance: fastrand::Rng,
    sent: Vec<u8>,
    came: Vec<u8>,
    bytes: u64,
}

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        let chance = fastrand::Rng::with_seed(seed);
        Self { chance, sent: Vec::new(), came: Vec::new(), bytes: 0 }
    }

    /// The next piece, of 1 to `most` bytes.
    pub(super) fn next(&mut self, most: usize) -> &[u8] {
        let len = self.chance.usize(1..=most);
        self.sent.resize(len, 0);
        self.chance.fill(&mut self.sent);
        &self.sent
    }

    /// Whether this is the piece that was next.
    pub(super) fn check(&mut self, came: &[u8]) -> io::Result<()> {
        if came != self.sent {
            let message = format!("{} bytes came back as {} others", self.sent.len(), came.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        self.bytes += came.len() as u64;
        Ok(())
    }

    /// Sends a piece, and checks what comes back.
    pub(super) fn exchange(&mut self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        self.next(PIECE);
        stream.write_all(&self.sent)?;
        let mut came = std::mem::take(&mut self.came);
        came.resize(self.sent.len(), 0);
        stream.read_exact(&mut came)?;
        let checked = self.check(&came);
        self.came = came;
        checked
    }

    /// How many bytes came back as they were.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_doubled_or_changed_is_seen() {
        let mut numbers = Numbers::new(1);
        let piece = numbers.next(100).to_vec();
        numbers.check(&piece).unwrap();
        assert_eq!(numbers.bytes(), piece.len() as u64);
        numbers.next(100);
        numbers.check(&piece).unwrap_err();
        let mut other = numbers.next(100).to_vec();
        other[0] ^= 1;
        numbers.check(&other).unwrap_err();
        other[0] ^= 1;
        numbers.check(&other[1..]).unwrap_err();
        numbers.check(&other).unwrap();
    }
}
