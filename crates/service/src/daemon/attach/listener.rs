//! Thread of the attach listener: accepts connections, and waits for their first message.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::Doorbell;

use super::bound_socket::BoundSocket;
use super::heap_trim::HeapTrim;
use super::hello::{HANDSHAKE_TIMEOUT, HandshakeOutcome, handle_hello};
use crate::daemon::core::cores::Cores;
use crate::daemon::log::Log;

/// Maximum number of connections without a first message; further ones wait in the backlog.
const MAX_PENDING_HANDSHAKES: usize = 256;

/// Thread that accepts applications.
pub(in crate::daemon) struct AttachListener {
    stop: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl AttachListener {
    /// Starts the thread, which accepts from the first message on `may_begin`. If the sender is
    /// dropped instead, the socket is left to its owner.
    pub(in crate::daemon) fn open(
        mut socket: BoundSocket,
        cores: Arc<Cores>,
        log: Log,
        may_begin: mpsc::Receiver<()>,
    ) -> io::Result<Self> {
        let stop = Arc::new(Doorbell::new()?);
        stop.arm();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("tidegate-door".into()).spawn(move || {
            if may_begin.recv().is_ok() {
                socket.removes_on_drop = true;
                accept_applications(&mut socket, &cores, &log, &stopped);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for AttachListener {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Accepts connections and handles their first message, without waiting for any single
/// connection. After detached applications the heap is trimmed here, as no packets wait for
/// this thread.
fn accept_applications(socket: &mut BoundSocket, cores: &Cores, log: &Log, stop: &Arc<Doorbell>) {
    let mut pending: VecDeque<(UnixStream, Instant)> = VecDeque::new();
    let bell = cores.detach_bell();
    bell.arm();
    let mut heap_trim = HeapTrim::new(Instant::now());
    loop {
        let now = Instant::now();
        heap_trim.trim_if_due(now);
        while let Some((_, since)) = pending.front()
            && now.duration_since(*since) >= HANDSHAKE_TIMEOUT
        {
            pending.pop_front();
            log("a connection was closed: no first message within 1 s");
        }
        let timeout =
            pending.front().map(|(_, since)| HANDSHAKE_TIMEOUT - now.duration_since(*since));
        let timeout = timeout.into_iter().chain(heap_trim.time_left(now)).min().map(|left| {
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
        fds.extend(pending.iter().map(|(connection, _)| PollFd::new(connection, PollFlags::IN)));
        if pending.len() < MAX_PENDING_HANDSHAKES {
            fds.push(PollFd::new(&socket.listener, PollFlags::IN));
        }
        let polled = poll(&mut fds, timeout.as_ref());
        if !matches!(polled, Ok(_) | Err(rustix::io::Errno::INTR)) || !fds[0].revents().is_empty() {
            return;
        }
        if !fds[1].revents().is_empty() {
            heap_trim.on_detach(Instant::now());
            bell.disarm();
            bell.arm();
        }
        let readable: Vec<bool> = fds[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut readable_iter = readable.into_iter();
        let (ready, rest) = std::mem::take(&mut pending)
            .into_iter()
            .partition::<VecDeque<_>, _>(|_| readable_iter.next() == Some(true));
        pending = rest;
        for (connection, _) in ready {
            match handle_hello(connection, socket, cores, log) {
                Ok(HandshakeOutcome::Served) => {}
                Ok(HandshakeOutcome::Replaced) => {
                    socket.removes_on_drop = false;
                    return;
                }
                Err(error) => log(&format!("a connection was rejected: {error}")),
            }
        }
        while pending.len() < MAX_PENDING_HANDSHAKES
            && let Ok((connection, _)) = socket.listener.accept()
        {
            pending.push_back((connection, Instant::now()));
        }
    }
}
