//! Sockets on their way from one application to another.
//!
//! A program hands a socket on by sending its descriptor of the kernel's, over a
//! Unix socket or through `exec`. The daemon never sees that. It is told before, and
//! asked after, by processes that show the descriptor: the kernel's cookie of what
//! was shown says which socket is meant, and no process can show what it does not
//! have.
//!
//! Who takes a socket has the memory that it is in, like an heir, so both must be of
//! one user. On its way a socket has a holder, so that it outlives its sender.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::application::Application;
use super::calls::Host;
use super::names::{AppNumber, NOBODY, Owner, SocketKey};
use super::passages::{ON_ITS_WAY, PATIENCE_NS, Passage, Shown};
use super::socket::Kind;
use crate::contract::command::Handle;
use crate::contract::greeting::{Part, Passing};
use crate::contract::notice::Granted;
use crate::contract::taken::{Carried, Taken, send_outcome};
use crate::contract::ticket::Ticket;

/// So many sockets of one user may be on their way.
const MOST_OF_A_USER: usize = 4096;

/// What an application that shows a descriptor wants.
pub(super) struct Request {
    /// Where the answer goes.
    pub(super) connection: UnixStream,
    /// The application's.
    pub(super) ticket: Ticket,
    pub(super) passing: Passing,
    /// What was shown.
    pub(super) descriptor: OwnedFd,
    /// The kernel's name of it.
    pub(super) cookie: u64,
    /// Whom it looks for, among several cores.
    pub(super) search: Search,
    /// How many cores have had it.
    pub(super) hops: usize,
}

impl Request {
    /// What the socket goes with that it is about.
    pub(super) fn shown(&self) -> Shown {
        let part = match self.passing {
            Passing::Offer(_, Part { number, .. }) | Passing::Hold(Part { number, .. }) => number,
            Passing::Withdraw(part) | Passing::Take(part) => part,
        };
        Shown { cookie: self.cookie, part }
    }
}

/// What a request looks for, core by core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    /// The core that has the application, to do what it wants.
    Application,
    /// The core that has the socket, which is to come to that of the application.
    Socket {
        /// That core.
        to: usize,
        /// So many cores do not have it.
        asked: usize,
    },
}

type Applications = [Option<Box<Application>>];

pub(super) fn answer(connection: &UnixStream, outcome: io::Result<Option<Taken>>) {
    // It may be gone, and the socket with it soon.
    let _ = send_outcome(connection.as_fd(), outcome.map_err(|error| error.kind()));
}

pub(super) fn with_ticket(
    apps: &mut Applications,
    ticket: Ticket,
) -> Option<(AppNumber, &mut Application)> {
    let mut all = apps.iter_mut().enumerate();
    all.find_map(|(number, app)| {
        let app = app.as_deref_mut().filter(|app| app.ticket.is(&ticket))?;
        Some((number as AppNumber, app))
    })
}

impl Host {
    /// Does what an application wants that has shown a descriptor, and tells it.
    /// Returns the socket that is to be looked at, if any.
    pub(super) fn pass(&mut self, apps: &mut Applications, request: Request) -> Option<SocketKey> {
        let shown = request.shown();
        let Request { connection, ticket, passing, descriptor, .. } = request;
        let mut left = None;
        let outcome = match with_ticket(apps, ticket) {
            None => Err(ErrorKind::PermissionDenied.into()),
            Some((number, app)) => match passing {
                Passing::Offer(handle, Part { of, .. }) => {
                    self.offer(app, handle, shown, of).map(|()| None)
                }
                Passing::Withdraw(_) => {
                    let uid = app.identity.uid;
                    let is_own = |passage: &Passage| passage.uid == uid && passage.is_on_its_way();
                    if self.passages.0.get(&shown).is_some_and(is_own) {
                        left = self.arrive(shown);
                    }
                    Ok(None)
                }
                Passing::Take(_) => self.take(number, app, shown).map(Some),
                Passing::Hold(part) => app.hold(descriptor, part).map(|()| None),
            },
        };
        answer(&connection, outcome);
        left
    }

