//! Sets of descriptors to wait for, of Tidegate and of the kernel.
//!
//! A set is a kernel's epoll with the kernel's members, and beside it a
//! [`Poll`] with Tidegate's. Waiting takes from both.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use libc::{epoll_event, pollfd, sigset_t};
use tidegate::{Interest, Net, Poll, Readiness, Ready, Source, Token, Trigger};

use crate::sleeper::KernelSide;
use crate::socket::Socket;
use crate::table::Entry;
use crate::{real, signals, start, table};

/// While there is always something of Tidegate's, the kernel is asked so often.
const KERNEL_EVERY: Duration = Duration::from_micros(100);

/// What wakes a thread that waits for the kernel alone; no program has it.
const KICK: u64 = 0x7469_6465_6761_7465;

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;

/// A set.
pub(crate) struct Epoll {
    /// The kernel's part.
    fd: i32,
    /// Tidegate's part, from the first member on.
    poll: OnceLock<Poll>,
    members: Mutex<Members>,
    has_nested: AtomicBool,
    /// Threads that wait for the kernel's part alone.
    direct: AtomicU32,
    /// What wakes them when Tidegate's part is made.
    kick: OnceLock<OwnedFd>,
    /// When the kernel was asked last.
    asked: Mutex<Option<Instant>>,
}

#[derive(Default)]
pub(crate) struct Members {
    ours: Vec<Option<Member>>,
    /// Where in `ours` a descriptor is.
    by_fd: HashMap<i32, usize>,
    free: Vec<usize>,
    /// The kernel's members, some of which may move.
    kernel: HashMap<i32, (u32, u64)>,
    nested: Vec<Nested>,
}

struct Member {
    socket: Weak<Socket>,
    events: u32,
    data: u64,
}

/// A set in a set: the kernel looks after its kernel's part.
struct Nested {
    fd: i32,
    inner: Weak<Epoll>,
    events: u32,
    data: u64,
}

static ALL: Mutex<Vec<Weak<Epoll>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it is there no other thread changes a set.
pub(crate) struct Held {
    // Fields are dropped in their order: the guards before what they guard.
    _members: Vec<MutexGuard<'static, Members>>,
    _sets: Vec<Arc<Epoll>>,
    _all: MutexGuard<'static, Vec<Weak<Epoll>>>,
}

/// Holds back every thread that wants to change a set.
pub(crate) fn hold() -> Held {
    let all = lock(&ALL);
    let sets: Vec<Arc<Epoll>> = all.iter().filter_map(Weak::upgrade).collect();
    let hold = |set: &Arc<Epoll>| {
        let guard = lock(&set.members);
        // SAFETY: the set stays where it is as long as `Held` has it, which drops
        // this guard before.
        unsafe {
            std::mem::transmute::<MutexGuard<'_, Members>, MutexGuard<'static, Members>>(guard)
        }
    };
    Held { _members: sets.iter().map(hold).collect(), _sets: sets, _all: all }
}

/// All that a socket is ready for, in the kernel's words.
pub(crate) fn words(ready: Readiness) -> u32 {
    let mut words = 0;
    for (is, word) in [
        (ready.readable, IN | libc::EPOLLRDNORM as u32),
        (ready.writable, OUT | libc::EPOLLWRNORM as u32),
        (ready.read_closed, RDHUP),
        (ready.read_closed && ready.write_closed, HUP),
        (ready.failed, ERR),
    ] {
        if is {
            words |= word;
        }
    }
    words
}

/// What a program waits for, by the kernel's words.
pub(crate) fn interest(events: u32) -> Interest {
    match (events & IN != 0, events & OUT != 0) {
        (true, true) => Interest::Both,
        (true, false) => Interest::Readable,
        (false, true) => Interest::Writable,
        (false, false) => Interest::Neither,
    }
}

fn trigger(events: u32) -> Trigger {
    match events {
        _ if events & libc::EPOLLONESHOT as u32 != 0 => Trigger::OneShot,
        _ if events & libc::EPOLLET as u32 != 0 => Trigger::Edge,
        _ => Trigger::Level,
    }
}

