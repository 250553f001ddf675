//! IP version of a packet.

/// True if `packet` begins like an IPv4 packet.
#[inline]
pub(crate) fn is_ipv4(packet: &[u8]) -> bool {
    packet.first().is_some_and(|first| first >> 4 == 4)
}
