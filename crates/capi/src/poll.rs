//! `poll` on descriptors of Tidegate and of the kernel.

use std::io;
use std::time::{Duration, Instant};

use libc::{pollfd, sigset_t};
use tidegate::{Interest, Net, Source};
use tidegate_posix::epoll_events::{event_bits, interest};

use crate::descriptors::{self, Entry, InUse};
use crate::sleeper::{self, KernelWaiter};
use crate::socket::os_error;

fn source(entry: &Entry) -> Option<&dyn Source> {
    match entry {
        Entry::Socket(socket) => socket.source(),
        Entry::Epoll(set) => Some(set.poll()),
        Entry::Kqueue(kqueue) => Some(kqueue.set().poll()),
        Entry::Ring(_) => None,
    }
}

fn net(entry: &Entry) -> &Net {
    match entry {
        Entry::Socket(socket) => &socket.net,
        Entry::Epoll(set) => set.net(),
        Entry::Kqueue(kqueue) => kqueue.set().net(),
        Entry::Ring(ring) => ring.net(),
    }
}

fn ready_bits(entry: &Entry) -> u32 {
    match entry {
        Entry::Socket(socket) => event_bits(socket.readiness()),
        _ => source(entry).map_or(0, |source| event_bits(source.readiness())),
    }
}

/// `ppoll`: sets `revents` and returns the number of ready descriptors.
///
/// # Errors
/// As `ppoll`; `EINVAL` for sockets of several stacks, and for a ring.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let entries: Vec<Option<InUse<Entry>>> = fds.iter().map(|fd| descriptors::get(fd.fd)).collect();
    let Some(net) = entries.iter().flatten().next().map(|entry| net(entry)) else {
        return sleeper::poll(fds, timeout, mask);
    };
    let kernel_indices: Vec<usize> = (0..fds.len()).filter(|&at| entries[at].is_none()).collect();
    let kernel_fds = kernel_indices.iter().map(|&at| pollfd { revents: 0, ..fds[at] }).collect();
    let may_wait = timeout != Some(Duration::ZERO);
    let mut kernel = KernelWaiter::new(kernel_fds, mask.copied(), may_wait);
    let own = || entries.iter().zip(&*fds).filter_map(|(entry, fd)| Some((entry.as_ref()?, fd)));
    let sources: Vec<(&dyn Source, Interest)> = own()
        .filter_map(|(entry, fd)| Some((source(entry)?, interest(fd.events as u16 as u32))))
        .collect();
    let is_other =
        |entry: &Entry| matches!(entry, Entry::Ring(_)) || !self::net(entry).is_same(net);
    if own().any(|(entry, _)| is_other(entry)) {
        return Err(os_error(libc::EINVAL));
    }
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        // A socket without an endpoint is ready at once, as at the kernel.
        let has_closed = own().any(|(entry, _)| source(entry).is_none());
        let remaining = match timeout {
            _ if has_closed => Some(Duration::ZERO),
            Some(Duration::ZERO) => timeout,
            _ => deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        let found = net.wait(&sources, remaining, &mut kernel)?;
        if !kernel.fds.is_empty() {
            sleeper::poll(&mut kernel.fds, Some(Duration::ZERO), None)?;
        }
        let always = (libc::POLLERR | libc::POLLHUP) as u32;
        let mut revents = vec![0; fds.len()];
        for (&at, kernel_fd) in kernel_indices.iter().zip(&kernel.fds) {
            revents[at] = kernel_fd.revents;
        }
        let mut ready_sources = 0;
        for (at, entry) in entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            let bits = ready_bits(entry) & (fds[at].events as u16 as u32 | always);
            revents[at] = bits as i16;
            ready_sources += u32::from(bits != 0);
        }
        let count = revents.iter().filter(|&&bits| bits != 0).count();
        if count > 0 || !found {
            fds.iter_mut().zip(revents).for_each(|(fd, bits)| fd.revents = bits);
            net.defer_transmit(ready_sources.saturating_sub(1));
            return Ok(count);
        }
    }
}
