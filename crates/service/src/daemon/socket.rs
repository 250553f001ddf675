//! A socket of an application's: between its streams in shared memory and the
//! stack.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_engine::{Claim, Engine};
use tidegate_memory::shared::{Broken, Words};
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use super::held::Held;
use super::names::{AppNumber, Moved, Owner, SocketId};
use super::state::{Damaged, SavedKind, SavedSocket};
use crate::contract::command::Handle;
use crate::contract::layout::{Carries, Memory, Place, StreamIn, StreamOut};
use crate::contract::status::{Phase, Status};

/// So many bytes stay with a place for the next socket there.
const LITTLE_BYTES: u64 = 16 << 10;

/// A socket of an application's.
pub(super) struct Socket {
    pub(super) handle: Handle,
    pub(super) kind: Kind,
    pub(super) place: Place,
    pub(super) status: Status,
    /// What was taken from the kernel for it.
    pub(super) claim: Option<Arc<Claim>>,
    /// Who asked for it; its words and streams are in a place of theirs.
    pub(super) origin: Owner,
    /// All who have it.
    pub(super) holders: Vec<Owner>,
    /// Those who have it spoilt its streams: it is not looked at any more.
    is_broken: bool,
    /// It waits for the port to have room, and to be looked at then.
    pub(super) waits_for_port: bool,
}

/// What it is in the stack, and its streams.
pub(super) enum Kind {
    Datagrams(Datagrams),
    Listener(TcpListenerId),
    Stream(Stream),
}

/// The streams of a UDP socket.
pub(super) struct Datagrams {
    pub(super) id: UdpId,
    pub(super) from_app: StreamIn,
    pub(super) to_app: StreamOut,
    /// A datagram that found no room.
    pub(super) held: Option<Held>,
    pub(super) moved: Moved,
}

/// The streams of a connection.
pub(super) struct Stream {
    pub(super) id: TcpId,
    pub(super) from_app: StreamIn,
    pub(super) to_app: StreamOut,
    /// The application sends no more: what is there still goes out.
    pub(super) is_shut: bool,
    /// The application has closed it: it is gone when all went out.
    pub(super) is_closed: bool,
    pub(super) moved: Moved,
}

/// What came of a look at a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Looked {
    /// The application is to be told.
    pub(super) tell: bool,
    /// The port was full: look again soon.
    pub(super) again: bool,
    /// The socket has no more to do and can be taken out.
    pub(super) is_done: bool,
}

impl Socket {
    pub(super) fn datagrams(memory: &Memory, handle: Handle, id: UdpId) -> io::Result<Self> {
        let place = memory.place(handle.place)?;
        place.clear()?;
        let (from_app, to_app) = place.daemon_ends(Carries::Datagrams)?;
        let kind = Kind::Datagrams(Datagrams {
            id,
            from_app,
            to_app,
            held: None,
            moved: Moved::default(),
        });
        Ok(Self::begin(handle, kind, place, Phase::Datagram))
    }

    pub(super) fn listener(memory: &Memory, handle: Handle, id: TcpListenerId) -> io::Result<Self> {
        let place = memory.place(handle.place)?;
        place.clear()?;
        Ok(Self::begin(handle, Kind::Listener(id), place, Phase::Listening))
    }

    pub(super) fn stream(memory: &Memory, handle: Handle, id: TcpId) -> io::Result<Self> {
        let place = memory.place(handle.place)?;
        place.clear()?;
        let (from_app, to_app) = place.daemon_ends(Carries::Bytes)?;
        let stream = Stream {
            id,
            from_app,
            to_app,
            is_shut: false,
            is_closed: false,
            moved: Moved::default(),
        };
        Ok(Self::begin(handle, Kind::Stream(stream), place, Phase::Connecting))
    }

    fn begin(handle: Handle, kind: Kind, place: Place, phase: Phase) -> Self {
        let status = Status { generation: handle.generation, phase, ..Status::default() };
        let mut socket = Self {
            handle,
            kind,
            place,
            status,
            claim: None,
            origin: Owner::default(),
            holders: Vec::new(),
            is_broken: false,
            waits_for_port: false,
        };
        // Both sides are told of the first thing that happens.
        socket.place.changes.ask();
        socket.place.looks.ask();
        socket.write_status();
        socket
    }

