//! Readiness of sockets, and the readiness that an application waits for.

use tidegate_stack::{Event, Stack, TcpReadiness};

use super::socket_id::SocketId;

/// Readiness of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A read returns at once: data, end of stream, a connection to accept, or an error.
    pub readable: bool,
    /// A write returns at once: there is send-buffer space, or an error.
    pub writable: bool,
    /// The receive direction is closed: nothing more will arrive.
    pub read_closed: bool,
    /// The send direction is closed: nothing more can be written.
    pub write_closed: bool,
    /// An error is waiting for `take_error`.
    pub failed: bool,
    /// A report waits that the application has announced ([`Source::set_report`](crate::Source::set_report)).
    pub has_report: bool,
}

impl Readiness {
    /// Combined readiness of two sockets.
    #[cfg(feature = "attach")]
    pub(crate) fn union(self, other: Self) -> Self {
        Self {
            readable: self.readable || other.readable,
            writable: self.writable || other.writable,
            read_closed: self.read_closed || other.read_closed,
            write_closed: self.write_closed || other.write_closed,
            failed: self.failed || other.failed,
            has_report: self.has_report || other.has_report,
        }
    }
}

impl From<TcpReadiness> for Readiness {
    fn from(found: TcpReadiness) -> Self {
        let TcpReadiness { readable, writable, read_closed, write_closed, failed } = found;
        Self { readable, writable, read_closed, write_closed, failed, has_report: false }
    }
}

impl Readiness {
    pub(crate) fn of(stack: &Stack, id: SocketId) -> Self {
        match id {
            SocketId::Udp(id) => Self {
                readable: stack.udp_queue_len(id) > 0,
                writable: true,
                failed: stack.udp_has_error(id),
                ..Self::default()
            },
            SocketId::Listener(id) => {
                Self { readable: stack.tcp_acceptable(id) > 0, ..Self::default() }
            }
            SocketId::Stream(id) => stack.tcp_readiness(id).into(),
            SocketId::Poll(_) => Self::default(),
        }
    }

    /// True if `interest` is met, or an error or the end of both directions is to be reported.
    pub(crate) fn meets(self, interest: Interest) -> bool {
        interest.has(Interest::Readable) && self.readable
            || interest.has(Interest::Writable) && self.writable
            || interest.has(Interest::ReadClosed) && self.read_closed
            || self.failed
            || self.has_report && !matches!(interest, Interest::Receive | Interest::Send)
            || self.read_closed && self.write_closed
    }
}

/// Change of a socket, as far as poll sets tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing but space for sending is new: no event for who only reads.
    Space,
    /// Anything may be new.
    Any,
}

impl Change {
    pub(crate) fn of_event(event: Event) -> Self {
        match event {
            // An end or an error also comes as `TcpReadable`.
            Event::TcpWritable(_) => Self::Space,
            _ => Self::Any,
        }
    }
}

/// Name that the application gives to a registered socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub usize);

/// Readiness that the application waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interest {
    /// Readable: data, end of stream, a connection to accept, or an error.
    #[default]
    Readable,
    /// Writable, or a connection that is established or has failed. A UDP socket is always
    /// writable.
    Writable,
    /// Readable or writable.
    Both,
    /// End of the receive direction.
    ReadClosed,
    /// Writable, or the end of the receive direction.
    WritableOrReadClosed,
    /// Readable, for a call that receives: reports do not count.
    Receive,
    /// Writable, for a call that sends: reports do not count.
    Send,
    /// Errors and the end of both directions only; these are always reported.
    Neither,
}

/// Condition for reporting a ready socket again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trigger {
    /// Reported as long as the socket is ready.
    #[default]
    Level,
    /// Reported after a new event only.
    Edge,
    /// Reported once, until registered again by [`Poll::reregister`](crate::Poll::reregister).
    OneShot,
}

/// Ready socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Token of the socket.
    pub token: Token,
    /// Full readiness, including conditions that were not asked for.
    pub readiness: Readiness,
}

impl Interest {
    pub(crate) fn has(self, other: Interest) -> bool {
        let parts = match self {
            Self::Both => [Self::Readable, Self::Writable],
            Self::Receive => [Self::Readable; 2],
            Self::Send => [Self::Writable; 2],
            Self::WritableOrReadClosed => [Self::Writable, Self::ReadClosed],
            alone => [alone; 2],
        };
        parts.contains(&other)
    }
}
