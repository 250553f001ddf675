//! Attachments of an application: one at first, and one for each network core of the daemon
//! once the application opens a sharded socket.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::{Timespec, epoll};
use tidegate_memory::OwnFd;
use tidegate_service::Handle;
use tidegate_service::attachment::{Attachment, ChangedSocket, has_hung_up};

use crate::types::readiness::Readiness;

/// Most network cores, and so attachments, that one application uses.
const MAX_ATTACHMENTS: usize = 64;

/// Attachments to one daemon. Their sockets are named by socket numbers: attachment index and
/// socket handle packed into 64 bits.
pub(super) struct Attachments {
    all: Vec<Attachment>,
    /// Upper limit of attachments.
    max: usize,
    /// Edge-triggered `epoll` of all attachments: readable after a wake-up, until its events are
    /// read.
    wake_fd: Arc<OwnFd>,
    /// The daemon refused another attachment: the number stays as it is.
    is_attach_refused: bool,
    /// Index of the attachment that opened a socket last, for round robin.
    next: usize,
}

/// Descriptors on which a thread sleeps: one is readable when the daemon has sent a notification or
/// has ended.
pub(super) enum SleepFds {
    /// Those of the only attachment.
    OfAttachment([Arc<OwnFd>; 2]),
    /// `epoll` of all attachments.
    Epoll(Arc<OwnFd>),
}

/// Packs an attachment index and a socket handle; with one attachment only, the number is the
/// handle itself.
fn pack(attachment: usize, max: usize, socket: Handle) -> u64 {
    let slot = u64::from(socket.slot) * max as u64 + attachment as u64;
    u64::from(socket.generation) << 32 | slot
}

/// Unpacks the attachment index and the socket handle of a socket number.
fn unpack(number: u64, max: usize) -> (usize, Handle) {
    let (slot, generation) = (number as u32, (number >> 32) as u32);
    let most = max as u32;
    ((slot % most) as usize, Handle { slot: slot / most, generation })
}

impl Attachments {
    pub(super) fn new(first: Attachment) -> io::Result<Self> {
        let max = first.cores().clamp(1, MAX_ATTACHMENTS);
        Self::with(vec![first], max)
    }

    fn with(all: Vec<Attachment>, max: usize) -> io::Result<Self> {
        let wake_fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let attachments =
            Self { all, max, wake_fd: Arc::new(wake_fd.into()), is_attach_refused: false, next: 0 };
        attachments
            .all
            .iter()
            .try_for_each(|attachment| attachment.watch(&*attachments.wake_fd))?;
        Ok(attachments)
    }

    /// Descriptors on which a thread sleeps while other threads hold the rest.
    pub(super) fn sleep_fds(&self) -> SleepFds {
        match (&self.all[..], self.max) {
            ([only], 1) => SleepFds::OfAttachment(only.sleep_fds()),
            // Attachments may be added during a sleep.
            _ => SleepFds::Epoll(Arc::clone(&self.wake_fd)),
        }
    }

    /// Descriptor that is readable when the daemon has sent a notification.
    #[cfg(feature = "tokio")]
    pub(super) fn wake_fd(&self) -> &Arc<OwnFd> {
        &self.wake_fd
    }

    /// Attaches to every network core, as far as the daemon allows.
    pub(super) fn attach_to_all_cores(&mut self) {
        while self.all.len() < self.max && !self.is_attach_refused {
            let attachment = self.all[0].connect_another();
            match attachment.and_then(|another| another.watch(&*self.wake_fd).map(|()| another)) {
                Ok(another) => self.all.push(another),
                // A process that has changed its user or root keeps the attachments it has.
                Err(_) => self.is_attach_refused = true,
            }
        }
    }

    /// Upper limit of attachments.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Current number of attachments.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Next attachment index, round robin.
    pub(super) fn next_index(&mut self) -> usize {
        self.next = (self.next + 1) % self.all.len();
        self.next
    }

    pub(super) fn pack(&self, index: usize, socket: Handle) -> u64 {
        pack(index, self.max, socket)
    }

    /// Attachment index and socket handle of a socket number.
    pub(super) fn unpack(&self, number: u64) -> (usize, Handle) {
        unpack(number, self.max)
    }

    /// Attachment by index.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none.
    pub(super) fn get(&mut self, line: usize) -> io::Result<&mut Attachment> {
        self.all.get_mut(line).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Attachment that has the socket of this number, and the socket's handle there.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none.
    pub(super) fn attachment_of(&mut self, number: u64) -> io::Result<(&mut Attachment, Handle)> {
        let (index, socket) = self.unpack(number);
        Ok((self.get(index)?, socket))
    }

    /// First attachment; it can answer any query to the daemon.
    pub(super) fn first(&mut self) -> &mut Attachment {
        &mut self.all[0]
    }

    /// Readiness of a socket. A closed socket is ready for its error.
    pub(super) fn readiness(&mut self, number: u64) -> Readiness {
        let failed = Readiness { failed: true, readable: true, ..Readiness::default() };
        self.attachment_of(number)
            .map_or(failed, |(attachment, socket)| attachment.readiness(socket).into())
    }

    /// Closes a socket.
    pub(super) fn close(&mut self, number: u64, abrupt: bool) {
        if let Ok((attachment, socket)) = self.attachment_of(number) {
            attachment.close(socket, abrupt);
        }
    }

    /// Closes sockets, and waits until the daemon has closed them.
    pub(super) fn close_and_wait(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|&number| self.close(number, false));
        for &number in numbers {
            if let Ok((attachment, _)) = self.attachment_of(number) {
                // A daemon that has exited has none of the sockets.
                let _ = attachment.ping();
            }
        }
    }

