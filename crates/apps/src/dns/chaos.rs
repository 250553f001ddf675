//! Version and identity of the server, for questions in class CH (RFC 4892) and for the EDNS option
//! NSID (RFC 5001).

use super::message::rtype;

/// Version and identity of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerIdentity {
    version: Option<Box<[u8]>>,
    identity: Option<Box<[u8]>>,
}

impl ServerIdentity {
    /// Longest version or identity, in bytes: both fit each reply over UDP.
    pub const MAX_BYTES: usize = 128;

    /// Creates an identity: `version` answers `version.bind` and `version.server`, `identity`
    /// answers `id.server`, `hostname.bind` and NSID. Questions without a text are refused.
    ///
    /// Returns `None` when a text is longer than [`ServerIdentity::MAX_BYTES`].
    pub fn new(version: Option<&str>, identity: Option<&str>) -> Option<Self> {
        let is_short = |text: &Option<&str>| text.is_none_or(|text| text.len() <= Self::MAX_BYTES);
        let bytes = |text: Option<&str>| text.map(|text| text.as_bytes().into());
        (is_short(&version) && is_short(&identity))
            .then(|| ServerIdentity { version: bytes(version), identity: bytes(identity) })
    }

    /// Identity for the NSID option.
    pub(super) fn nsid(&self) -> Option<&[u8]> {
        self.identity.as_deref()
    }

    /// Text that answers a question in class CH; `None` when there is none.
    pub(super) fn text_for(&self, name: &[u8], rtype: u16) -> Option<&[u8]> {
        if rtype != rtype::TXT && rtype != rtype::ANY {
            return None;
        }
        let is = |known: &[u8]| name.eq_ignore_ascii_case(known);
        if is(b"\x07version\x04bind\0") || is(b"\x07version\x06server\0") {
            self.version.as_deref()
        } else if is(b"\x02id\x06server\0") || is(b"\x08hostname\x04bind\0") {
            self.identity.as_deref()
        } else {
            None
        }
    }
}