fn control(epoll: i32, operation: i32, fd: i32, events: u32, data: u64) -> io::Result<()> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: the event is valid, and the kernel judges the descriptors.
    match unsafe { real::epoll_ctl(epoll, operation, fd, &mut event) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Members {
    /// Where a descriptor is, if it is still the socket that was added.
    fn find(&mut self, fd: i32, socket: &Arc<Socket>) -> Option<usize> {
        let at = *self.by_fd.get(&fd)?;
        let member = self.ours.get(at)?.as_ref()?;
        if member.socket.ptr_eq(&Arc::downgrade(socket)) {
            return Some(at);
        }
        // It was closed, and its number was used again.
        self.remove(fd);
        None
    }

    fn remove(&mut self, fd: i32) {
        if let Some(at) = self.by_fd.remove(&fd) {
            self.ours[at] = None;
            self.free.push(at);
        }
    }

    fn insert(&mut self, fd: i32, member: Member) -> usize {
        let at = self.free.pop().unwrap_or_else(|| {
            self.ours.push(None);
            self.ours.len() - 1
        });
        self.ours[at] = Some(member);
        self.by_fd.insert(fd, at);
        at
    }
}

impl Epoll {
    /// The set of a new epoll of the kernel's.
    pub(crate) fn new(fd: i32) -> Arc<Self> {
        let epoll = Arc::new(Self {
            fd,
            poll: OnceLock::new(),
            members: Mutex::default(),
            has_nested: AtomicBool::new(false),
            direct: AtomicU32::new(0),
            kick: OnceLock::new(),
            asked: Mutex::new(None),
        });
        let mut all = lock(&ALL);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&epoll));
        epoll
    }

    fn poll(&self, net: &Net) -> &Poll {
        let poll = self.poll.get_or_init(|| Poll::new(net));
        if self.direct.load(Ordering::SeqCst) > 0 {
            self.kick();
        }
        poll
    }

    /// Wakes the threads that wait for the kernel alone.
    fn kick(&self) {
        self.kick.get_or_init(|| {
            // SAFETY: makes a descriptor, and gives it to its one owner.
            let bell = unsafe { OwnedFd::from_raw_fd(libc::eventfd(1, libc::EFD_CLOEXEC)) };
            // Without it they wake up with the next event of the kernel's.
            let _ = control(self.fd, libc::EPOLL_CTL_ADD, bell.as_raw_fd(), IN, KICK);
            bell
        });
    }

    /// `epoll_ctl` for a descriptor that is `entry`.
    ///
    /// # Errors
    /// Those of `epoll_ctl`.
    pub(crate) fn control(
        &self,
        operation: i32,
        fd: i32,
        entry: Option<&Entry>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        match entry {
            Some(Entry::Socket(socket)) => self.control_ours(operation, fd, socket, events, data),
            Some(Entry::Epoll(inner)) => self.control_nested(operation, fd, inner, events, data),
            None => {
                control(self.fd, operation, fd, events, data)?;
                let mut members = lock(&self.members);
                match operation {
                    libc::EPOLL_CTL_DEL => members.kernel.remove(&fd),
                    _ => members.kernel.insert(fd, (events, data)),
                };
                Ok(())
            }
        }
    }

    fn control_ours(
        &self,
        operation: i32,
        fd: i32,
        socket: &Arc<Socket>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        let mut members = lock(&self.members);
        let (poll, source) = (self.poll(socket.net), socket.source());
        let found = members.find(fd, socket);
        let missing = || io::Error::from_raw_os_error(libc::ENOENT);
        match operation {
            libc::EPOLL_CTL_ADD => {
                if found.is_some() {
                    return Err(io::Error::from_raw_os_error(libc::EEXIST));
                }
                let member = Member { socket: Arc::downgrade(socket), events, data };
                let at = members.insert(fd, member);
                let added = socket.net.batch(|batch| {
                    batch.register(poll, source, Token(at), interest(events))?;
                    batch.set_trigger(poll, source, trigger(events))
                })?;
                if let Err(error) = added {
                    members.remove(fd);
                    return Err(error);
                }
            }
            libc::EPOLL_CTL_MOD => {
                let at = found.ok_or_else(missing)?;
                if let Some(member) = &mut members.ours[at] {
                    (member.events, member.data) = (events, data);
                }
                socket.net.batch(|batch| {
                    batch.set_trigger(poll, source, trigger(events))?;
                    batch.reregister(poll, source, Token(at), interest(events))
                })??;
            }
            _ => {
                found.ok_or_else(missing)?;
                members.remove(fd);
                socket.net.batch(|batch| batch.deregister(poll, source))??;
            }
        }
        drop(members);
        if socket.has_kernel {
            // What it does not have it cannot lose.
            let _ = control(self.fd, operation, fd, events, data);
        }
        Ok(())
    }

    fn control_nested(
        &self,
        operation: i32,
        fd: i32,
        inner: &Arc<Epoll>,
        events: u32,
        data: u64,
    ) -> io::Result<()> {
        control(self.fd, operation, fd, events, data)?;
        let mut members = lock(&self.members);
        members.nested.retain(|nested| nested.fd != fd && nested.inner.strong_count() > 0);
        if operation != libc::EPOLL_CTL_DEL {
            members.nested.push(Nested { fd, inner: Arc::downgrade(inner), events, data });
        }
        self.has_nested.store(!members.nested.is_empty(), Ordering::Relaxed);
        drop(members);
        if self.has_nested.load(Ordering::Relaxed)
            && self.direct.load(Ordering::SeqCst) > 0
            && let Some(net) = start::open_net()
        {
            self.poll(net);
        }
        Ok(())
    }

    /// A member of the kernel's has moved.
    fn on_moved(&self, fd: i32, socket: &Arc<Socket>) {
        let Some((events, data)) = lock(&self.members).kernel.remove(&fd) else { return };
        // One that was closed since is not a member any more.
        if control(self.fd, libc::EPOLL_CTL_DEL, fd, 0, 0).is_ok() {
            // Only a lack of memory is left to go wrong.
            let _ = self.control_ours(libc::EPOLL_CTL_ADD, fd, socket, events, data);
        }
    }

    /// A member of both is the kernel's alone from now on.
    fn on_returned(&self, fd: i32, socket: &Arc<Socket>) {
        let mut members = lock(&self.members);
        let Some(at) = members.find(fd, socket) else { return };
        let known = members.ours[at].as_ref().map(|member| (member.events, member.data));
        members.remove(fd);
        members.kernel.extend(known.map(|known| (fd, known)));
        if let Some(poll) = self.poll.get() {
            // It ends with its socket, too.
            let _ = socket.net.batch(|batch| batch.deregister(poll, socket.source()));
        }
    }

    /// Tidegate's part for somebody who waits for the set itself.
    pub(crate) fn tidegate(&self) -> Option<&Poll> {
        self.poll.get()
    }

    /// Whether Tidegate's part has something.
    pub(crate) fn is_ready(&self) -> bool {
        self.tidegate().is_some_and(|poll| poll.readiness().readable)
    }

    /// `epoll_pwait2`: gives how many events there are.
    ///
    /// # Errors
    /// Those of `epoll_wait`.
    pub(crate) fn wait(
        &self,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: Option<&sigset_t>,
    ) -> io::Result<usize> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let left = || match timeout {
            Some(Duration::ZERO) => timeout,
            _ => deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        if let Some(count) = self.wait_direct(events, left(), mask)? {
            return Ok(count);
        }
        let Some(net) = start::open_net() else { return Ok(0) };
        if start::is_child() {
            return Err(start::child_error());
        }
        let on_kernel = pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        let mut kernel = KernelSide::new(vec![on_kernel], mask.copied());
        loop {
            let inner = self.inner();
            let inner = inner.iter().filter_map(|(inner, ..)| inner.tidegate());
            let polls = self.tidegate().into_iter().chain(inner);
            let sources: Vec<(&dyn Source, Interest)> =
                polls.map(|poll| (poll as &dyn Source, Interest::Readable)).collect();
            let found = net.wait(&sources, left(), &mut kernel)?;
            start::has_run();
            let count = self.collect(net, events, kernel.fds[0].revents != 0)?;
            kernel.fds[0].revents = 0;
            if count > 0 || !found {
                return Ok(count);
            }
        }
    }

    /// Waits for the kernel alone, if it has all there is. `None` when there
    /// are members of Tidegate's.
    fn wait_direct(
        &self,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: Option<&sigset_t>,
    ) -> io::Result<Option<usize>> {
        let has_more = || {
            self.poll.get().is_some()
                || self.has_nested.load(Ordering::Relaxed) && start::open_net().is_some()
        };
        if has_more() {
            return Ok(None);
        }
        self.direct.fetch_add(1, Ordering::SeqCst);
        let waited = match has_more() {
            true => Ok(0),
            false => wait_kernel(self.fd, events, timeout, mask),
        };
        self.direct.fetch_sub(1, Ordering::SeqCst);
        let count = self.without_kick(events, waited?);
        Ok((count > 0 || !has_more()).then_some(count))
    }

    /// Takes the kick out of the events.
    fn without_kick(&self, events: &mut [epoll_event], count: usize) -> usize {
        let Some(kick) = self.kick.get() else { return count };
        let Some(at) = events[..count].iter().position(|event| event.u64 == KICK) else {
            return count;
        };
        // From now on all wait for both.
        let _ = control(self.fd, libc::EPOLL_CTL_DEL, kick.as_raw_fd(), 0, 0);
        events.copy_within(at + 1..count, at);
        count - 1
    }

    fn inner(&self) -> Vec<(Arc<Epoll>, u32, u64)> {
        if !self.has_nested.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let members = lock(&self.members);
        let nested = members.nested.iter();
        nested
            .filter_map(|nested| Some((nested.inner.upgrade()?, nested.events, nested.data)))
            .collect()
    }

    /// Puts what is ready into `events`.
    fn collect(
        &self,
        net: &Net,
        events: &mut [epoll_event],
        kernel_is_ready: bool,
    ) -> io::Result<usize> {
        // The kernel's come first when their time has come: a program that
        // takes few at once must not leave them out for ever.
        let mut count = 0;
        if kernel_is_ready || self.is_kernel_due() {
            let most = events.len().div_ceil(2);
            count = wait_kernel(self.fd, &mut events[..most], Some(Duration::ZERO), None)?;
            count = self.without_kick(events, count);
        }
        let before = count;
        for (inner, wanted, data) in self.inner() {
            if count < events.len() && wanted & IN != 0 && inner.is_ready() {
                events[count] = epoll_event { events: IN, u64: data };
                count += 1;
            }
        }
        count += self.collect_ours(&mut events[count..]);
        // Each of these will be answered; what the last one sends takes all along.
        net.defer_transmit((count - before).saturating_sub(1) as u32);
        Ok(count)
    }

    fn collect_ours(&self, events: &mut [epoll_event]) -> usize {
        let Some(poll) = self.poll.get() else { return 0 };
        let mut found: Vec<Ready> = Vec::new();
        poll.collect(&mut found, events.len());
        let members = lock(&self.members);
        let mut count = 0;
        for ready in found {
            let Some(Some(member)) = members.ours.get(ready.token.0) else { continue };
            let words = words(ready.readiness) & (member.events | ERR | HUP);
            if words != 0 {
                events[count] = epoll_event { events: words, u64: member.data };
                count += 1;
            }
        }
        count
    }

    fn is_kernel_due(&self) -> bool {
        let mut asked = lock(&self.asked);
        let now = Instant::now();
        let is_due = asked.is_none_or(|asked| now.duration_since(asked) >= KERNEL_EVERY);
        if is_due {
            *asked = Some(now);
        }
        is_due
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
    // The kernel counts in milliseconds, and a wait must not be too short.
    let timeout = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_micros().div_ceil(1_000)).unwrap_or(i32::MAX)
    });
    let place = events.as_mut_ptr();
    // SAFETY: the slice is as long as `limit` says; the mask is valid or null.
    let wait = || unsafe { real::epoll_pwait(fd, place, limit, timeout, mask) };
    let count = signals::outside(wait);
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// A socket has moved: the sets it is in wait for Tidegate's now.
pub(crate) fn on_moved(fd: i32, socket: &Arc<Socket>) {
    let all: Vec<Arc<Epoll>> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    all.iter().for_each(|epoll| epoll.on_moved(fd, socket));
}