    /// Takes the daemon's notifications. Returns true if there was any.
    pub(super) fn poll(&mut self) -> io::Result<bool> {
        self.all.iter_mut().try_fold(false, |any, attachment| Ok(attachment.poll()? || any))
    }

    /// Next socket with an unhandled notification, and its number.
    pub(super) fn next_changed(&mut self) -> Option<(u64, ChangedSocket)> {
        let max = self.max;
        self.all.iter_mut().enumerate().find_map(|(index, attachment)| {
            attachment.next_changed().map(|changed| (pack(index, max, changed.handle), changed))
        })
    }

    /// True if a socket has an unhandled notification.
    pub(super) fn have_changed(&self) -> bool {
        self.all.iter().any(Attachment::has_changed)
    }

    /// Tells the network cores on which processor this thread runs. Returns true if one of them ran
    /// there last.
    pub(super) fn note_processor(&mut self, processor: usize) -> bool {
        let mut shares_processor = false;
        for attachment in &mut self.all {
            shares_processor |= attachment.note_processor(processor);
        }
        shares_processor
    }

    /// True if no network core runs while the thread that waited last does.
    pub(super) fn share_processor(&self) -> bool {
        self.all.iter().all(Attachment::shares_processor)
    }

    /// True if a network core waits for the processor of this thread.
    pub(super) fn is_processor_wanted(&self) -> bool {
        self.all.iter().any(Attachment::is_processor_wanted)
    }

    /// Like [`Attachment::defer_wake_ups`], for each attachment.
    pub(super) fn defer_wake_ups(&mut self, commands: u32) {
        self.all.iter_mut().for_each(|attachment| attachment.defer_wake_ups(commands));
    }

    /// Wakes the network cores for which commands wait.
    pub(super) fn wake_daemon_if_deferred(&mut self) {
        self.all.iter_mut().for_each(Attachment::wake_daemon_if_deferred);
    }

    /// Like [`Attachment::wake_daemon_if_overdue`], for each attachment.
    pub(super) fn wake_daemon_if_overdue(&mut self) {
        self.all.iter_mut().for_each(Attachment::wake_daemon_if_overdue);
    }

    /// Prepares a sleep on the wake descriptor. Returns `false` when a notification waits.
    pub(super) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.all
            .iter_mut()
            .try_fold(true, |quiet, attachment| Ok(attachment.prepare_sleep()? && quiet))
    }

    /// Finishes a sleep on the descriptors of [`Attachments::sleep_fds`], including a failed one.
    /// `has_other_event`: another descriptor has ended it.
    pub(super) fn end_sleep_on(&mut self, fds: &SleepFds, has_other_event: bool) -> io::Result<()> {
        match (fds, &mut self.all[..]) {
            (SleepFds::OfAttachment(_), [only]) => only.end_sleep_on_fds(has_other_event),
            _ => self.end_sleep(),
        }
    }

    /// Finishes a sleep on the wake descriptor, including a failed one.
    pub(super) fn end_sleep(&mut self) -> io::Result<()> {
        let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; MAX_ATTACHMENTS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted at most: then the next wait finds the events.
        let events = epoll::wait(&*self.wake_fd, &mut buffer[..], Some(&now));
        let has_hung_up = events.is_ok_and(|(events, _)| has_hung_up(events));
        // Every attachment must be reset, even if an earlier one fails.
        let all = self.all.iter_mut();
        all.map(|attachment| attachment.end_sleep(has_hung_up)).fold(Ok(()), Result::and)
    }

    /// Waits until the daemon has executed all previous commands.
    pub(super) fn ping(&mut self) -> io::Result<()> {
        self.all.iter_mut().try_for_each(|attachment| attachment.ping().map(|_| ()))
    }

    /// Creates attachments with the same sockets for a child that is about to be forked.
    pub(super) fn fork_children(&mut self) -> io::Result<Self> {
        let children =
            self.all.iter_mut().map(Attachment::fork_child).collect::<io::Result<_>>()?;
        Self::with(children, self.max)
    }

    /// Like [`Attachment::forgo_locks`], for each attachment.
    pub(super) fn forgo_locks(&mut self) {
        self.all.iter_mut().for_each(Attachment::forgo_locks);
    }

    /// Abandons the attachments in a child that got none of its own.
    pub(super) fn abandon(&mut self) {
        self.all.iter_mut().for_each(Attachment::abandon);
        if let Some(wake_fd) =
            self.all.first().and_then(|attachment| attachment.as_fd().try_clone_to_owned().ok())
        {
            self.wake_fd = Arc::new(wake_fd.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pack_and_unpack_are_inverse(
            max in 1..=MAX_ATTACHMENTS,
            attachment in 0..MAX_ATTACHMENTS,
            slot in 0..1_u32 << 20,
            generation: u32,
        ) {
            let (attachment, socket) = (attachment % max, Handle { slot, generation });
            prop_assert_eq!(unpack(pack(attachment, max, socket), max), (attachment, socket));
        }
    }
}
