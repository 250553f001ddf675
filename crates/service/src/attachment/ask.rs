//! What an application asks for and waits to be answered.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::shared::Broken;
use tidegate_stack::{TcpInfo, TcpOptions, UdpOptions};

use super::socket::{Kind, Socket};
use super::{Answer, Attachment, gone};
use crate::contract::command::{Command, Handle, Tag};
use crate::contract::notice::{Found, Granted};
use crate::contract::together::Together;

/// How long to look again and again before sleeping: the daemon on a core of its
/// own answers within this.
const SPIN: Duration = Duration::from_micros(20);

/// So many answers about addresses are kept.
const MOST_FOUND: usize = 1024;

/// A daemon that does not answer for so long will not.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

impl Attachment {
    /// A UDP socket. Port 0 lets the daemon choose; so it does how long the queue
    /// may be, whatever `options` say.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`],
    /// [`io::ErrorKind::QuotaExceeded`] when the daemon gives no more sockets.
    pub fn bind_udp(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Handle> {
        self.bind_udp_with(local, None, options)
    }

    /// As [`Attachment::bind_udp`], for sockets of several attachments that have a port
    /// together, with the same address and options. What peers send is divided among
    /// them: all of one peer's goes to one of them.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn bind_udp_with(
        &mut self,
        local: SocketAddr,
        together: Option<Together>,
        options: UdpOptions,
    ) -> io::Result<Handle> {
        let granted = self.ask(|tag| Command::Bind { tag, local, together, options })?;
        self.keep(granted, Kind::Datagrams, TcpOptions::default())
    }

    /// A UDP socket takes datagrams from this peer alone; from everybody with
    /// none.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a peer of the other family,
    /// [`io::ErrorKind::NetworkUnreachable`] without a route.
    pub fn connect_udp(&mut self, socket: Handle, peer: Option<SocketAddr>) -> io::Result<()> {
        let granted = self.ask(|tag| Command::Aim { tag, socket, peer })?;
        let socket = self.socket(socket)?;
        (socket.local, socket.peer) = (granted.local, granted.peer);
        Ok(())
    }

    /// A listener for connections, with room for so many that wait.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        self.listen_with(local, backlog, None, options)
    }

    /// As [`Attachment::listen`], for listeners of several attachments that have a port
    /// together, with the same address and options. Each new connection comes to one of
    /// them.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn listen_with(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        together: Option<Together>,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        let backlog = backlog.try_into().unwrap_or(u32::MAX);
        let granted = self.ask(|tag| Command::Listen { tag, local, backlog, together, options })?;
        self.keep(granted, Kind::Listener, options)
    }

    /// The connection that has waited longest, and its peer.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when none waits.
    pub fn accept(&mut self, listener: Handle) -> io::Result<(Handle, SocketAddr)> {
        let socket = self.socket(listener)?;
        let options = socket.options;
        if !socket.status().acceptable {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let granted = self.ask(|tag| Command::Accept { tag, listener })?;
        let peer = granted.peer.ok_or(io::ErrorKind::NotConnected)?;
        Ok((self.keep(granted, Kind::Stream, options)?, peer))
    }

    /// Begins to connect.
    ///
    /// # Errors
    /// When nothing leads there, or no port is free.
    pub fn connect_tcp(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        let granted = self.ask(|tag| Command::Connect { tag, local, remote, options })?;
        self.keep(granted, Kind::Stream, options)
    }

    fn keep(&mut self, granted: Granted, kind: Kind, options: TcpOptions) -> io::Result<Handle> {
        let socket = Socket::new(&self.memory, &granted, kind, options)?;
        self.insert(socket);
        Ok(granted.socket)
    }

    /// A socket is ours from now on.
    pub(super) fn insert(&mut self, socket: Socket) {
        let handle = socket.handle;
        let place = handle.place as usize;
        if place >= self.sockets.len() {
            self.sockets.resize_with(place + 1, || None);
        }
        // A change that was told before it was ours was heard by nobody.
        socket.place.changes.ask();
        self.changed.push_back(handle);
        self.sockets[place] = Some(Box::new(socket));
    }

    /// What the daemon knows of an address: whether it is its own, and where
    /// packets to it leave from. It is asked once for each.
    ///
    /// # Errors
    /// As [`Attachment::ping`].
    pub fn find(&mut self, address: IpAddr) -> io::Result<Found> {
        if let Some(found) = self.found.get(&address) {
            return Ok(*found);
        }
        let Answer::Found(found) = self.answer_to(|tag| Command::Find { tag, address })? else {
            return Err(self.end(Broken));
        };
        if self.found.len() >= MOST_FOUND {
            self.found.clear();
        }
        self.found.insert(address, found);
        Ok(found)
    }

    /// What the daemon knows of a connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn info(&mut self, socket: Handle) -> io::Result<TcpInfo> {
        match self.answer_to(|tag| Command::Inform { tag, socket })? {
            Answer::Info(info) => Ok(info),
            _ => Err(self.end(Broken)),
        }
    }

    /// How many commands of this attachment the daemon has done so far: it has
    /// then done all that were given before.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has ended.
    pub fn ping(&mut self) -> io::Result<u64> {
        match self.answer_to(|tag| Command::Ping { tag: Some(tag) })? {
            Answer::Commands(commands) => Ok(commands),
            _ => Err(self.end(Broken)),
        }
    }

    /// Gives the daemon something to do that is nothing.
    ///
    /// # Errors
    /// As [`Attachment::ping`].
    pub fn nudge(&mut self) -> io::Result<()> {
        self.command(Command::Ping { tag: None })
    }

    fn ask(&mut self, command: impl FnOnce(Tag) -> Command) -> io::Result<Granted> {
        match self.answer_to(command)? {
            Answer::Granted(granted) => Ok(granted),
            _ => Err(self.end(Broken)),
        }
    }

    /// Asks, and waits for the answer.
    fn answer_to(&mut self, command: impl FnOnce(Tag) -> Command) -> io::Result<Answer> {
        self.last_tag = self.last_tag.wrapping_add(1);
        let tag = self.last_tag;
        self.command(command(tag))?;
        let mut began = None;
        loop {
            self.poll()?;
            if let Some(place) = self.answers.iter().position(|(answered, _)| *answered == tag) {
                let (_, outcome) = self.answers.swap_remove(place);
                return outcome.map_err(io::Error::from);
            }
            let waited = began.get_or_insert_with(Instant::now).elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if waited > PATIENCE {
                self.is_over = true;
                return Err(gone());
            }
            self.sleep_for_answer()?;
        }
    }

    fn sleep_for_answer(&mut self) -> io::Result<()> {
        self.asleep += 1;
        self.we_sleep.ask();
        if self.poll()? {
            return self.end_sleep();
        }
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        let slept = poll(&mut [PollFd::new(&self.connection, PollFlags::IN)], Some(&limit));
        self.end_sleep()?;
        match slept {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
