//! Event bits of epoll.

use std::io;

use tidegate::{Interest, Readiness, Trigger};

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;

const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// Bits that an exclusive member may have.
const EXCLUSIVE_OPTIONS: u32 =
    EXCLUSIVE | IN | OUT | HUP | ERR | (libc::EPOLLET | libc::EPOLLWAKEUP) as u32;

/// Readiness as epoll event bits.
pub fn event_bits(ready: Readiness) -> u32 {
    let mut bits = 0;
    for (is_set, bit) in [
        (ready.readable, IN | libc::EPOLLRDNORM as u32),
        (ready.writable, OUT | libc::EPOLLWRNORM as u32),
        (ready.read_closed, RDHUP),
        (ready.read_closed && ready.write_closed, HUP),
        (ready.failed || ready.has_report, ERR),
    ] {
        if is_set {
            bits |= bit;
        }
    }
    bits
}

/// Interest for the epoll event bits that an application registers.
pub fn interest(events: u32) -> Interest {
    // At the end of its receive direction a socket is readable, too.
    match (events & IN != 0, events & OUT != 0, events & RDHUP != 0) {
        (true, true, _) => Interest::Both,
        (true, false, _) => Interest::Readable,
        (false, true, true) => Interest::WritableOrReadClosed,
        (false, true, false) => Interest::Writable,
        (false, false, true) => Interest::ReadClosed,
        (false, false, false) => Interest::Neither,
    }
}

/// Trigger for the epoll event bits that an application registers.
pub fn trigger(events: u32) -> Trigger {
    match events {
        _ if events & libc::EPOLLONESHOT as u32 != 0 => Trigger::OneShot,
        _ if events & libc::EPOLLET as u32 != 0 => Trigger::Edge,
        _ => Trigger::Level,
    }
}

/// Checks the rules of the kernel for exclusive members (`EPOLLEXCLUSIVE`). `present`: events of the
/// member as it is now.
///
/// # Errors
/// `EINVAL`.
pub fn check_exclusive(operation: i32, events: u32, present: Option<u32>) -> io::Result<()> {
    let is_exclusive = |events: u32| events & EXCLUSIVE != 0;
    let is_allowed = match operation {
        libc::EPOLL_CTL_ADD => !is_exclusive(events) || events & !EXCLUSIVE_OPTIONS == 0,
        libc::EPOLL_CTL_MOD => !is_exclusive(events) && !present.is_some_and(is_exclusive),
        _ => true,
    };
    match is_allowed {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_maps_to_epoll_bits() {
        let ended = Readiness { readable: true, read_closed: true, ..Readiness::default() };
        assert_eq!(event_bits(ended) & (IN | RDHUP | HUP | OUT), IN | RDHUP);
        let closed = Readiness {
            readable: true,
            writable: true,
            read_closed: true,
            write_closed: true,
            failed: true,
            has_report: false,
        };
        assert_eq!(
            event_bits(closed) & (IN | OUT | RDHUP | HUP | ERR),
            IN | OUT | RDHUP | HUP | ERR
        );
        assert_eq!(event_bits(Readiness::default()), 0);
    }

    #[test]
    fn one_shot_takes_precedence_over_edge() {
        let both = libc::EPOLLET as u32 | libc::EPOLLONESHOT as u32;
        assert_eq!(trigger(both | IN), Trigger::OneShot);
        assert_eq!(trigger(libc::EPOLLET as u32), Trigger::Edge);
        assert_eq!(trigger(IN | OUT), Trigger::Level);
        assert_eq!(interest(IN | RDHUP), Interest::Readable);
        assert_eq!(interest(RDHUP), Interest::ReadClosed);
        assert_eq!(interest(OUT | RDHUP), Interest::WritableOrReadClosed);
        assert_eq!(interest(0), Interest::Neither);
    }
}