/// A socket that the kernel had a part of is the kernel's again.
pub(crate) fn on_returned(fd: i32, socket: &Arc<Socket>) {
    let all: Vec<Arc<Epoll>> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    all.iter().for_each(|epoll| epoll.on_returned(fd, socket));
}

/// A new epoll of the kernel's is one of ours, if anything moves at all.
pub(crate) fn enter(fd: i32) {
    if fd >= 0 && start::rules().is_some() {
        table::put(fd, Entry::Epoll(Epoll::new(fd)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_kernels() {
        let ended = Readiness { readable: true, read_closed: true, ..Readiness::default() };
        assert_eq!(words(ended) & (IN | RDHUP | HUP | OUT), IN | RDHUP);
        let over = Readiness {
            readable: true,
            writable: true,
            read_closed: true,
            write_closed: true,
            failed: true,
        };
        assert_eq!(words(over) & (IN | OUT | RDHUP | HUP | ERR), IN | OUT | RDHUP | HUP | ERR);
        assert_eq!(words(Readiness::default()), 0);
    }

    #[test]
    fn one_shot_is_stronger_than_edge() {
        let both = libc::EPOLLET as u32 | libc::EPOLLONESHOT as u32;
        assert_eq!(trigger(both | IN), Trigger::OneShot);
        assert_eq!(trigger(libc::EPOLLET as u32), Trigger::Edge);
        assert_eq!(trigger(IN | OUT), Trigger::Level);
        assert_eq!(interest(IN | RDHUP), Interest::Readable);
        assert_eq!(interest(0), Interest::Neither);
    }

    #[test]
    fn a_place_is_used_again_after_its_member_is_gone() {
        let mut members = Members::default();
        let member = || Member { socket: Weak::new(), events: IN, data: 7 };
        let first = members.insert(5, member());
        let second = members.insert(6, member());
        assert_ne!(first, second);
        members.remove(5);
        members.remove(5);
        assert_eq!(members.insert(9, member()), first);
        assert_eq!(members.by_fd.len(), 2);
    }
}
