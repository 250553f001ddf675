//! Share groups: sockets of one application that share one port, each on its own core.

use std::io;

use super::takeover_token::random_bytes;

/// Owner numbers with this bit are share groups. Owner numbers without it are user ids.
const SHARE_GROUP_BIT: u64 = 1 << 63;

/// Secret number of a share group. Only the application that created it knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareGroupId(u64);

impl ShareGroupId {
    /// Creates a random share group.
    ///
    /// # Errors
    /// Errors of `getrandom`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(u64::from_ne_bytes(random_bytes()?) | SHARE_GROUP_BIT))
    }

    pub(super) fn to_word(group: Option<Self>) -> u64 {
        group.map_or(0, |Self(number)| number)
    }

    /// Decodes a share group. Every word is a share group or `None`.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        (word & SHARE_GROUP_BIT != 0).then_some(Self(word))
    }
}

/// Sharing of a socket's port: true if other sockets may bind the port (`SO_REUSEPORT` or a
/// share group), and the owner of the port: the share group or the user.
pub fn port_sharing(share_group: Option<ShareGroupId>, reuse_port: bool, uid: u32) -> (bool, u64) {
    share_group.map_or((reuse_port, uid.into()), |ShareGroupId(number)| (true, number))
}
