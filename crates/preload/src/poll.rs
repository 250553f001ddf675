//! `poll` on descriptors of Tidegate and of the kernel.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{pollfd, sigset_t};
use tidegate::{Interest, Source};
use tidegate_posix::epoll_events::{event_bits, interest};

use crate::epoll::Epoll;
use crate::fd_table::{self, InUse};
use crate::runtime;
use crate::sleeper::{self, KernelWaiter};
use crate::socket::Socket;

/// Tidegate's object behind a polled descriptor.
enum TidegateSource {
    Socket(InUse<Arc<Socket>>),
    Epoll(InUse<Arc<Epoll>>),
}

impl TidegateSource {
    fn lookup(fd: i32) -> Option<Self> {
        match fd_table::socket(fd) {
            Some(socket) => Some(Self::Socket(socket)),
            None => {
                let has_members =
                    |epoll: &InUse<Arc<Epoll>>| epoll.tidegate_polls().next().is_some();
                fd_table::epoll(fd).filter(has_members).map(Self::Epoll)
            }
        }
    }

    /// Adds the event sources of Tidegate, to wait for `interest`.
    fn add_sources<'s>(
        &'s self,
        interest: Interest,
        sources: &mut Vec<(&'s dyn Source, Interest)>,
    ) {
        match self {
            Self::Socket(socket) => sources.push((socket.source(), interest)),
            Self::Epoll(epoll) => {
                let polls = epoll.tidegate_polls().map(|poll| poll as &dyn Source);
                sources.extend(polls.map(|poll| (poll, interest)));
            }
        }
    }

    /// True when the kernel's descriptor is polled, too.
    fn polls_kernel_fd(&self) -> bool {
        match self {
            Self::Socket(socket) => socket.uses_kernel_socket,
            Self::Epoll(_) => true,
        }
    }

    fn event_bits(&self) -> u32 {
        match self {
            Self::Socket(socket) => event_bits(socket.readiness()),
            Self::Epoll(epoll) => u32::from(epoll.is_ready()) * libc::EPOLLIN as u32,
        }
    }
}

/// True when any of the descriptors is Tidegate's.
pub(crate) fn has_tidegate_fd(fds: &[pollfd]) -> bool {
    fds.iter().any(|fd| fd_table::is_tidegate(fd.fd))
}

/// `ppoll`: sets `revents` and returns the number of ready descriptors.
///
/// # Errors
/// As `ppoll`.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let tidegate_sources: Vec<(usize, TidegateSource)> = fds
        .iter()
        .enumerate()
        .filter_map(|(at, fd)| Some((at, TidegateSource::lookup(fd.fd)?)))
        .collect();
    let Some(net) = runtime::opened_net().filter(|_| !tidegate_sources.is_empty()) else {
        return sleeper::poll(fds, timeout, mask);
    };
    if runtime::is_child() {
        return Err(runtime::child_error());
    }
    // Polled at the kernel: descriptors of the kernel, and those of both.
    let polls_kernel_fd = |at: &usize| {
        tidegate_sources
            .iter()
            .find(|(other, _)| other == at)
            .is_none_or(|(_, ours)| ours.polls_kernel_fd())
    };
    let kernel_indices: Vec<usize> = (0..fds.len()).filter(polls_kernel_fd).collect();
    let kernel_fds: Vec<pollfd> =
        kernel_indices.iter().map(|&at| pollfd { revents: 0, ..fds[at] }).collect();
    let mut kernel = KernelWaiter::new(kernel_fds, mask.copied());
    let mut sources: Vec<(&dyn Source, Interest)> = Vec::with_capacity(tidegate_sources.len());
    for (at, source) in &tidegate_sources {
        source.add_sources(interest(fds[*at].events as u32), &mut sources);
    }
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let remaining = match timeout {
            Some(Duration::ZERO) => timeout,
            _ => deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        let found = net.wait(&sources, remaining, &mut kernel)?;
        if !kernel.fds.is_empty() {
            sleeper::poll(&mut kernel.fds, Some(Duration::ZERO), None)?;
        }
        fds.iter_mut().for_each(|fd| fd.revents = 0);
        for (&at, kernel_fd) in kernel_indices.iter().zip(&kernel.fds) {
            fds[at].revents = kernel_fd.revents;
        }
        let always_reported = (libc::POLLERR | libc::POLLHUP) as u32;
        let mut ready_sources = 0;
        for (at, source) in &tidegate_sources {
            let bits = source.event_bits() & (fds[*at].events as u16 as u32 | always_reported);
            fds[*at].revents |= bits as i16;
            ready_sources += u32::from(bits != 0);
        }
        let count = fds.iter().filter(|fd| fd.revents != 0).count();
        if count > 0 || !found {
            net.defer_transmit(ready_sources.saturating_sub(1));
            return Ok(count);
        }
    }
}
