//! Versions of the attach protocol: of the messages, and of the layout of the shared memory.
//!
//! An application speaks one version for as long as it is attached, also across upgrades of the
//! daemon. The daemon serves every version from [`ProtocolVersion::OLDEST`] on, each in its own
//! words. What a new version changes is decided by the version of the application, where the
//! change is. `golden` holds the messages and the memory of each version.

use serde::{Deserialize, Serialize};

/// Version of the attach protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProtocolVersion(u8);

impl ProtocolVersion {
    /// Oldest version that is served.
    pub const OLDEST: Self = Self(5);
    /// Version of this library. New since version 5: the first message has the library's release.
    pub const CURRENT: Self = Self(6);

    /// Number of the version.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Version with this number, if it is served.
    ///
    /// # Errors
    /// [`UnservedVersion`], which says which side is to be upgraded.
    pub(crate) fn served(number: u8) -> Result<Self, UnservedVersion> {
        match Self(number) {
            version if version < Self::OLDEST => Err(UnservedVersion::TooOld(number)),
            version if version > Self::CURRENT => Err(UnservedVersion::TooNew(number)),
            version => Ok(version),
        }
    }

    /// True if the first message has the release of the library.
    pub(super) fn has_release(self) -> bool {
        self >= Self(6)
    }
}

/// Version of the attach protocol that a daemon does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnservedVersion {
    /// The program has an older library.
    #[error(
        "the program speaks attach protocol {0}, the daemon serves {oldest} to {current}: restart \
         the program with the library of the daemon's release",
        oldest = ProtocolVersion::OLDEST.0, current = ProtocolVersion::CURRENT.0
    )]
    TooOld(u8),
    /// The program has a newer library.
    #[error(
        "the program speaks attach protocol {0}, the daemon serves {oldest} to {current}: upgrade \
         the daemon first, by `tidegate upgrade`",
        oldest = ProtocolVersion::OLDEST.0, current = ProtocolVersion::CURRENT.0
    )]
    TooNew(u8),
}

/// Library by which a program is attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Version of the attach protocol that the library speaks.
    pub protocol: ProtocolVersion,
    /// Release of the library; empty if its protocol does not say so.
    pub release: String,
}

impl Default for Library {
    /// Library of the oldest protocol.
    fn default() -> Self {
        Self { protocol: ProtocolVersion::OLDEST, release: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_the_versions_of_its_range() {
        let (oldest, current) =
            (ProtocolVersion::OLDEST.number(), ProtocolVersion::CURRENT.number());
        for number in oldest..=current {
            assert_eq!(ProtocolVersion::served(number).map(ProtocolVersion::number), Ok(number));
        }
        for (number, remedy) in
            [(oldest - 1, "restart the program"), (current + 1, "upgrade the daemon")]
        {
            let error = ProtocolVersion::served(number).unwrap_err().to_string();
            assert!(error.contains(&format!("attach protocol {number},")), "{error}");
            assert!(error.contains(remedy), "{error}");
        }
    }
}
