//! Numbers for the error kinds that the daemon sends to applications.

use std::io::ErrorKind;

/// Error kinds that have a number; the number is the index plus one.
const KINDS: [ErrorKind; 17] = [
    ErrorKind::AddrInUse,
    ErrorKind::AddrNotAvailable,
    ErrorKind::ConnectionRefused,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::TimedOut,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::NotConnected,
    ErrorKind::BrokenPipe,
    ErrorKind::WouldBlock,
    ErrorKind::InvalidInput,
    ErrorKind::OutOfMemory,
    ErrorKind::PermissionDenied,
    ErrorKind::QuotaExceeded,
    ErrorKind::Unsupported,
    ErrorKind::Other,
];

/// Number of an error kind, never 0. Kinds without a number become `Other`.
pub fn to_number(kind: ErrorKind) -> u8 {
    let index = KINDS.iter().position(|&other| other == kind).unwrap_or(KINDS.len() - 1);
    index as u8 + 1
}

/// Error kind of a number; `None` for 0, which means no error.
pub fn from_number(number: u8) -> Option<ErrorKind> {
    let index = usize::from(number).checked_sub(1)?;
    Some(KINDS.get(index).copied().unwrap_or(ErrorKind::Other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_kinds_round_trip_and_others_become_other() {
        for kind in KINDS {
            assert_eq!(from_number(to_number(kind)), Some(kind));
        }
        assert_eq!(from_number(to_number(ErrorKind::NotFound)), Some(ErrorKind::Other));
        assert_eq!(from_number(0), None);
        assert_eq!(from_number(255), Some(ErrorKind::Other));
    }
}