    /// What another daemon needs to go on with it; its memory is number `memory`
    /// there.
    pub(super) fn save(&self, memory: u32, claim: Option<u32>, engine: &mut Engine) -> SavedSocket {
        let kind = match &self.kind {
            Kind::Datagrams(Datagrams { id, held, moved, .. }) => SavedKind::Datagrams {
                id: id.to_bits(),
                held: held.as_ref().map(|held| held.save(engine)),
                moved: *moved,
            },
            Kind::Listener(id) => SavedKind::Listener { id: id.to_bits() },
            Kind::Stream(Stream { id, is_shut, is_closed, moved, .. }) => SavedKind::Stream {
                id: id.to_bits(),
                is_shut: *is_shut,
                is_closed: *is_closed,
                moved: *moved,
            },
        };
        SavedSocket {
            handle: self.handle,
            kind,
            memory,
            status: self.status.to_word(),
            origin: self.origin,
            holders: self.holders.clone(),
            is_broken: self.is_broken,
            claim,
        }
    }

    /// Goes on with one that another daemon has saved, in the memory where it was.
    pub(super) fn restore(saved: SavedSocket, memory: &Memory) -> io::Result<Self> {
        let SavedSocket { handle, kind, status, origin, holders, is_broken, .. } = saved;
        let place = memory.place(handle.place)?;
        let mut is_spoilt = is_broken;
        let mut ends = |carries| {
            let (mut from_app, mut to_app) = place.daemon_ends(carries)?;
            is_spoilt |= from_app.resume().is_err() || to_app.resume().is_err();
            io::Result::Ok((from_app, to_app))
        };
        let kind = match kind {
            SavedKind::Datagrams { id, held, moved } => {
                let (from_app, to_app) = ends(Carries::Datagrams)?;
                let held = held.map(Held::Copy);
                let id = UdpId::from_bits(id);
                Kind::Datagrams(Datagrams { id, from_app, to_app, held, moved })
            }
            SavedKind::Listener { id } => {
                Kind::Listener(TcpListenerId::from_bits(id).ok_or(Damaged("a listener is none"))?)
            }
            SavedKind::Stream { id, is_shut, is_closed, moved } => {
                let (from_app, to_app) = ends(Carries::Bytes)?;
                let id = TcpId::from_bits(id);
                Kind::Stream(Stream { id, from_app, to_app, is_shut, is_closed, moved })
            }
        };
        let status = Status::from_word(status);
        let mut socket = Self {
            handle,
            kind,
            place,
            status: Status { generation: handle.generation, ..status },
            claim: None,
            origin,
            holders,
            is_broken: is_spoilt,
            waits_for_port: false,
        };
        socket.place.looks.ask();
        socket.write_status();
        Ok(socket)
    }

    /// Somebody has spoilt its streams between two daemons: it is over.
    pub(super) fn end_if_spoilt(&mut self, engine: &mut Engine) {
        if self.is_broken && self.status.phase != Phase::Over {
            self.break_off(engine);
        }
    }

    /// It is in another stack, by this name.
    pub(super) fn set_id(&mut self, id: SocketId) {
        match (&mut self.kind, id) {
            (Kind::Datagrams(datagrams), SocketId::Udp(id)) => datagrams.id = id,
            (Kind::Listener(own), SocketId::Listener(id)) => *own = id,
            (Kind::Stream(stream), SocketId::Stream(id)) => stream.id = id,
            // A socket stays of its kind.
            _ => {}
        }
    }

    /// A datagram that waits goes to memory of its own: its frame stays here.
    pub(super) fn copy_held(&mut self, engine: &mut Engine) {
        let Kind::Datagrams(datagrams) = &mut self.kind else { return };
        if let Some(held) = datagrams.held.take() {
            datagrams.held = Some(Held::Copy(held.save(engine)));
            held.release(engine.parts().1);
        }
    }

    /// What it is in the stack.
    pub(super) fn id(&self) -> SocketId {
        match &self.kind {
            Kind::Datagrams(datagrams) => SocketId::Udp(datagrams.id),
            Kind::Listener(id) => SocketId::Listener(*id),
            Kind::Stream(stream) => SocketId::Stream(stream.id),
        }
    }

