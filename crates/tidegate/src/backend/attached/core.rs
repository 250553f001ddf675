//! Attachments of an application, with the threads and tasks that wait for its sockets.

use std::io;
use std::os::fd::BorrowedFd;

use tidegate_engine::{IdleConfig, IdleGovernor};
use tidegate_service::Shard;
use tidegate_service::attachment::{Attachment, SocketType};

use super::attachments::{Attachments, SleepFds};
use super::kernel_sockets::KernelSockets;
use super::shards::Shards;
use super::socket_number::{listener_id, socket_number, stream_id, udp_id};
use crate::types::added_readiness::AddedReadiness;
use crate::types::exchange::ExchangeBuffers;
use crate::types::followers::Followers;
use crate::types::poll_sets::PollSets;
use crate::types::readiness::{Change, Readiness};
use crate::types::socket_id::SocketId;
use crate::types::tasks::Tasks;
use crate::types::waiters::Waiters;

/// Attachments of the application, and the threads and tasks that wait for its sockets.
pub(crate) struct AttachedCore {
    pub(super) attachments: Attachments,
    /// Sockets that are open on several attachments.
    pub(super) shards: Shards,
    pub(super) kernel_sockets: KernelSockets,
    pub(super) waiters: Waiters,
    /// Number of threads that sleep on the wake descriptor.
    leaders: usize,
    /// Threads that leave the wake descriptor to those.
    pub(super) followers: Followers,
    pub(super) poll_sets: PollSets,
    pub(super) tasks: Tasks,
    pub(super) added_readiness: AddedReadiness,
    /// A socket has changed since the last [`AttachedCore::check_ready`] began.
    pub(super) has_unchecked_change: bool,
    pub(super) idle: IdleGovernor,
    /// Buffers of exchanges; present after the first exchange.
    pub(super) exchange_buffers: Option<ExchangeBuffers>,
    /// The process filters its system calls: it makes only those that waiting and copying need.
    pub(super) filters_calls: bool,
    pub(super) has_daemon_exited: bool,
    /// Waits since the daemon exited.
    pub(super) waits_since_exit: u32,
}

/// Error of all operations after the daemon has exited.
pub(super) fn daemon_exited() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

/// Idle policy without spinning: the daemon may need this processor, and a pause yields it.
pub(super) fn new_idle(now_ns: u64) -> IdleGovernor {
    IdleGovernor::new(IdleConfig::default().spin_ns(0), now_ns)
}

/// Socket received from another process, by its socket number.
pub(crate) struct TransferredSocket {
    pub(crate) socket: u64,
    pub(crate) kind: SocketType,
    /// False if this process had the socket before.
    pub(crate) is_new: bool,
}

impl AttachedCore {
    pub(super) fn new(attachment: Attachment) -> io::Result<Self> {
        Ok(Self {
            attachments: Attachments::new(attachment)?,
            shards: Shards::default(),
            kernel_sockets: KernelSockets::default(),
            waiters: Waiters::default(),
            leaders: 0,
            followers: Followers::default(),
            poll_sets: PollSets::default(),
            tasks: Tasks::default(),
            added_readiness: AddedReadiness::default(),
            has_unchecked_change: false,
            idle: new_idle(0),
            exchange_buffers: None,
            filters_calls: false,
            has_daemon_exited: false,
            waits_since_exit: 0,
        })
    }

    /// Takes the daemon's notifications, and wakes the threads and tasks that wait for them.
    /// Returns true if there was any.
    pub(crate) fn poll_daemon(&mut self) -> io::Result<bool> {
        let received = match self.attachments.poll() {
            Ok(result) => result,
            Err(error) => {
                self.fail();
                return Err(error);
            }
        };
        self.dispatch_events()?;
        Ok(received)
    }

    /// Wakes the threads and tasks that wait for the changed sockets.
    pub(super) fn dispatch_events(&mut self) -> io::Result<()> {
        while let Some((number, changed)) = self.attachments.next_changed() {
            let number = self.shards.socket_of(number);
            let id = match changed.socket_type {
                SocketType::Udp => SocketId::Udp(udp_id(number)),
                SocketType::Stream => SocketId::Stream(stream_id(number)),
                SocketType::Listener => SocketId::Listener(listener_id(number)?),
            };
            self.has_unchecked_change = true;
            self.wake(id, if changed.has_news { Change::Any } else { Change::Space });
        }
        Ok(())
    }

    /// Checks if a wait has ended. A check that calls the daemon may take the notification of a socket
    /// that it has passed already: then [`AttachedCore::has_unchecked_change`] asks for another one.
    pub(super) fn check_ready(&mut self, ready: &mut dyn FnMut(&mut Self) -> bool) -> bool {
        self.has_unchecked_change = false;
        ready(self)
    }

    /// Wakes the threads and tasks that wait for a socket, alone or in a set.
    pub(super) fn wake(&mut self, id: SocketId, change: Change) {
        self.waiters.wake(id);
        self.poll_sets.on_event(id, change, &self.waiters);
        self.tasks.wake_both(id);
    }

    /// Finishes a sleep on `fds`. Returns true if a notification had arrived. `has_other_event`:
    /// another descriptor has ended the sleep.
    pub(super) fn finish_sleep_on(
        &mut self,
        fds: &SleepFds,
        has_other_event: bool,
    ) -> io::Result<bool> {
        let ended = self.attachments.end_sleep_on(fds, has_other_event);
        ended.inspect_err(|_| self.fail())?;
        self.poll_daemon()
    }

