//! What sockets ask of a daemon.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tidegate_engine::Claim;
use tidegate_service::attachment::{Attachment, Received};
use tidegate_service::{Handle, Part, Phase, Together};
use tidegate_stack::{Shutdown, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpId, UdpOptions};

use super::lines::Lines;
use super::parts::Gave;
use super::{AttachedCore, ended, listener, stream, udp};
use crate::calls::{CallError, Called, Calls, Made, unless_blocked};
use crate::net::Core;
use crate::poll::{Polls, Ready};
use crate::readiness::Readiness;
use crate::tasks::Tasks;
use crate::udp;
use crate::wait::{SetNumber, SocketId, Waiters};

/// The largest piece that is written or read without the program's own buffer.
const PIECE_BYTES: usize = 2048;

/// A daemon takes nothing from the kernel for this program, but for itself.
fn made<I>(id: I) -> Made<I> {
    (id, None)
}

/// Before a line listens: what the program has bound at the kernel for that.
fn show(line: &mut Attachment, held: Option<&OwnedFd>, part: Part) {
    if let Some(held) = held {
        // A program that gave up the right to attach has the port by itself.
        let _ = line.hold(part, held.as_fd());
    }
}

impl AttachedCore {
    /// The same socket on all lines: what comes to it is divided among them. Which port
    /// it is the first one says. Only the first must be had.
    fn divide(
        &mut self,
        local: SocketAddr,
        mut make: impl FnMut(&mut Attachment, SocketAddr, Option<Together>) -> io::Result<Handle>,
    ) -> io::Result<u64> {
        self.lines.complete();
        let count = self.lines.count();
        let together = (count > 1).then(Together::new).transpose()?;
        let held = self.held.take(local);
        let part = |number: usize| Part { number: number as u8, of: count as u8 };
        let line = self.lines.first();
        show(line, held.as_ref(), part(0));
        let first = make(line, local, together)?;
        let local = line.local_addr(first)?;
        let mut all = vec![self.lines.number(0, first)];
        for at in 1..count {
            let line = self.lines.line(at)?;
            show(line, held.as_ref(), part(all.len()));
            if let Ok(other) = make(line, local, together) {
                all.push(self.lines.number(at, other));
            }
        }
        let number = all[0];
        self.parts.insert(all);
        Ok(number)
    }

    /// Whether what peers send to a socket at this address comes to one of those that
    /// have the port together, and to that alone.
    fn is_divided(&mut self, local: SocketAddr) -> bool {
        let ip = local.ip();
        // With one line there is nothing to divide, and nothing to ask the daemon.
        self.lines.most() > 1
            && local.port() != 0
            && (ip.is_unspecified() || self.has_address(ip.to_canonical()))
    }

    /// Closes a socket with all its parts. Others than the first are gone then: whoever
    /// has the port next, from the first line on, must not find them there.
    fn close(&mut self, socket: u64) {
        match self.parts.remove(socket).as_slice() {
            [only] => self.lines.close(*only, false),
            all => self.lines.close_and_wait(all),
        }
    }

    fn take_error(&mut self, socket: u64) -> Option<io::Error> {
        let taken = self.lines.of(socket).and_then(|(line, socket)| line.take_error(socket));
        match taken {
            Ok(kind) => kind.map(io::Error::from),
            Err(error) => Some(error),
        }
    }
}

impl Lines {
    fn accept(&mut self, listener: u64) -> io::Result<(u64, SocketAddr)> {
        let (at, _) = self.named(listener);
        let (line, socket) = self.of(listener)?;
        let (accepted, peer) = line.accept(socket)?;
        Ok((self.number(at, accepted), peer))
    }

    /// What is for all, as datagrams to a group are, has come to each part: the first
    /// tells it.
    fn recv_datagram(
        &mut self,
        part: u64,
        gave: Gave,
        buf: &mut [u8],
        peek: bool,
    ) -> io::Result<Received> {
        let (line, socket) = self.of(part)?;
        loop {
            let received = line.recv_datagram(socket, buf, peek)?;
            if gave == Gave::First || line.find(received.to.to_canonical())?.is_own {
                return Ok(received);
            }
            if peek {
                line.recv_datagram(socket, buf, false)?;
            }
        }
    }
}

impl Calls for AttachedCore {
    fn core(&mut self) -> Option<&mut Core> {
        None
    }

    fn polls(&mut self) -> &mut Polls {
        &mut self.polls
    }

