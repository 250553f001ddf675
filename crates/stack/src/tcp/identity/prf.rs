//! Keyed hash function with results that peers may see: SipHash-2-4 (Aumasson and
//! Bernstein, "SipHash: a fast short-input PRF"). The hash function of the tables is
//! cheaper, but its results must not leave the stack.

use crate::random::SecretRng;
use crate::siphash::siphash;

/// Secret key.
// Debug output hides the key: knowing it allows guessing sequence numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Secret([u64; 2]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(crate) fn new(chance: &mut SecretRng) -> Self {
        let mut word = || u64::from(chance.next_u32()) << 32 | u64::from(chance.next_u32());
        Self([word(), word()])
    }

    /// SipHash-2-4 of `bytes` under this key.
    pub(crate) fn hash(&self, bytes: &[u8]) -> u64 {
        siphash(self.0, bytes)
    }
}
