//! What an application may ask for, and what it gets.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;

use rustix::net::sockopt;
use tidegate_engine::{Claim, Claims, Engine};
use tidegate_port::spread::Sharing;
use tidegate_port::steering::Protocol;
use tidegate_stack::{Shutdown, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpId, UdpOptions};

use super::application::{Application, Misbehaved};
use super::names::{AppNumber, Owner, SocketId, SocketKey};
use super::owners::{Owners, Sockets};
use super::passages::Passages;
use super::socket::{Kind, Socket};
use crate::contract::command::{Command, Handle, Tag};
use crate::contract::layout::Memory;
use crate::contract::notice::{Found, Granted, Notice};
use crate::contract::together::shares;

/// The most connections that wait on one listener.
const MOST_BACKLOG: u32 = 65_535;

/// The host that applications are served from.
pub(super) struct Host {
    pub(super) engine: Engine,
    pub(super) claims: Claims,
    pub(super) sockets: Sockets,
    pub(super) owners: Owners,
    pub(super) passages: Passages,
    /// Sockets that have ended: those who had them do not know yet.
    pub(super) gone: Vec<Socket>,
}

impl Host {
    pub(super) fn new(engine: Engine, claims: Claims) -> Self {
        Self {
            engine,
            claims,
            sockets: Sockets::default(),
            owners: Owners::default(),
            passages: Passages::default(),
            gone: Vec::new(),
        }
    }

    /// The socket that an application knows by this name.
    fn get(&mut self, app: &Application, handle: Handle) -> Option<&mut Socket> {
        self.sockets.get_mut(app.key(handle)?)
    }

    /// Makes a socket of an application's.
    fn add(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        make: impl FnOnce(&Memory, Handle) -> io::Result<Socket>,
    ) -> io::Result<SocketKey> {
        let handle = app.reserve()?;
        let made = make(&app.memory, handle).inspect_err(|_| app.set_free(handle.place));
        let mut socket = made?;
        socket.origin = Owner { app: number, place: handle.place };
        socket.add_holder(socket.origin);
        let key = self.sockets.insert(socket);
        app.enter(handle, key)?;
        Ok(key)
    }

    /// An application gets the sockets of another one, but not those that were
    /// closed.
    pub(super) fn inherit(
        &mut self,
        number: AppNumber,
        heir: &mut Application,
        of: &Application,
    ) -> io::Result<()> {
        for (handle, key) in of.sockets() {
            let Some(socket) = self.sockets.get_mut(key) else { continue };
            if !socket.is_closed() {
                heir.inherit(handle, key)?;
                socket.add_holder(Owner { app: number, place: handle.place });
            }
        }
        heir.has_inherited();
        Ok(())
    }

    /// An application has no use any more for a socket that others have too.
    pub(super) fn leave(&mut self, number: AppNumber, app: &mut Application, key: SocketKey) {
        let Some(socket) = self.sockets.get_mut(key) else { return };
        let Some(holder) = socket.remove_holder(number) else { return };
        app.leave(holder.place, socket.place.is_of(&app.memory));
    }

    /// Does what an application asks for. Returns the socket that is to be looked
    /// at, if any.
    pub(super) fn call(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        command: Command,
    ) -> Result<Option<SocketKey>, Misbehaved> {
        let (tag, outcome) = match command {
            Command::Look(handle) => return Ok(app.key(handle)),
            Command::Shut { socket, how } => {
                self.shut(app, socket, how);
                return Ok(app.key(socket));
            }
            Command::Set { socket, options } => {
                self.set(app, socket, options);
                return Ok(None);
            }
            Command::Close { socket, abrupt } => {
                return Ok(self.close(number, app, socket, abrupt));
            }
            Command::Find { tag, address } => {
                let stack = self.engine.stack();
                let (is_own, source) = (stack.has_address(address), stack.source_for(address));
                app.answer(Notice::Found { tag, found: Found { is_own, source } })?;
                return Ok(None);
            }
            Command::Inform { tag, socket } => {
                let notice = match self.info(app, socket) {
                    Some(info) => Notice::Informed { tag, info },
                    None => Notice::Answer { tag, outcome: Err(ErrorKind::NotConnected) },
                };
                app.answer(notice)?;
                return Ok(None);
            }
            Command::Ping { tag: None } => return Ok(None),
            Command::Ping { tag: Some(tag) } => {
                app.answer(Notice::Pong { tag, commands: app.commands_taken })?;
                return Ok(None);
            }
            Command::Bind { tag, local, together, options } => {
                let (reuse_port, party) = shares(together, options.reuse_port, app.identity.uid);
                let options = UdpOptions { reuse_port, party, ..options };
                (tag, self.bind(number, app, local, options))
            }
            Command::Aim { tag, socket, peer } => (tag, self.aim(app, socket, peer)),
            Command::Listen { tag, local, backlog, together, options } => {
                let (reuse_port, party) = shares(together, options.reuse_port, app.identity.uid);
                let options = TcpOptions { reuse_port, party, ..options };
                (tag, self.listen(number, app, local, backlog, options))
            }
            Command::Accept { tag, listener } => (tag, self.accept(number, app, listener)),
            Command::Connect { tag, local, remote, options } => {
                (tag, self.connect(number, app, local, remote, options))
            }
        };
        answer(app, tag, outcome)
    }

