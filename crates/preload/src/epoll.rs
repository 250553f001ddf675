//! Epoll sets with members of Tidegate and of the kernel.
//!
//! A set is a kernel epoll with the kernel's members, and a [`Poll`] with Tidegate's members.
//! Waiting collects events from both.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use libc::{epoll_event, pollfd, sigset_t};
use tidegate::{Interest, Net, Poll, Ready, Source, Token};
use tidegate_memory::OwnFd;
use tidegate_posix::epoll_events::{check_exclusive, interest, trigger};
use tidegate_posix::epoll_members::MemberTable;
use tidegate_posix::polling::KernelPolls;

use crate::sleeper::KernelWaiter;
use crate::socket::Socket;
use crate::{real, runtime, signals};

/// Data of the event that wakes threads waiting for the kernel alone ("tidegate" in ASCII, a
/// value that no application uses).
const KICK_DATA: u64 = 0x7469_6465_6761_7465;

const IN: u32 = libc::EPOLLIN as u32;

/// Epoll set.
pub(crate) struct Epoll {
    /// Kernel epoll.
    fd: i32,
    /// Tidegate's part, created with the first member.
    poll: OnceLock<Poll>,
    /// The same for the second of two descriptors of one socket, which a [`Poll`] holds once.
    second_poll: OnceLock<Poll>,
    is_seconds_turn: AtomicBool,
    members: Mutex<Members>,
    has_nested: AtomicBool,
    /// Number of threads that wait for the kernel epoll alone.
    kernel_waiters: AtomicU32,
    /// Event descriptor that wakes these threads when Tidegate's part is created, if the kernel
    /// gave one.
    kick_fd: OnceLock<Option<OwnFd>>,
    kernel_polls: KernelPolls,
}

#[derive(Default)]
pub(crate) struct Members {
    sockets: MemberTable<Socket>,
    /// Slots of the members in the second poll.
    in_second_poll: HashSet<usize>,
    /// Members of the kernel, some of which may move to Tidegate: events and data.
    kernel_fds: HashMap<i32, (u32, u64)>,
    nested: Vec<NestedSet>,
}

/// Epoll set that is a member of another one. The kernel watches its kernel part.
struct NestedSet {
    fd: i32,
    inner: Weak<Epoll>,
    events: u32,
    data: u64,
}

static ALL_SETS: Mutex<Vec<Weak<Epoll>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks of all sets: no other thread changes a set meanwhile.
pub(crate) struct SetsGuard {
    // Fields are dropped in declaration order: the guards before the mutexes they lock.
    _members: Vec<MutexGuard<'static, Members>>,
    _sets: Vec<Arc<Epoll>>,
    _all: MutexGuard<'static, Vec<Weak<Epoll>>>,
}

/// Locks all sets against changes by other threads.
pub(crate) fn lock_all() -> SetsGuard {
    let all = lock(&ALL_SETS);
    let sets: Vec<Arc<Epoll>> = all.iter().filter_map(Weak::upgrade).collect();
    let lock_members = |set: &Arc<Epoll>| {
        let guard = lock(&set.members);
        // SAFETY: `SetsGuard` keeps the set alive, and drops this guard before the set.
        unsafe {
            std::mem::transmute::<MutexGuard<'_, Members>, MutexGuard<'static, Members>>(guard)
        }
    };
    SetsGuard { _members: sets.iter().map(lock_members).collect(), _sets: sets, _all: all }
}

