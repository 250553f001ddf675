//! Which core has which local port.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::steering::Protocol;

/// A port number for each of the two protocols.
const ENTRIES: usize = 2 << 16;

/// An entry: the core in the lowest bits, then whether the port is between two
/// cores, then how many claims there are.
const CORE: u32 = 0xff;
const PARKED: u32 = 0x100;
const CLAIM: u32 = 0x200;

/// Who has a local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// This core; the one with the card has all that nobody else has.
    Core(usize),
    /// It is on its way from one core to another: frames wait.
    Parked,
}

/// The local ports that cores have claimed. Every core writes to it, the one with
/// the card reads it for each frame.
pub(super) struct Directory {
    entries: Box<[AtomicU32]>,
}

impl Directory {
    pub(super) fn new() -> Self {
        Self { entries: (0..ENTRIES).map(|_| AtomicU32::new(0)).collect() }
    }

    fn entry(&self, protocol: Protocol, port: u16) -> &AtomicU32 {
        let half = match protocol {
            Protocol::Udp => 0,
            Protocol::Tcp => ENTRIES / 2,
        };
        &self.entries[half + usize::from(port)]
    }

    /// Claims a port once more. Returns whether no other core has it, or is about to.
    pub(super) fn claim(&self, protocol: Protocol, port: u16, core: usize) -> bool {
        let claim = |entry: u32| match entry {
            0..CLAIM => Some(CLAIM | core as u32),
            _ if entry & (CORE | PARKED) == core as u32 => entry.checked_add(CLAIM),
            _ => None,
        };
        let entry = self.entry(protocol, port);
        entry.fetch_update(Ordering::SeqCst, Ordering::SeqCst, claim).is_ok()
    }

    /// Takes one claim back. With the last the port is nobody's.
    pub(super) fn release(&self, protocol: Protocol, port: u16, core: usize) {
        let release =
            |entry: u32| (entry & CORE == core as u32).then(|| entry.saturating_sub(CLAIM));
        let entry = self.entry(protocol, port);
        // One that is not this core's has no claim of it.
        let _ = entry.fetch_update(Ordering::SeqCst, Ordering::SeqCst, release);
    }

    /// Whether a core other than this one has claimed the port.
    pub(super) fn is_foreign(&self, protocol: Protocol, port: u16, core: usize) -> bool {
        let entry = self.entry(protocol, port).load(Ordering::Relaxed);
        entry >= CLAIM && entry & CORE != core as u32
    }

    /// Who gets frames for a port.
    pub(super) fn owner(&self, protocol: Protocol, port: u16) -> Owner {
        match self.entry(protocol, port).load(Ordering::SeqCst) {
            0..CLAIM => Owner::Core(0),
            entry if entry & PARKED != 0 => Owner::Parked,
            entry => Owner::Core((entry & CORE) as usize),
        }
    }

    /// Frames for a port that is claimed wait from now on.
    pub(super) fn park(&self, protocol: Protocol, port: u16) {
        self.entry(protocol, port).fetch_or(PARKED, Ordering::SeqCst);
    }

    /// A port that was parked is this core's from now on, with its claims.
    pub(super) fn hand(&self, protocol: Protocol, port: u16, core: usize) {
        let hand =
            |entry: u32| (entry & PARKED != 0).then_some(entry & !(CORE | PARKED) | core as u32);
        // One that was given up meanwhile may be somebody else's by now.
        let _ = self.entry(protocol, port).fetch_update(Ordering::SeqCst, Ordering::SeqCst, hand);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_one_cores_until_its_last_claim_is_released() {
        let directory = Directory::new();
        let owner = || directory.owner(Protocol::Tcp, 80);
        assert_eq!(owner(), Owner::Core(0));
        assert!(directory.claim(Protocol::Tcp, 80, 2) && directory.claim(Protocol::Tcp, 80, 2));
        assert!(!directory.claim(Protocol::Tcp, 80, 0), "not even by the core with the card");
        assert!(directory.claim(Protocol::Udp, 80, 1), "another protocol is another port");
        assert!(directory.is_foreign(Protocol::Tcp, 80, 0));
        assert!(!directory.is_foreign(Protocol::Tcp, 80, 2));
        directory.release(Protocol::Tcp, 80, 1);
        directory.release(Protocol::Tcp, 80, 2);
        assert_eq!(owner(), Owner::Core(2));
        directory.release(Protocol::Tcp, 80, 2);
        assert_eq!(owner(), Owner::Core(0));
        assert!(directory.claim(Protocol::Tcp, 80, 1));
    }

    #[test]
    fn a_port_moves_with_its_claims() {
        let directory = Directory::new();
        assert!(directory.claim(Protocol::Udp, 53, 0) && directory.claim(Protocol::Udp, 53, 0));
        directory.park(Protocol::Udp, 53);
        assert_eq!(directory.owner(Protocol::Udp, 53), Owner::Parked);
        assert!(!directory.claim(Protocol::Udp, 53, 0), "its sockets are elsewhere soon");
        directory.hand(Protocol::Udp, 53, 3);
        assert_eq!(directory.owner(Protocol::Udp, 53), Owner::Core(3));
        directory.release(Protocol::Udp, 53, 3);
        assert_eq!(directory.owner(Protocol::Udp, 53), Owner::Core(3));
        assert!(!directory.claim(Protocol::Udp, 53, 0));
        directory.release(Protocol::Udp, 53, 3);
        assert!(directory.claim(Protocol::Udp, 53, 0));
    }

    #[test]
    fn a_port_that_is_given_up_on_the_way_is_for_anybody() {
        let directory = Directory::new();
        assert!(directory.claim(Protocol::Udp, 53, 1));
        directory.park(Protocol::Udp, 53);
        directory.release(Protocol::Udp, 53, 1);
        assert!(directory.claim(Protocol::Udp, 53, 2));
        directory.hand(Protocol::Udp, 53, 3);
        assert_eq!(directory.owner(Protocol::Udp, 53), Owner::Core(2));
    }
}
