//! Epoll sets with members of Tidegate and of the kernel.
//!
//! A set is a kernel epoll with the kernel's members, and a [`Poll`] with Tidegate's members.
//! Waiting collects events from both.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use libc::{c_int, epoll_event, pollfd, sigset_t};
use tidegate::{Interest, Net, Poll, Ready, Token};
use tidegate_posix::epoll_events::{check_exclusive, interest, trigger};
use tidegate_posix::epoll_members::MemberTable;
use tidegate_posix::polling::KernelPolls;

use crate::sleeper::KernelWaiter;
use crate::socket::{Socket, Watcher, lock, os_error};

/// Epoll set.
pub(crate) struct EpollSet {
    net: Net,
    /// Kernel epoll: the descriptor of the set itself.
    kernel_fd: c_int,
    poll: Poll,
    members: Mutex<MemberTable<Socket>>,
    kernel_members: AtomicUsize,
    kernel_polls: KernelPolls,
    own: Weak<EpollSet>,
}

impl Watcher for EpollSet {
    fn on_opened(&self, socket: &Arc<Socket>) {
        for (slot, member) in lock(&self.members).of_socket(socket) {
            // Can fail only for a socket of another stack, which was refused before.
            let _ = self.register(socket, slot, member.events);
        }
    }
}