    fn waiters(&mut self) -> &mut Waiters {
        &mut self.waiters
    }

    fn tasks(&mut self) -> &mut Tasks {
        &mut self.tasks
    }

    fn failure(&self) -> Option<io::Error> {
        self.has_failed.then(ended)
    }

    fn readiness(&mut self, id: SocketId) -> Readiness {
        // What has come since counts, for programs that only ask. A daemon that has
        // ended makes every socket ready, for its error.
        let _ = self.hear();
        match id {
            SocketId::Poll(set) => Readiness {
                readable: self.with_polls(|polls, of| polls.has_ready(set, of)),
                ..Readiness::default()
            },
            _ => self.look(id),
        }
    }

    fn collect(&mut self, set: SetNumber, limit: usize, tell: &mut dyn FnMut(Ready)) {
        // A daemon that has ended makes every socket ready, for its error.
        let _ = self.hear();
        self.with_polls(|polls, of| polls.collect(set, of, limit, tell));
    }

    fn has_address(&mut self, address: IpAddr) -> bool {
        self.lines.first().find(address).is_ok_and(|found| found.is_own)
    }

    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr> {
        self.lines.first().find(destination).ok()?.source
    }

    fn read_clock(&mut self) {}

    /// The daemon sees what was written at once.
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn commit_later(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// What a call has heard while it waited for an answer may be for others.
    fn on_release(&mut self) {
        if self.lines.have_changed() {
            // A daemon that tells nonsense is found out by the next call.
            let _ = self.dispatch();
        }
    }

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Made<TcpListenerId>> {
        let number = match options.reuse_port {
            true => {
                self.lines.complete();
                let at = self.lines.take_turn();
                let held = self.held.take(local);
                let line = self.lines.line(at)?;
                show(line, held.as_ref(), Part::ONLY);
                let made = line.listen(local, backlog, options)?;
                self.lines.number(at, made)
            }
            false => self.divide(local, |line, local, together| {
                line.listen_with(local, backlog, together, options)
            })?,
        };
        Ok(made(listener(number)?))
    }

    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr> {
        let (line, socket) = self.lines.of(id.to_bits()).ok()?;
        line.local_addr(socket).ok()
    }

    fn tcp_accept(&mut self, id: TcpListenerId) -> Called<(TcpId, SocketAddr)> {
        let Self { lines, parts, .. } = self;
        let accepted = parts.ask(id.to_bits(), false, |part, _| {
            unless_blocked(lines.accept(part).map_err(CallError::from))
        });
        let (accepted, peer) = accepted.ok_or(CallError::WouldBlock)??;
        // Others may wait for the next.
        let listener = SocketId::Listener(id);
        if self.look(listener).readable {
            self.waiters.wake(listener);
            self.tasks.wake_accepting(listener);
        }
        Ok((stream(accepted), peer))
    }

    fn tcp_close_listener(&mut self, id: TcpListenerId, _: Option<Arc<Claim>>) {
        self.close(id.to_bits());
    }

    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Made<TcpId>> {
        let has_port = local.is_some_and(|local| local.port() != 0);
        // What else has the port may be there, on the first line in any case.
        let at = if has_port { 0 } else { self.lines.take_turn() };
        let made_there = self.lines.line(at)?.connect_tcp(local, remote, options)?;
        Ok(made(stream(self.lines.number(at, made_there))))
    }

    fn tcp_finish_connect(&mut self, id: TcpId) -> Called<()> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        match line.phase(socket)? {
            Phase::Connecting => Err(CallError::WouldBlock),
            _ => match line.take_error(socket)? {
                Some(kind) => Err(CallError::Failed(kind.into())),
                None => Ok(()),
            },
        }
    }

    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        Ok(line.recv(socket, buf, false)?)
    }

    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        Ok(line.recv(socket, buf, true)?)
    }

    fn tcp_recv_with(&mut self, id: TcpId, read: &mut dyn FnMut(&[u8]) -> usize) -> Called<usize> {
        // The other side may write there: what is shown is a copy.
        let mut piece = [0; PIECE_BYTES];
        let (line, socket) = self.lines.of(id.to_bits())?;
        let len = line.recv(socket, &mut piece, true)?;
        let used = read(&piece[..len]).min(len);
        if used > 0 {
            line.recv(socket, &mut piece[..used], false)?;
        }
        Ok(used)
    }

    fn tcp_readable(&mut self, id: TcpId) -> usize {
        let found = self.lines.of(id.to_bits()).and_then(|(line, socket)| line.readable(socket));
        found.unwrap_or(0)
    }

    fn tcp_writable(&mut self, id: TcpId) -> usize {
        let found = self.lines.of(id.to_bits()).and_then(|(line, socket)| line.room(socket));
        found.unwrap_or(0)
    }

    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> Called<usize> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        Ok(line.send(socket, data)?)
    }

    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> Called<usize> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        let room = line.room(socket)?.min(limit).min(PIECE_BYTES);
        if room == 0 && limit > 0 {
            return Err(CallError::WouldBlock);
        }
        let mut piece = [0; PIECE_BYTES];
        let len = write(&mut piece[..room]).min(room);
        Ok(line.send(socket, &piece[..len])?)
    }

    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        line.shutdown(socket, how)
    }

    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        let (line, socket) = self.lines.of(id.to_bits()).ok()?;
        line.local_addr(socket).ok()
    }

    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        let (line, socket) = self.lines.of(id.to_bits()).ok()?;
        line.peer_addr(socket).ok()
    }

    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo> {
        let (line, socket) = self.lines.of(id.to_bits()).ok()?;
        let mut info = line.info(socket).ok()?;
        info.unread_bytes += line.readable(socket).unwrap_or(0) as u32;
        Some(info)
    }

    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions> {
        let (line, socket) = self.lines.of(id.to_bits()).ok()?;
        line.options(socket).ok()
    }

    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()> {
        let (line, socket) = self.lines.of(id.to_bits())?;
        line.set_options(socket, options)
    }

    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error> {
        self.take_error(id.to_bits())
    }

    fn tcp_end(&mut self, id: TcpId, abrupt: bool, _: Option<Arc<Claim>>) {
        self.polls.forget(SocketId::Stream(id));
        self.tasks.forget(SocketId::Stream(id));
        self.lines.close(id.to_bits(), abrupt);
    }

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Made<UdpId>> {
        // One that shares its port by agreement has others beside it.
        let is_alone = !options.reuse_port && !options.reuse_address;
        if is_alone && self.is_divided(local) {
            let bind = |line: &mut Attachment, local, together| {
                line.bind_udp_with(local, together, options)
            };
            return Ok(made(udp(self.divide(local, bind)?)));
        }
        if options.reuse_port {
            self.lines.complete();
        }
        let at = if options.reuse_address { 0 } else { self.lines.take_turn() };
        let bound = self.lines.line(at)?.bind_udp(local, options)?;
        Ok(made(udp(self.lines.number(at, bound))))
    }

    fn udp_close(&mut self, id: UdpId, _: Option<Arc<Claim>>) {
        self.polls.forget(SocketId::Udp(id));
        self.close(id.to_bits());
    }

    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()> {
        if peer.is_none() {
            let (line, socket) = self.lines.of(self.parts.first(id.to_bits()))?;
            return line.connect_udp(socket, None);
        }
        // Where something came from last more of it may wait. What others send is for
        // nobody now.
        let (part, others) = self.parts.reduce(id.to_bits());
        self.lines.close_and_wait(&others);
        let (line, socket) = self.lines.of(part)?;
        line.connect_udp(socket, peer)
    }

    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        let (line, socket) = self.lines.of(self.parts.first(id.to_bits())).ok()?;
        line.local_addr(socket).ok()
    }

    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        let (line, socket) = self.lines.of(self.parts.first(id.to_bits())).ok()?;
        line.peer_addr(socket).ok()
    }

    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> Called<udp::Received> {
        let Self { lines, parts, .. } = self;
        let received = parts.ask(id.to_bits(), peek, |part, gave| {
            unless_blocked(lines.recv_datagram(part, gave, buf, peek).map_err(CallError::from))
        });
        let received = received.ok_or(CallError::WouldBlock)??;
        Ok(udp::Received {
            len: received.len,
            truncated: received.len < received.whole,
            datagram_len: received.whole,
            from: received.from,
            to: received.to,
        })
    }

    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> Called<()> {
        let Self { lines, parts, .. } = self;
        let sent = parts.offer(id.to_bits(), |part| {
            let sent = lines
                .of(part)
                .and_then(|(line, socket)| line.send_datagram(socket, payload, to, from));
            unless_blocked(sent.map_err(CallError::from))
        });
        Ok(sent.ok_or(CallError::WouldBlock)??)
    }

    fn udp_flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error> {
        self.parts.of(id.to_bits()).into_iter().find_map(|part| self.take_error(part))
    }
}
