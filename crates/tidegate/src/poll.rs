//! Readiness of many sockets: poll sets, in the style of epoll.

use std::io;
use std::time::Duration;

use crate::net::handle::Net;
use crate::net::source::{Pollable, Source};
use crate::types::deadline::Deadline;
use crate::types::readiness::{Interest, Ready, Token, Trigger};
use crate::types::socket_id::{PollSetId, SocketId};

/// Poll set: sockets of one [`Net`] to wait for, in the style of epoll.
///
/// The cost of a wait depends on the number of ready sockets, not of registered sockets. Level
/// triggered by default (see [`Poll::set_trigger`]).
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use tidegate::{Interest, Net, NetConfig, Poll, TcpListener, Token, UdpSocket};
///
/// const QUERIES: Token = Token(0);
/// const CONNECTIONS: Token = Token(1);
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse().unwrap()))?;
/// let socket = UdpSocket::bind(&net, "192.0.2.1:53")?;
/// let listener = TcpListener::bind(&net, "192.0.2.1:53")?;
///
/// let mut poll = Poll::new(&net);
/// poll.register(&socket, QUERIES)?;
/// poll.register_for(&listener, CONNECTIONS, Interest::Readable)?;
///
/// let mut ready = Vec::new();
/// poll.wait(&mut ready, Some(Duration::from_millis(1)))?;
/// for token in &ready {
///     match *token {
///         QUERIES => println!("a datagram is waiting"),
///         CONNECTIONS => println!("a connection is waiting"),
///         _ => unreachable!(),
///     }
/// }
/// assert!(ready.is_empty(), "the timeout expired first");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Poll {
    net: Net,
    set: PollSetId,
}

impl Poll {
    /// Creates an empty set.
    pub fn new(net: &Net) -> Self {
        let set = net.with(|ops| ops.poll_sets().add());
        Self { net: net.clone(), set }
    }

    pub(crate) fn set_id(&self) -> PollSetId {
        self.set
    }

    /// Adds a socket, to wait until it is readable.
    ///
    /// # Errors
    /// As [`Poll::register_for`].
    pub fn register(&mut self, socket: &impl Source, token: Token) -> io::Result<()> {
        self.register_for(socket, token, Interest::Readable)
    }

    /// Adds a socket, to wait for `interest`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when the socket is of another [`Net`],
    /// [`io::ErrorKind::AlreadyExists`] when it is in the set.
    pub fn register_for(
        &mut self,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        if !socket.net().is_same(&self.net) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the socket belongs to another Net: use one Poll per Net",
            ));
        }
        self.net.with(|ops| {
            ops.poll_sets().insert(self.set, socket.id(), token, interest)?;
            ops.waiters().wake(SocketId::Poll(self.set));
            Ok(())
        })
    }

    /// Sets the condition for reporting a socket of the set again, from now on. The socket may
    /// be reported at once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn set_trigger(&mut self, socket: &impl Source, trigger: Trigger) -> io::Result<()> {
        let changed =
            self.net.with(|ops| ops.poll_sets().set_trigger(self.set, socket.id(), trigger));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Changes the token and the interest of a socket of the set.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn reregister(
        &mut self,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        let changed =
            self.net.with(|ops| ops.poll_sets().change(self.set, socket.id(), token, interest));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Removes a socket from the set. Closing a socket removes it as well.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn deregister(&mut self, socket: &impl Source) -> io::Result<()> {
        let removed = self.net.with(|ops| ops.poll_sets().remove(self.set, socket.id()));
        if removed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Waits until a socket of the set is ready, for at most `timeout` (`None`: no limit).
    /// Clears `ready` and fills it with the tokens of all ready sockets. An empty `ready` means
    /// that the timeout expired.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn wait(&self, ready: &mut Vec<Token>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let ids = [SocketId::Poll(self.set)];
        let found = self.net.wait_until(&ids, Deadline::after(timeout), |ops| {
            ops.collect_ready(self.set, usize::MAX, &mut |found| ready.push(found.token));
            (!ready.is_empty()).then_some(Ok(()))
        });
        match found {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}

impl Poll {
    /// Like [`Poll::wait`], but neither blocks nor runs the stack: for applications that run
    /// the stack by other calls.
    pub fn ready_now(&self, ready: &mut Vec<Token>) {
        ready.clear();
        self.net.with(|ops| {
            ops.collect_ready(self.set, usize::MAX, &mut |found| ready.push(found.token));
        });
    }

    /// Appends at most `limit` ready sockets to `found`, with their readiness. Neither blocks
    /// nor runs the stack. Sockets beyond the limit come first in the next call.
    pub fn collect_ready(&self, found: &mut Vec<Ready>, limit: usize) {
        self.net.with(|ops| ops.collect_ready(self.set, limit, &mut |ready| found.push(ready)));
    }
}

impl Source for Poll {}

impl Pollable for Poll {
    fn net(&self) -> &Net {
        &self.net
    }

    fn id(&self) -> SocketId {
        SocketId::Poll(self.set)
    }
}

impl Drop for Poll {
    fn drop(&mut self) {
        self.net.with(|ops| ops.poll_sets().drop_set(self.set));
    }
}