    /// Whether an application may bind one more port.
    fn check_port(&self, app: &mut Application) -> io::Result<()> {
        check_room(app)?;
        if app.ports_max == u32::MAX {
            return Ok(());
        }
        let is_bound = |socket: &&Socket| !matches!(socket.kind, Kind::Stream(_));
        let all = app.sockets().filter_map(|(_, key)| self.sockets.get(key));
        let bound = all.filter(is_bound).count();
        if bound < app.ports_max as usize { Ok(()) } else { Err(ErrorKind::QuotaExceeded.into()) }
    }

    fn granted(&self, key: SocketKey) -> io::Result<Granted> {
        let socket = self.sockets.get(key).ok_or(ErrorKind::NotConnected)?;
        Ok(Granted {
            socket: socket.handle,
            local: socket.local_addr(&self.engine),
            peer: socket.peer_addr(&self.engine),
        })
    }

    fn bind(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: SocketAddr,
        options: UdpOptions,
    ) -> io::Result<Granted> {
        self.check_port(app)?;
        let id = self.engine.parts().0.udp_bind(local, options)?;
        let local = self.engine.stack().udp_local_addr(id).unwrap_or(local);
        let (port, dual) = (self.engine.port(), options.dual_stack);
        let held = app.take_held(Protocol::Udp, local).map(|(held, _)| held);
        let claim = self.claims.claim(port, Protocol::Udp, local, dual, held);
        let sharing = Sharing::new(options.reuse_port, options.party);
        let claim = claim.and_then(|claim| self.settle(Protocol::Udp, local, sharing, claim));
        let claim = claim.inspect_err(|_| self.close_udp(id))?;
        let make = |memory: &Memory, handle| {
            let mut socket = Socket::datagrams(memory, handle, id)?;
            socket.claim = claim;
            Ok(socket)
        };
        let key = self.add(number, app, make).inspect_err(|_| self.close_udp(id))?;
        self.owners.insert(SocketId::Udp(id), key);
        self.granted(key)
    }

    fn close_udp(&mut self, id: UdpId) {
        let (stack, arena, _) = self.engine.parts();
        stack.udp_close(id, arena);
        self.engine.tell_level(id);
    }

    fn close_listener(&mut self, id: TcpListenerId) {
        let (stack, arena, now_ns) = self.engine.parts();
        stack.tcp_close_listener(now_ns, arena, id);
    }

    fn aim(
        &mut self,
        app: &mut Application,
        handle: Handle,
        peer: Option<SocketAddr>,
    ) -> io::Result<Granted> {
        let key = app.key(handle).ok_or(ErrorKind::NotConnected)?;
        let socket = self.sockets.get(key).ok_or(ErrorKind::NotConnected)?;
        let Kind::Datagrams(datagrams) = &socket.kind else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let (stack, _, _) = self.engine.parts();
        match peer {
            Some(peer) => stack.udp_connect(datagrams.id, peer)?,
            None => stack.udp_disconnect(datagrams.id)?,
        }
        self.granted(key).map(|granted| Granted { socket: handle, ..granted })
    }

