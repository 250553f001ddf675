//! Datagrams in a stream of bytes: each behind a head, at places of eight bytes.

use std::net::{IpAddr, SocketAddr};

use super::words::{ADDRESS_WORDS, address_from_words, address_to_words, ip_to_words};

/// Bytes of the head.
pub const HEAD_BYTES: usize = 8 * (1 + 2 * ADDRESS_WORDS);

/// The longest payload: what IPv6 could carry.
pub const MOST_PAYLOAD_BYTES: usize = 65_535;

/// What stands in front of a datagram's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of payload that follow.
    pub len: usize,
    /// Who sent it, or who is to get it; none for whom the socket is connected to.
    pub remote: Option<SocketAddr>,
    /// The address of ours that it was sent to, or is to be sent from.
    pub local: Option<IpAddr>,
}

/// The bytes that a datagram takes, head and all.
pub fn record_bytes(len: usize) -> usize {
    HEAD_BYTES + len.next_multiple_of(8)
}

impl Head {
    /// The head as bytes.
    pub fn to_bytes(self) -> [u8; HEAD_BYTES] {
        let local = self.local.map_or([0; ADDRESS_WORDS], ip_to_words);
        let words = [self.len as u64].into_iter().chain(address_to_words(self.remote)).chain(local);
        let mut bytes = [0; HEAD_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// The head that bytes are; `None` when they are none.
    pub fn from_bytes(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let mut words = [0; 1 + 2 * ADDRESS_WORDS];
        for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*from);
        }
        let [len, a, b, c, d, e, f] = words;
        let len = usize::try_from(len).ok().filter(|&len| len <= MOST_PAYLOAD_BYTES)?;
        let remote = address_from_words([a, b, c])?;
        let local = address_from_words([d, e, f])?.map(|address| address.ip());
        Some(Self { len, remote, local })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_comes_back_as_it_was() {
        let remote = Some("192.0.2.1:53".parse().unwrap());
        let local = Some("2001:db8::1".parse().unwrap());
        for head in [
            Head { len: 0, remote: None, local: None },
            Head { len: MOST_PAYLOAD_BYTES, remote, local },
        ] {
            assert_eq!(Head::from_bytes(&head.to_bytes()), Some(head));
        }
        let too_long = Head { len: MOST_PAYLOAD_BYTES + 1, remote: None, local: None };
        assert_eq!(Head::from_bytes(&too_long.to_bytes()), None);
        assert_eq!(record_bytes(0), HEAD_BYTES);
        assert_eq!(record_bytes(9), HEAD_BYTES + 16);
    }
}
