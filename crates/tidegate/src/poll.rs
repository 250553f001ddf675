//! Readiness: wait for the first of many sockets.

use std::io;
use std::time::Duration;

use tidegate_stack::UdpId;

use crate::net::Net;
use crate::udp::UdpSocket;
use crate::wait::Patience;

/// What a program calls a socket that it has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub usize);

/// A set of sockets of one [`Net`] to wait for.
///
/// Level triggered: a socket is reported as long as something can be read from
/// it, an error included.
#[derive(Debug)]
pub struct Poll {
    net: Net,
    ids: Vec<UdpId>,
    tokens: Vec<Token>,
}

impl Poll {
    /// An empty set.
    pub fn new(net: &Net) -> Self {
        Self { net: net.clone(), ids: Vec::new(), tokens: Vec::new() }
    }

    /// Adds a socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when the socket is of another [`Net`],
    /// [`io::ErrorKind::AlreadyExists`] when it is in the set.
    pub fn register(&mut self, socket: &UdpSocket, token: Token) -> io::Result<()> {
        if !socket.net().is_same(&self.net) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the socket belongs to another Net: use one Poll per Net",
            ));
        }
        if self.ids.contains(&socket.id()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.ids.push(socket.id());
        self.tokens.push(token);
        Ok(())
    }

    /// Takes a socket out of the set.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when it is not in the set.
    pub fn deregister(&mut self, socket: &UdpSocket) -> io::Result<()> {
        let position = self.ids.iter().position(|&id| id == socket.id());
        let position = position.ok_or(io::ErrorKind::NotFound)?;
        self.ids.swap_remove(position);
        self.tokens.swap_remove(position);
        Ok(())
    }

    /// Waits until a socket of the set is readable, at most `timeout` (`None`:
    /// for ever), and puts the tokens of all that are into `ready`, which is
    /// cleared first. An empty `ready` says that the time is over.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn wait(&self, ready: &mut Vec<Token>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let found = self.net.wait_for(&self.ids, Patience::timeout(timeout), |core| {
            let stack = core.engine.stack();
            for (&id, &token) in self.ids.iter().zip(&self.tokens) {
                if stack.udp_readable(id) > 0 {
                    ready.push(token);
                }
            }
            (!ready.is_empty()).then_some(Ok(()))
        });
        match found {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}