    fn listen(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: SocketAddr,
        backlog: u32,
        options: TcpOptions,
    ) -> io::Result<Granted> {
        self.check_port(app)?;
        let (port, dual) = (self.engine.port(), options.dual_stack);
        let (held, part) = app.take_held(Protocol::Tcp, local).unzip();
        let cookie = held.as_ref().and_then(|held| sockopt::socket_cookie(held).ok());
        let claim = self.claims.claim(port, Protocol::Tcp, local, dual, held)?;
        let local = claim.as_ref().map_or(local, |claim| claim.local());
        let backlog = backlog.clamp(1, MOST_BACKLOG) as usize;
        let made = self.engine.parts().0.tcp_listen(local, backlog, options);
        let id = match made {
            Ok(id) => id,
            Err(error) => {
                self.release(claim);
                return Err(error.into());
            }
        };
        let settled = match self.engine.stack().tcp_listener_addr(id) {
            Some(local) => {
                let sharing = Sharing::new(options.reuse_port, options.party);
                self.settle(Protocol::Tcp, local, sharing, claim)
            }
            None => Ok(claim),
        };
        let claim = settled.inspect_err(|_| self.close_listener(id))?;
        let make = |memory: &Memory, handle| {
            let mut socket = Socket::listener(memory, handle, id)?;
            socket.claim = claim;
            Ok(socket)
        };
        let key = self.add(number, app, make).inspect_err(|_| self.close_listener(id))?;
        self.owners.insert(SocketId::Listener(id), key);
        if let Some((cookie, part)) = cookie.zip(part) {
            self.share(app, key, cookie, part);
        }
        self.granted(key)
    }

    fn accept(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        listener: Handle,
    ) -> io::Result<Granted> {
        check_room(app)?;
        let key = app.key(listener).ok_or(ErrorKind::NotConnected)?;
        let socket = self.sockets.get_mut(key).ok_or(ErrorKind::NotConnected)?;
        let Kind::Listener(from) = socket.kind else { return Err(ErrorKind::InvalidInput.into()) };
        let claim = socket.claim.clone();
        let accepted = self.engine.parts().0.tcp_accept(from);
        // The level of what waits is told in any case.
        let acceptable = self.engine.stack().tcp_acceptable(from) > 0;
        let mut status = socket.status;
        status.acceptable = acceptable;
        socket.set_status(status);
        self.adopt(number, app, accepted?, claim)
    }