    /// Finishes a sleep on the wake descriptor. Returns true if a notification had arrived.
    #[cfg(feature = "tokio")]
    pub(crate) fn finish_sleep(&mut self) -> io::Result<bool> {
        self.attachments.end_sleep().inspect_err(|_| self.fail())?;
        self.poll_daemon()
    }

    /// Prepares a sleep on the wake descriptor. Returns `false` when a notification waits.
    #[cfg(feature = "tokio")]
    pub(crate) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.attachments.prepare_sleep().inspect_err(|_| self.fail())
    }

    /// Registers a thread that sleeps on the wake descriptor.
    pub(super) fn enter_leading(&mut self) {
        self.leaders += 1;
        self.followers.set_leaders(self.leaders);
    }

    /// Removes a thread that slept on the wake descriptor.
    pub(super) fn leave_leading(&mut self) {
        self.leaders -= 1;
        self.followers.set_leaders(self.leaders);
    }

    /// Forgets the threads of the parent in a forked child. Their doorbells and locks stay with the
    /// parent's threads, so nothing of them is touched.
    pub(super) fn forget_threads(&mut self) {
        self.waiters = Waiters::default();
        self.tasks = Tasks::default();
        self.leaders = 0;
        std::mem::forget(std::mem::take(&mut self.followers));
    }

    /// Records that the daemon has exited, and wakes all waiters.
    pub(super) fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_daemon_exited, true) {
            self.poll_sets.on_event_for_all(&self.waiters);
            self.waiters.wake_all();
            self.tasks.wake_all();
        }
    }

    pub(super) fn readiness_of(&mut self, id: SocketId) -> Readiness {
        let Some(number) = socket_number(id) else { return Readiness::default() };
        let first = self.attachments.readiness(self.shards.first(number));
        let others = self.shards.others(number);
        let add = |found: Readiness, &other: &u64| found.union(self.attachments.readiness(other));
        let found = others.iter().fold(first, add);
        self.added_readiness.apply(id, found)
    }

    /// Like [`Attachment::reserve_port`]. With several attachments the socket is kept until the
    /// attachments that get its port are known.
    pub(crate) fn reserve_port(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.attachments.max() == 1 {
            return self.attachments.first().reserve_port(Shard::ONLY, fd);
        }
        self.kernel_sockets.insert(fd)
    }

    /// Waits until the daemon has executed all previous commands.
    pub(crate) fn await_closed(&mut self) -> io::Result<()> {
        self.attachments.ping()
    }

    /// Like [`Attachment::send_socket`], with all shards.
    pub(crate) fn send_socket(&mut self, id: SocketId, fd: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.shards.shards_of(socket_number(id).ok_or(io::ErrorKind::InvalidInput)?);
        let count = all.len() as u8;
        let mut sent = Ok(());
        let mut sent_count = 0;
        for &shard in &all {
            let (attachment, socket) = self.attachments.attachment_of(shard)?;
            sent = attachment.send_socket(socket, Shard { index: sent_count, count }, fd);
            if sent.is_err() {
                break;
            }
            sent_count += 1;
        }
        if sent.is_err() {
            self.withdraw_shards(&all[..sent_count.into()], fd)?;
        }
        sent
    }

    /// Like [`Attachment::withdraw_socket`], with all shards.
    pub(crate) fn withdraw_socket(&mut self, id: SocketId, fd: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.shards.shards_of(socket_number(id).ok_or(io::ErrorKind::InvalidInput)?);
        self.withdraw_shards(&all, fd)
    }

    fn withdraw_shards(&mut self, shards: &[u64], fd: BorrowedFd<'_>) -> io::Result<()> {
        (0..).zip(shards).try_for_each(|(number, &part)| {
            let (attachment, _) = self.attachments.attachment_of(part)?;
            attachment.withdraw_socket(number, fd)
        })
    }

    /// Like [`Attachment::receive_socket`], with all shards, each on an attachment of its own as far as
    /// there are enough.
    pub(crate) fn receive_socket(&mut self, fd: BorrowedFd<'_>) -> io::Result<TransferredSocket> {
        let first = self.attachments.first().receive_socket(0, fd)?;
        let socket = self.attachments.pack(0, first.socket);
        let received = TransferredSocket { socket, kind: first.socket_type, is_new: first.is_new };
        if !first.is_new || first.shards == 1 {
            return Ok(received);
        }
        self.attachments.attach_to_all_cores();
        let mut all = vec![socket];
        for shard in 1..first.shards {
            let index = usize::from(shard) % self.attachments.count();
            match self.attachments.get(index)?.receive_socket(shard, fd) {
                Ok(other) => all.push(self.attachments.pack(index, other.socket)),
                // The daemon has no shard of this number.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(error) => {
                    all.into_iter().for_each(|shard| self.attachments.close(shard, false));
                    return Err(error);
                }
            }
        }
        self.shards.insert(all);
        Ok(received)
    }

    /// Runs `call` on the poll sets, with a function that returns a socket's readiness.
    pub(super) fn with_polls<R>(
        &mut self,
        call: impl FnOnce(&mut PollSets, &mut dyn FnMut(SocketId) -> Readiness) -> R,
    ) -> R {
        let mut polls = std::mem::take(&mut self.poll_sets);
        let result = call(&mut polls, &mut |id| self.readiness_of(id));
        self.poll_sets = polls;
        result
    }
}
