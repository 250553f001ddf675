//! Waiting for a list of descriptors, of Tidegate and of the kernel.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{pollfd, sigset_t};
use tidegate::{Interest, Poll, Source};

use crate::epoll::{self, Epoll};
use crate::sleeper::{self, KernelSide};
use crate::socket::Socket;
use crate::start;
use crate::table::{self, InUse};

/// One of Tidegate's in the list.
enum Ours {
    Socket(InUse<Arc<Socket>>),
    Epoll(InUse<Arc<Epoll>>),
}

impl Ours {
    fn of(fd: i32) -> Option<Self> {
        match table::socket(fd) {
            Some(socket) => Some(Self::Socket(socket)),
            None => table::epoll(fd).filter(|epoll| epoll.tidegate().is_some()).map(Self::Epoll),
        }
    }

    /// What to wait for, if there is something of Tidegate's.
    fn source(&self) -> Option<&dyn Source> {
        match self {
            Self::Socket(socket) => Some(socket.source()),
            Self::Epoll(epoll) => epoll.tidegate().map(|poll: &Poll| poll as &dyn Source),
        }
    }

    /// Whether the kernel has a part of it too.
    fn has_kernel(&self) -> bool {
        match self {
            Self::Socket(socket) => socket.has_kernel,
            Self::Epoll(_) => true,
        }
    }

    fn words(&self) -> u32 {
        match self {
            Self::Socket(socket) => epoll::words(socket.readiness()),
            Self::Epoll(epoll) => u32::from(epoll.is_ready()) * libc::EPOLLIN as u32,
        }
    }
}

/// Whether any of these is Tidegate's.
pub(crate) fn has_ours(fds: &[pollfd]) -> bool {
    fds.iter().any(|fd| table::is_ours(fd.fd))
}

/// `ppoll`: gives how many are ready.
///
/// # Errors
/// Those of `ppoll`.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let ours: Vec<(usize, Ours)> =
        fds.iter().enumerate().filter_map(|(at, fd)| Some((at, Ours::of(fd.fd)?))).collect();
    let Some(net) = start::open_net().filter(|_| !ours.is_empty()) else {
        return sleeper::poll(fds, timeout, mask);
    };
    if start::is_child() {
        return Err(start::child_error());
    }
    // The kernel's part: what is not of Tidegate, and what is of both.
    let is_kernels = |at: &usize| {
        ours.iter().find(|(other, _)| other == at).is_none_or(|(_, ours)| ours.has_kernel())
    };
    let places: Vec<usize> = (0..fds.len()).filter(is_kernels).collect();
    let theirs: Vec<pollfd> = places.iter().map(|&at| pollfd { revents: 0, ..fds[at] }).collect();
    let mut kernel = KernelSide::new(theirs, mask.copied());
    let sources: Vec<(&dyn Source, Interest)> = ours
        .iter()
        .filter_map(|(at, ours)| Some((ours.source()?, epoll::interest(fds[*at].events as u32))))
        .collect();
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = match timeout {
            Some(Duration::ZERO) => timeout,
            _ => deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        let found = net.wait(&sources, left, &mut kernel)?;
        start::has_run();
        if !kernel.fds.is_empty() {
            sleeper::poll(&mut kernel.fds, Some(Duration::ZERO), None)?;
        }
        fds.iter_mut().for_each(|fd| fd.revents = 0);
        for (&at, theirs) in places.iter().zip(&kernel.fds) {
            fds[at].revents = theirs.revents;
        }
        let always = (libc::POLLERR | libc::POLLHUP) as u32;
        let mut answers = 0;
        for (at, ours) in &ours {
            let words = ours.words() & (fds[*at].events as u16 as u32 | always);
            fds[*at].revents |= words as i16;
            answers += u32::from(words != 0);
        }
        let count = fds.iter().filter(|fd| fd.revents != 0).count();
        if count > 0 || !found {
            net.defer_transmit(answers.saturating_sub(1));
            return Ok(count);
        }
    }
}