    fn connect(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Granted> {
        check_room(app)?;
        let held = local.and_then(|local| app.take_held(Protocol::Tcp, local));
        let held = held.map(|(held, _)| held);
        let claim = self.claims.claim_to_reach(self.engine.port(), local, remote, held)?;
        let local = claim.as_ref().map(|claim| claim.local()).or(local);
        let (stack, arena, now_ns) = self.engine.parts();
        let id = match stack.tcp_connect(now_ns, arena, local, remote, options) {
            Ok(id) => id,
            Err(error) => {
                self.release(claim);
                return Err(error.into());
            }
        };
        let settled = match self.engine.stack().tcp_local_addr(id) {
            Some(local) => self.settle(Protocol::Tcp, local, Sharing::Alone, claim),
            None => Ok(claim),
        };
        let claim = settled.inspect_err(|_| self.end_stream(id, true, None))?;
        self.adopt(number, app, id, claim)
    }

    /// A socket that is made has its port before those of other cores.
    pub(super) fn settle(
        &mut self,
        protocol: Protocol,
        local: SocketAddr,
        sharing: Sharing,
        claim: Option<Arc<Claim>>,
    ) -> io::Result<Option<Arc<Claim>>> {
        self.claims.settle(protocol, local, sharing, claim)
    }

    /// Gives a connection to an application.
    fn adopt(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        id: TcpId,
        claim: Option<Arc<Claim>>,
    ) -> io::Result<Granted> {
        let make = |memory: &Memory, handle| Socket::stream(memory, handle, id);
        let key = match self.add(number, app, make) {
            Ok(key) => key,
            Err(error) => {
                self.end_stream(id, true, claim);
                return Err(error);
            }
        };
        self.owners.insert(SocketId::Stream(id), key);
        if let Some(socket) = self.sockets.get_mut(key) {
            socket.claim = claim;
            // What has come already is there when the application is told of it.
            let _ = socket.look(&mut self.engine);
        }
        self.granted(key)
    }

    fn shut(&mut self, app: &Application, handle: Handle, how: Shutdown) {
        let Self { engine, sockets, .. } = self;
        let socket = app.key(handle).and_then(|key| sockets.get_mut(key));
        let Some(Kind::Stream(stream)) = socket.map(|socket| &mut socket.kind) else { return };
        if how != Shutdown::Write {
            let (stack, arena, now_ns) = engine.parts();
            // One that is over needs no end.
            let _ = stack.tcp_shutdown(now_ns, arena, stream.id, Shutdown::Read);
        }
        stream.is_shut |= how != Shutdown::Read;
    }

    fn set(&mut self, app: &Application, handle: Handle, options: TcpOptions) {
        let Some(socket) = app.key(handle).and_then(|key| self.sockets.get(key)) else { return };
        if let Kind::Stream(stream) = &socket.kind {
            let (stack, arena, now_ns) = self.engine.parts();
            // One that is over has no options.
            let _ = stack.tcp_set_options(now_ns, arena, stream.id, options);
        }
    }

    fn info(&self, app: &Application, handle: Handle) -> Option<TcpInfo> {
        match &self.sockets.get(app.key(handle)?)?.kind {
            Kind::Stream(stream) => self.engine.stack().tcp_info(stream.id),
            _ => None,
        }
    }

    /// Closes a socket. Returns it if it is to be looked at.
    fn close(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        handle: Handle,
        abrupt: bool,
    ) -> Option<SocketKey> {
        let key = app.key(handle)?;
        let socket = self.get(app, handle)?;
        if socket.holders.len() > 1 {
            self.leave(number, app, key);
            return Some(key);
        }
        self.give_up(key, abrupt)
    }

    /// Closes a socket that nobody else has. Returns it if it is to be looked at.
    pub(super) fn give_up(&mut self, key: SocketKey, abrupt: bool) -> Option<SocketKey> {
        let socket = self.sockets.get_mut(key)?;
        if let Kind::Stream(stream) = &mut socket.kind
            && !abrupt
        {
            stream.is_closed = true;
            return Some(key);
        }
        self.end(key, abrupt);
        None
    }

    /// Ends a socket, also in the stack.
    pub(super) fn end(&mut self, key: SocketKey, abrupt: bool) {
        let Some(mut socket) = self.sockets.remove(key) else { return };
        socket.give_memory_back();
        let claim = socket.claim.take();
        match &mut socket.kind {
            Kind::Datagrams(datagrams) => {
                let (_, arena, _) = self.engine.parts();
                if let Some(held) = datagrams.held.take() {
                    held.release(arena);
                }
                self.owners.remove(SocketId::Udp(datagrams.id));
                self.close_udp(datagrams.id);
                self.release(claim);
            }
            Kind::Listener(id) => {
                self.owners.remove(SocketId::Listener(*id));
                self.passages.forget(key);
                self.close_listener(*id);
                // Its connections may need the port still.
                if let Some(claim) = claim.as_ref().filter(|claim| Arc::strong_count(claim) > 1) {
                    claim.stop_listening();
                }
                self.release(claim);
            }
            Kind::Stream(stream) => {
                self.owners.remove(SocketId::Stream(stream.id));
                self.end_stream(stream.id, abrupt, claim);
            }
        }
        self.gone.push(*socket);
    }

    fn end_stream(&mut self, id: TcpId, abrupt: bool, claim: Option<Arc<Claim>>) {
        let (stack, arena, now_ns) = self.engine.parts();
        match abrupt {
            true => stack.tcp_abort(now_ns, arena, id),
            false => stack.tcp_close(now_ns, arena, id),
        }
        self.claims.release_later(id, claim);
    }

    /// Gives a port back to the kernel, if nobody else needs it.
    pub(super) fn release(&mut self, claim: Option<Arc<Claim>>) {
        self.claims.release(self.engine.port(), claim);
    }

    /// Gives the ports of connections back that have ended.
    pub(super) fn release_closed(&mut self) {
        self.claims.release_ended(&mut self.engine);
    }
}

fn check_room(app: &mut Application) -> io::Result<()> {
    if app.has_room() { Ok(()) } else { Err(ErrorKind::QuotaExceeded.into()) }
}

/// Answers, and has the socket looked at.
fn answer(
    app: &mut Application,
    tag: Tag,
    outcome: io::Result<Granted>,
) -> Result<Option<SocketKey>, Misbehaved> {
    let key = outcome.as_ref().ok().and_then(|granted| app.key(granted.socket));
    let outcome = outcome.map_err(|error| error.kind());
    app.answer(Notice::Answer { tag, outcome })?;
    Ok(key)
}