fn kernel_ctl(epoll: i32, operation: i32, fd: i32, events: u32, data: u64) -> io::Result<()> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: the event is valid, and the kernel checks the descriptors.
    match unsafe { real::epoll_ctl(epoll, operation, fd, &mut event) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Epoll {
    /// Creates the set for a new kernel epoll.
    pub(crate) fn new(fd: i32) -> Arc<Self> {
        let epoll = Arc::new(Self {
            fd,
            poll: OnceLock::new(),
            second_poll: OnceLock::new(),
            is_seconds_turn: AtomicBool::new(false),
            members: Mutex::default(),
            has_nested: AtomicBool::new(false),
            kernel_waiters: AtomicU32::new(0),
            kick_fd: OnceLock::new(),
            kernel_polls: KernelPolls::default(),
        });
        let mut all = lock(&ALL_SETS);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&epoll));
        epoll
    }

    fn poll(&self, net: &Net) -> &Poll {
        let poll = self.poll.get_or_init(|| Poll::new(net));
        if self.kernel_waiters.load(Ordering::SeqCst) > 0 {
            self.wake_kernel_waiters();
        }
        poll
    }

    fn second_poll(&self, net: &Net) -> &Poll {
        self.second_poll.get_or_init(|| Poll::new(net))
    }

    /// Wakes the threads that wait for the kernel alone. If the kernel refuses, they wake up with
    /// its next event.
    fn wake_kernel_waiters(&self) {
        let mut is_new = false;
        let kick = self.kick_fd.get_or_init(|| {
            is_new = true;
            // SAFETY: the function has no pointer argument.
            let number = unsafe { libc::eventfd(1, libc::EFD_CLOEXEC) };
            // SAFETY: a new descriptor has no other owner.
            (number >= 0).then(|| OwnFd::from(unsafe { OwnedFd::from_raw_fd(number) }))
        });
        if let (true, Some(kick)) = (is_new, kick) {
            let _ =
                kernel_ctl(self.fd, libc::EPOLL_CTL_ADD, kick.as_fd().as_raw_fd(), IN, KICK_DATA);
        }
    }

    /// `epoll_ctl` for a descriptor that is the kernel's.
    ///
    /// # Errors
    /// As `epoll_ctl`.
    pub(crate) fn control_kernel(
        &self,
        operation: i32,
        fd: i32,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        kernel_ctl(self.fd, operation, fd, events, data)?;
        let mut members = lock(&self.members);
        match operation {
            libc::EPOLL_CTL_DEL => members.kernel_fds.remove(&fd),
            _ => members.kernel_fds.insert(fd, (events, data)),
        };
        Ok(())
    }

    /// `epoll_ctl` for a descriptor of a Tidegate socket.
    ///
    /// # Errors
    /// As `epoll_ctl`.
    pub(crate) fn control_socket(
        &self,
        operation: i32,
        fd: i32,
        socket: &Arc<Socket>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        let mut members = lock(&self.members);
        let source = socket.source();
        let found = members.sockets.find(fd, socket);
        let is_second = found.is_some_and(|slot| members.in_second_poll.contains(&slot));
        let poll = if is_second { self.second_poll(socket.net) } else { self.poll(socket.net) };
        let missing = || io::Error::from_raw_os_error(libc::ENOENT);
        let present = found.and_then(|slot| members.sockets.get(slot));
        check_exclusive(operation, events, present.map(|member| member.events))?;
        match operation {
            libc::EPOLL_CTL_ADD => {
                if found.is_some() {
                    return Err(io::Error::from_raw_os_error(libc::EEXIST));
                }
                let slot = members.sockets.insert(fd, Arc::downgrade(socket), events, data);
                // Of an earlier member in this slot.
                members.in_second_poll.remove(&slot);
                let register = |poll: &Poll| {
                    socket.net.batch(|batch| {
                        batch.register(poll, source, Token(slot), interest(events))?;
                        batch.set_trigger(poll, source, trigger(events))
                    })?
                };
                let mut added = register(poll);
                if added.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
                    added = register(self.second_poll(socket.net));
                    members.in_second_poll.insert(slot);
                }
                if let Err(error) = added {
                    members.sockets.remove(fd);
                    return Err(error);
                }
            }
            libc::EPOLL_CTL_MOD => {
                let slot = found.ok_or_else(missing)?;
                if let Some(member) = members.sockets.get_mut(slot) {
                    (member.events, member.data) = (events, data);
                }
                socket.net.batch(|batch| {
                    batch.set_trigger(poll, source, trigger(events))?;
                    batch.reregister(poll, source, Token(slot), interest(events))
                })??;
            }
            _ => {
                found.ok_or_else(missing)?;
                members.sockets.remove(fd);
                socket.net.batch(|batch| batch.deregister(poll, source))??;
            }
        }
        drop(members);
        if socket.uses_kernel_socket {
            // Fails when the kernel epoll does not have the descriptor, which is harmless.
            let _ = kernel_ctl(self.fd, operation, fd, events, data);
        }
        Ok(())
    }

    /// `epoll_ctl` for a descriptor of the epoll set `inner`.
    ///
    /// # Errors
    /// As `epoll_ctl`.
    pub(crate) fn control_nested_set(
        &self,
        operation: i32,
        fd: i32,
        inner: &Arc<Epoll>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        kernel_ctl(self.fd, operation, fd, events, data)?;
        let mut members = lock(&self.members);
        members.nested.retain(|nested| nested.fd != fd && nested.inner.strong_count() > 0);
        if operation != libc::EPOLL_CTL_DEL {
            members.nested.push(NestedSet { fd, inner: Arc::downgrade(inner), events, data });
        }
        self.has_nested.store(!members.nested.is_empty(), Ordering::Relaxed);
        drop(members);
        if self.has_nested.load(Ordering::Relaxed)
            && self.kernel_waiters.load(Ordering::SeqCst) > 0
            && let Some(net) = runtime::opened_net()
        {
            self.poll(net);
        }
        Ok(())
    }

    /// Handles the move of a kernel member to Tidegate.
    fn on_moved(&self, fd: i32, socket: &Arc<Socket>) {
        let Some((events, data)) = lock(&self.members).kernel_fds.remove(&fd) else { return };
        // Fails when the descriptor was closed meanwhile: no longer a member.
        if kernel_ctl(self.fd, libc::EPOLL_CTL_DEL, fd, 0, 0).is_ok() {
            // Can fail only for lack of memory.
            let _ = self.control_socket(libc::EPOLL_CTL_ADD, fd, socket, events, data);
        }
    }

    /// Handles the return of a member to the kernel alone.
    fn on_returned(&self, fd: i32, socket: &Arc<Socket>) {
        let mut members = lock(&self.members);
        let Some(slot) = members.sockets.find(fd, socket) else { return };
        let registration = members.sockets.get(slot).map(|member| (member.events, member.data));
        members.sockets.remove(fd);
        if let Some((events, data)) = registration {
            members.kernel_fds.insert(fd, (events, data));
            // Fails when the kernel epoll has the descriptor already.
            let _ = kernel_ctl(self.fd, libc::EPOLL_CTL_ADD, fd, events, data);
        }
        let is_second = members.in_second_poll.remove(&slot);
        let poll = if is_second { self.second_poll.get() } else { self.poll.get() };
        if let Some(poll) = poll {
            // The registration also ends with its socket.
            let _ = socket.net.batch(|batch| batch.deregister(poll, socket.source()));
        }
    }

    /// Tidegate's part, for a caller that waits for the set itself. Empty without members of
    /// Tidegate.
    pub(crate) fn tidegate_polls(&self) -> impl Iterator<Item = &Poll> {
        self.poll.get().into_iter().chain(self.second_poll.get())
    }

    /// True when Tidegate's part has events.
    pub(crate) fn is_ready(&self) -> bool {
        self.tidegate_polls().any(|poll| poll.readiness().readable)
    }

    /// `epoll_pwait2`: writes events and returns their number.
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
        let remaining = || match timeout {
            Some(Duration::ZERO) => timeout,
            _ => deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        if let Some(count) = self.wait_kernel_only(events, remaining(), mask)? {
            return Ok(count);
        }
        let Some(net) = runtime::opened_net() else { return Ok(0) };
        if runtime::is_child() {
            return Err(runtime::child_error());
        }
        let on_kernel = pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        let mut kernel = KernelWaiter::new(vec![on_kernel], mask.copied());
        loop {
            let inner = self.nested_sets();
            let inner = inner.iter().flat_map(|(inner, ..)| inner.tidegate_polls());
            let polls = self.tidegate_polls().chain(inner);
            let sources: Vec<(&dyn Source, Interest)> =
                polls.map(|poll| (poll as &dyn Source, Interest::Readable)).collect();
            let found = net.wait(&sources, remaining(), &mut kernel)?;
            let polls_kernel = match kernel.take_polled() {
                true => kernel.fds[0].revents != 0,
                false => self.kernel_polls.are_due(),
            };
            let count = self.collect_ready(net, events, polls_kernel)?;
            kernel.fds[0].revents = 0;
            if count > 0 || !found {
                return Ok(count);
            }
        }
    }

    /// Waits for the kernel alone while all members are the kernel's. Returns `None` when the
    /// set has Tidegate members.
    fn wait_kernel_only(
        &self,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: Option<&sigset_t>,
    ) -> io::Result<Option<usize>> {
        let has_tidegate_members = || {
            self.poll.get().is_some()
                || self.has_nested.load(Ordering::Relaxed) && runtime::opened_net().is_some()
        };
        if has_tidegate_members() {
            return Ok(None);
        }
        self.kernel_waiters.fetch_add(1, Ordering::SeqCst);
        let waited = match has_tidegate_members() {
            true => Ok(0),
            false => wait_kernel(self.fd, events, timeout, mask),
        };
        self.kernel_waiters.fetch_sub(1, Ordering::SeqCst);
        let count = self.remove_kick_event(events, waited?);
        Ok((count > 0 || !has_tidegate_members()).then_some(count))
    }

    /// Removes the kick event from the events; returns the number of remaining events.
    fn remove_kick_event(&self, events: &mut [epoll_event], count: usize) -> usize {
        let Some(position) = events[..count].iter().position(|event| event.u64 == KICK_DATA) else {
            return count;
        };
        events.copy_within(position + 1..count, position);
        // It wakes every thread that still waits for the kernel alone. From now on no thread does.
        if self.kernel_waiters.load(Ordering::SeqCst) == 0
            && let Some(Some(kick)) = self.kick_fd.get()
        {
            let _ = kernel_ctl(self.fd, libc::EPOLL_CTL_DEL, kick.as_fd().as_raw_fd(), 0, 0);
        }
        count - 1
    }

    fn nested_sets(&self) -> Vec<(Arc<Epoll>, u32, u64)> {
        if !self.has_nested.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let members = lock(&self.members);
        let nested = members.nested.iter();
        nested
            .filter_map(|nested| Some((nested.inner.upgrade()?, nested.events, nested.data)))
            .collect()
    }

    /// Writes the ready events to `events`; returns their number.
    fn collect_ready(
        &self,
        net: &Net,
        events: &mut [epoll_event],
        polls_kernel: bool,
    ) -> io::Result<usize> {
        // When due, the kernel's events come first: a caller that takes few events at a time
        // must not starve them.
        let mut count = 0;
        if polls_kernel {
            let max = events.len().div_ceil(2);
            count = wait_kernel(self.fd, &mut events[..max], Some(Duration::ZERO), None)?;
            count = self.remove_kick_event(events, count);
        }
        let before = count;
        for (inner, watched, data) in self.nested_sets() {
            if count < events.len() && watched & IN != 0 && inner.is_ready() {
                events[count] = epoll_event { events: IN, u64: data };
                count += 1;
            }
        }
        count += self.collect_ready_sockets(&mut events[count..]);
        // The application will answer each event; the last answer sends the deferred frames, too.
        net.defer_transmit((count - before).saturating_sub(1) as u32);
        Ok(count)
    }

    fn collect_ready_sockets(&self, events: &mut [epoll_event]) -> usize {
        let mut polls = [self.poll.get(), self.second_poll.get()];
        // A caller that takes few events at a time must not starve either.
        if polls[1].is_some() && self.is_seconds_turn.fetch_xor(true, Ordering::Relaxed) {
            polls.reverse();
        }
        let mut count = 0;
        for poll in polls.into_iter().flatten() {
            let mut found: Vec<Ready> = Vec::new();
            poll.collect_ready(&mut found, events.len() - count);
            count += lock(&self.members).sockets.write_events(&found, &mut events[count..]);
        }
        count
    }
}