impl EpollSet {
    /// Set for sockets of one stack. `kernel_fd`: a new kernel epoll, the set's descriptor.
    pub(crate) fn new(net: &Net, kernel_fd: c_int) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            net: net.clone(),
            kernel_fd,
            poll: Poll::new(net),
            members: Mutex::default(),
            kernel_members: AtomicUsize::new(0),
            kernel_polls: KernelPolls::default(),
            own: own.clone(),
        })
    }

    /// Tidegate's part, for a caller that waits for the set itself.
    pub(crate) fn poll(&self) -> &Poll {
        &self.poll
    }

    pub(crate) fn net(&self) -> &Net {
        &self.net
    }

    fn register(&self, socket: &Socket, slot: usize, events: u32) -> io::Result<()> {
        let Some(source) = socket.source() else { return Ok(()) };
        self.net.batch(|batch| {
            batch.register(&self.poll, source, Token(slot), interest(events))?;
            batch.set_trigger(&self.poll, source, trigger(events))
        })?
    }

    /// `epoll_ctl` for a socket.
    ///
    /// # Errors
    /// As `epoll_ctl`; `EINVAL` for a socket of another stack.
    pub(crate) fn control(
        &self,
        operation: c_int,
        fd: c_int,
        socket: &Arc<Socket>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        let mut members = lock(&self.members);
        let found = members.find(fd, socket);
        let missing = || os_error(libc::ENOENT);
        let present = found.and_then(|slot| members.get(slot));
        check_exclusive(operation, events, present.map(|member| member.events))?;
        match operation {
            libc::EPOLL_CTL_ADD if found.is_some() => Err(os_error(libc::EEXIST)),
            libc::EPOLL_CTL_ADD => {
                let slot = members.insert(fd, Arc::downgrade(socket), events, data);
                let watcher: Weak<dyn Watcher> = self.own.clone();
                let added = match socket.endpoint() {
                    // The endpoint may appear meanwhile.
                    None if socket.watch(watcher) => Ok(()),
                    _ => self.register(socket, slot, events),
                };
                added.inspect_err(|_| members.remove(fd))
            }
            libc::EPOLL_CTL_MOD => {
                let slot = found.ok_or_else(missing)?;
                if let Some(member) = members.get_mut(slot) {
                    (member.events, member.data) = (events, data);
                }
                let Some(source) = socket.source() else { return Ok(()) };
                self.net.batch(|batch| {
                    batch.set_trigger(&self.poll, source, trigger(events))?;
                    batch.reregister(&self.poll, source, Token(slot), interest(events))
                })?
            }
            libc::EPOLL_CTL_DEL => {
                found.ok_or_else(missing)?;
                members.remove(fd);
                let Some(source) = socket.source() else { return Ok(()) };
                self.net.batch(|batch| batch.deregister(&self.poll, source))?
            }
            _ => Err(os_error(libc::EINVAL)),
        }
    }

    /// `epoll_ctl` for a descriptor of the kernel.
    ///
    /// # Errors
    /// As `epoll_ctl`.
    pub(crate) fn control_kernel(
        &self,
        operation: c_int,
        fd: c_int,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        let mut event = epoll_event { events, u64: data };
        // SAFETY: the event is valid, and the kernel checks the descriptors.
        if unsafe { libc::epoll_ctl(self.kernel_fd, operation, fd, &raw mut event) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // A closed descriptor leaves the kernel's set unnoticed: then the kernel is polled in vain.
        match operation {
            libc::EPOLL_CTL_ADD => _ = self.kernel_members.fetch_add(1, Ordering::Relaxed),
            libc::EPOLL_CTL_DEL => _ = self.kernel_members.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        Ok(())
    }

    /// `epoll_pwait`: writes events and returns their number.
    ///
    /// # Errors
    /// As `epoll_wait`.
    pub(crate) fn wait(
        &self,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: Option<&sigset_t>,
    ) -> io::Result<usize> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let remaining = || deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let may_wait = timeout != Some(Duration::ZERO);
        let on_kernel = pollfd { fd: self.kernel_fd, events: libc::POLLIN, revents: 0 };
        // Signals that arrive from here on end the wait, also while the stack runs.
        let mut kernel = KernelWaiter::new(Vec::new(), mask.copied(), may_wait);
        // Without a signal mask the kernel is asked only if there is nothing else.
        if mask.is_none() {
            kernel.leaves_signals = true;
            self.wait_once(Some(Duration::ZERO), &mut kernel)?;
            kernel.leaves_signals = false;
            let count = self.collect_ready(events, !may_wait || self.is_kernel_due())?;
            if count > 0 || !may_wait {
                return Ok(count);
            }
        }
        kernel.fds.push(on_kernel);
        loop {
            let found = self.wait_once(remaining(), &mut kernel)?;
            let polls_kernel = match kernel.take_polled() {
                true => kernel.fds.first().is_some_and(|fd| fd.revents != 0),
                false => self.is_kernel_due(),
            };
            let count = self.collect_ready(events, polls_kernel)?;
            kernel.fds.iter_mut().for_each(|fd| fd.revents = 0);
            if count > 0 || !found {
                return Ok(count);
            }
        }
    }

    /// Runs the stack until Tidegate's part or the kernel has an event; false when the time is over.
    fn wait_once(&self, timeout: Option<Duration>, kernel: &mut KernelWaiter) -> io::Result<bool> {
        let sources = [(&self.poll as &dyn tidegate::Source, Interest::Readable)];
        self.net.wait(&sources, timeout, kernel)
    }

    /// Writes the ready events to `events`; returns their number.
    fn collect_ready(&self, events: &mut [epoll_event], polls_kernel: bool) -> io::Result<usize> {
        // When due, the kernel's events come first: a caller that takes few events at a time
        // must not starve them.
        let mut count = 0;
        if polls_kernel && self.kernel_members.load(Ordering::Relaxed) > 0 {
            let limit = c_int::try_from(events.len().div_ceil(2)).unwrap_or(c_int::MAX);
            // SAFETY: the slice has space for `limit` events.
            let found = unsafe { libc::epoll_wait(self.kernel_fd, events.as_mut_ptr(), limit, 0) };
            count = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        }
        let mut ready: Vec<Ready> = Vec::new();
        self.poll.collect_ready(&mut ready, events.len() - count);
        if ready.is_empty() {
            return Ok(count);
        }
        let written = lock(&self.members).write_events(&ready, &mut events[count..]);
        // The program will answer each event; the last answer sends the deferred frames, too.
        self.net.defer_transmit(written.saturating_sub(1) as u32);
        Ok(count + written)
    }

    fn is_kernel_due(&self) -> bool {
        self.kernel_members.load(Ordering::Relaxed) > 0 && self.kernel_polls.are_due()
    }
}
