//! Errors by number: what the daemon refuses, in the kinds that programs know.

use std::io::ErrorKind;

/// All kinds that are told, by their numbers less one.
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

/// The number of a kind, never 0.
pub fn to_number(kind: ErrorKind) -> u8 {
    let place = KINDS.iter().position(|&other| other == kind).unwrap_or(KINDS.len() - 1);
    place as u8 + 1
}

/// The kind of a number; `None` for 0, which is no error.
pub fn from_number(number: u8) -> Option<ErrorKind> {
    let place = usize::from(number).checked_sub(1)?;
    Some(KINDS.get(place).copied().unwrap_or(ErrorKind::Other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_back_and_others_are_other() {
        for kind in KINDS {
            assert_eq!(from_number(to_number(kind)), Some(kind));
        }
        assert_eq!(from_number(to_number(ErrorKind::NotFound)), Some(ErrorKind::Other));
        assert_eq!(from_number(0), None);
        assert_eq!(from_number(255), Some(ErrorKind::Other));
    }
}