fn wait_kernel(
    fd: i32,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    let limit = i32::try_from(events.len()).unwrap_or(i32::MAX);
    // The kernel counts in milliseconds, and a wait must not be too short: round up.
    let timeout = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_micros().div_ceil(1_000)).unwrap_or(i32::MAX)
    });
    let first_event = events.as_mut_ptr();
    // SAFETY: the slice has `limit` elements; the mask is valid or null.
    let wait = || unsafe { real::epoll_pwait(fd, first_event, limit, timeout, mask) };
    let count = signals::outside_stack(wait);
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Updates the sets that contain a socket which has moved to Tidegate.
pub(crate) fn on_moved(fd: i32, socket: &Arc<Socket>) {
    let all: Vec<Arc<Epoll>> = lock(&ALL_SETS).iter().filter_map(Weak::upgrade).collect();
    all.iter().for_each(|epoll| epoll.on_moved(fd, socket));
}

/// Updates the sets that contain a socket which has returned to the kernel.
pub(crate) fn on_returned(fd: i32, socket: &Arc<Socket>) {
    let all: Vec<Arc<Epoll>> = lock(&ALL_SETS).iter().filter_map(Weak::upgrade).collect();
    all.iter().for_each(|epoll| epoll.on_returned(fd, socket));
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn create_set() -> (OwnedFd, Arc<Epoll>) {
        // SAFETY: creates a descriptor with one owner.
        let fd = unsafe { OwnedFd::from_raw_fd(real::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let set = Epoll::new(fd.as_raw_fd());
        (fd, set)
    }

    /// A waiting thread can have the kick event before the thread that sends it goes on.
    #[test]
    fn removes_the_kick_event_whatever_its_sender_has_done() {
        let (_fd, set) = create_set();
        let event = |data| epoll_event { events: IN, u64: data };
        let mut events = [event(1), event(KICK_DATA), event(2)];
        assert_eq!(set.remove_kick_event(&mut events, 3), 2);
        assert_eq!(events.map(|event| event.u64)[..2], [1, 2]);
    }

    #[test]
    fn the_kick_event_wakes_all_threads_and_ends() {
        const THREADS: u32 = 3;
        let (fd, set) = create_set();
        thread::scope(|scope| {
            let wait =
                || set.wait_kernel_only(&mut [epoll_event { events: 0, u64: 0 }], None, None);
            let waiters: Vec<_> = (0..THREADS).map(|_| scope.spawn(wait)).collect();
            while set.kernel_waiters.load(Ordering::SeqCst) < THREADS {
                thread::yield_now();
            }
            set.wake_kernel_waiters();
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap().unwrap(), Some(0));
            }
        });
        let mut events = [epoll_event { events: 0, u64: 0 }];
        let waited = wait_kernel(fd.as_raw_fd(), &mut events, Some(Duration::ZERO), None);
        assert_eq!(waited.unwrap(), 0, "the kick event is gone");
    }
}