    fn write_status(&mut self) {
        if let Some(word) = self.place.status.words().first() {
            word.store(self.status.to_word(), Ordering::Release);
        }
    }

    /// Sets the status, and says whether it is another one.
    pub(super) fn set_status(&mut self, status: Status) -> bool {
        let is_new = self.status != status;
        if is_new {
            self.status = status;
            self.write_status();
        }
        is_new
    }

    /// Somebody has it now.
    pub(super) fn add_holder(&mut self, holder: Owner) {
        self.holders.push(holder);
        self.set_status(Status { shared: self.holders.len() > 1, ..self.status });
    }

    /// An application has it no more. Gives who it was, if it had it.
    pub(super) fn remove_holder(&mut self, app: AppNumber) -> Option<Owner> {
        let at = self.holders.iter().position(|holder| holder.app == app)?;
        let holder = self.holders.remove(at);
        self.set_status(Status { shared: self.holders.len() > 1, ..self.status });
        Some(holder)
    }

    /// Whether the application has closed it, and it only sends what is left.
    pub(super) fn is_closed(&self) -> bool {
        matches!(&self.kind, Kind::Stream(stream) if stream.is_closed)
    }

    /// Several applications have it, and one of them has spoilt its streams. It
    /// is over for all of them.
    pub(super) fn break_off(&mut self, engine: &mut Engine) {
        self.is_broken = true;
        if let Kind::Stream(stream) = &self.kind {
            let (stack, arena, now_ns) = engine.parts();
            stack.tcp_abort(now_ns, arena, stream.id);
        }
        self.set_error(io::ErrorKind::ConnectionAborted);
        self.set_status(Status { phase: Phase::Over, ..self.status });
    }

    /// Notes an error for the application.
    pub(super) fn set_error(&mut self, kind: io::ErrorKind) -> bool {
        let errors = self.status.errors.wrapping_add(1);
        self.set_status(Status { error: Some(kind), errors, ..self.status })
    }

    /// Looks what there is to be done, both ways.
    ///
    /// # Errors
    /// [`Broken`] when the application lies in its streams.
    pub(super) fn look(&mut self, engine: &mut Engine) -> Result<Looked, Broken> {
        if self.is_broken {
            return Ok(Looked { is_done: self.is_closed(), ..Looked::default() });
        }
        // Asked before the look: what comes during it is told again.
        self.place.looks.ask();
        match &self.kind {
            Kind::Datagrams(_) => self.look_at_datagrams(engine),
            Kind::Listener(id) => {
                let acceptable = engine.stack().tcp_acceptable(*id) > 0;
                let tell = self.set_status(Status { acceptable, ..self.status });
                Ok(Looked { tell: tell && acceptable, ..Looked::default() })
            }
            Kind::Stream(_) => self.look_at_stream(engine),
        }
    }

    /// The socket is gone. What its streams have touched is given back, unless that
    /// is less than the call costs.
    pub(super) fn give_memory_back(&self) {
        let Moved { to_app, from_app } = self.moved();
        if to_app + from_app > LITTLE_BYTES {
            self.place.discard();
        }
    }

    /// What went through it so far.
    pub(super) fn moved(&self) -> Moved {
        match &self.kind {
            Kind::Datagrams(datagrams) => datagrams.moved,
            Kind::Listener(_) => Moved::default(),
            Kind::Stream(stream) => stream.moved,
        }
    }

    /// Its own address.
    pub(super) fn local_addr(&self, engine: &Engine) -> Option<SocketAddr> {
        let stack = engine.stack();
        match &self.kind {
            Kind::Datagrams(datagrams) => stack.udp_local_addr(datagrams.id),
            Kind::Listener(id) => stack.tcp_listener_addr(*id),
            Kind::Stream(stream) => stack.tcp_local_addr(stream.id),
        }
    }

    /// Whom it is connected to.
    pub(super) fn peer_addr(&self, engine: &Engine) -> Option<SocketAddr> {
        let stack = engine.stack();
        match &self.kind {
            Kind::Datagrams(datagrams) => stack.udp_peer_addr(datagrams.id),
            Kind::Listener(_) => None,
            Kind::Stream(stream) => stack.tcp_peer_addr(stream.id),
        }
    }
}