    fn offer(
        &mut self,
        app: &Application,
        handle: Handle,
        shown: Shown,
        parts: u8,
    ) -> io::Result<()> {
        let key = app.key(handle).ok_or(ErrorKind::NotConnected)?;
        let (_, _, now_ns) = self.engine.parts();
        let (uid, until_ns) = (app.identity.uid, now_ns.saturating_add(PATIENCE_NS));
        let is_counted = |passage: &&Passage| passage.uid == uid && passage.is_on_its_way();
        let passages = &mut self.passages;
        let is_full = passages.0.values().filter(is_counted).count() >= MOST_OF_A_USER;
        let is_free = passages.is_free(shown, key);
        match passages.0.get_mut(&shown).filter(|passage| passage.key == key) {
            Some(passage) if passage.is_on_its_way() => {
                (passage.count, passage.until_ns) = (passage.count.saturating_add(1), until_ns);
                return Ok(());
            }
            _ if is_full => return Err(ErrorKind::QuotaExceeded.into()),
            Some(passage) => (passage.count, passage.until_ns) = (1, until_ns),
            None if is_free => {
                let passage = Passage { key, uid, count: 1, until_ns, is_shared: false, parts };
                passages.0.insert(shown, passage);
            }
            None => return Err(ErrorKind::InvalidInput.into()),
        }
        if let Some(socket) = self.sockets.get_mut(key) {
            socket.add_holder(ON_ITS_WAY);
        }
        Ok(())
    }

    /// A listener of an application's is on a socket of the kernel's that the application
    /// has shown: others that have that too, and listen on it, get it.
    pub(super) fn share(&mut self, app: &Application, key: SocketKey, cookie: u64, part: Part) {
        let shown = Shown { cookie, part: part.number };
        if self.passages.is_free(shown, key) {
            let (uid, until_ns) = (app.identity.uid, u64::MAX);
            let parts = part.of;
            let passage = Passage { key, uid, count: 0, until_ns, is_shared: true, parts };
            self.passages.0.insert(shown, passage);
        }
    }

    fn take(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        shown: Shown,
    ) -> io::Result<Taken> {
        let passage = self.passages.0.get(&shown).ok_or(ErrorKind::NotConnected)?;
        let (key, parts) = (passage.key, passage.parts);
        if passage.uid != app.identity.uid {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let socket = self.sockets.get_mut(key).ok_or(ErrorKind::NotConnected)?;
        let own = app.sockets().find(|&(_, other)| other == key);
        let handle = match own {
            Some((handle, _)) => handle,
            None => {
                let handle = app.reserve()?;
                app.enter(handle, key)?;
                socket.add_holder(Owner { app: number, place: handle.place });
                handle
            }
        };
        let carries = match &socket.kind {
            Kind::Datagrams(_) => Carried::Datagrams,
            Kind::Listener(_) => Carried::Listener,
            Kind::Stream(_) => Carried::Stream,
        };
        let taken = Taken {
            granted: Granted {
                socket: handle,
                local: socket.local_addr(&self.engine),
                peer: socket.peer_addr(&self.engine),
            },
            carries,
            is_new: own.is_none(),
            parts,
            place: socket.handle.place,
            memory: socket.place.memory().clone(),
        };
        // It has a holder that stays.
        self.arrive(shown);
        Ok(taken)
    }

    /// One less may take the socket. Returns it if nobody has it any more.
    fn arrive(&mut self, shown: Shown) -> Option<SocketKey> {
        let passage = self.passages.0.get_mut(&shown).filter(|p| p.is_on_its_way())?;
        passage.count -= 1;
        match passage.count {
            0 => self.end_passage(shown),
            _ => None,
        }
    }

    fn end_passage(&mut self, shown: Shown) -> Option<SocketKey> {
        let passage = self.passages.0.get_mut(&shown)?;
        let key = passage.key;
        (passage.count, passage.until_ns) = (0, u64::MAX);
        if !passage.is_shared {
            self.passages.0.remove(&shown);
        }
        let socket = self.sockets.get_mut(key)?;
        socket.remove_holder(NOBODY);
        if socket.holders.is_empty() { self.give_up(key, false) } else { None }
    }

    /// Closes sockets that nobody has taken in time. Returns those that are to be
    /// looked at.
    pub(super) fn end_late_passages(&mut self, now_ns: u64) -> Vec<SocketKey> {
        let late = |(&shown, passage): (&Shown, &Passage)| {
            (passage.is_on_its_way() && passage.until_ns <= now_ns).then_some(shown)
        };
        let late: Vec<_> = self.passages.0.iter().filter_map(late).collect();
        late.into_iter().filter_map(|shown| self.end_passage(shown)).collect()
    }
}
