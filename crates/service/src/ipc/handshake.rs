//! Handshake on the Unix socket.
//!
//! The application sends the protocol version, the purpose of the connection and its name. The
//! daemon replies in the same version, with the sizes of the shared memory and its descriptors, or
//! with a sentence that gives the reason of the refusal.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;

use rustix::net::{SendFlags, send};
use tidegate_memory::shared::Region;

use super::command::Handle;
use super::event_fds::EventFds;
use super::fd_passing::{receive_with_fds, send_with_fds};
use super::layout::{Geometry, SharedMemory};
use super::takeover_token::{TOKEN_BYTES, TakeoverToken};
use super::version::{Library, ProtocolVersion};

/// Magic number of the protocol; a byte with the version follows.
const MAGIC: [u8; 7] = *b"tidegat";
const MAGIC_BYTES: usize = MAGIC.len() + 1;

/// Bytes of an application's name, and of the release of its library.
const NAME_BYTES: usize = 48;
const RELEASE_BYTES: usize = 24;
/// Release of this library.
const OWN_RELEASE: &str = env!("CARGO_PKG_VERSION");

const HELLO_BYTES: usize = MAGIC_BYTES + 1 + TOKEN_BYTES + NAME_BYTES;
const WELCOME_BYTES: usize = MAGIC_BYTES + TOKEN_BYTES + 4 * 4;
/// Bytes that identify the socket of a transfer: shard index, shard count and handle.
const SEND_SOCKET_BYTES: usize = 2 + 8;
/// Maximum bytes of the sentence that gives the reason of a refusal.
const REFUSAL_BYTES: usize = 256;

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Start of a message in a version of the protocol.
fn magic_of(protocol: ProtocolVersion) -> [u8; MAGIC_BYTES] {
    let mut bytes = [protocol.number(); MAGIC_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes
}

/// Shard of a socket: its position among the sockets that have one port and one kernel
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of the shard, from 0.
    pub index: u8,
    /// Number of shards.
    pub count: u8,
}

impl Shard {
    /// Only shard of a socket that is not sharded.
    pub const ONLY: Self = Self { index: 0, count: 1 };
}

/// Operation of an application on a socket that moves between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferOperation {
    /// Sends the application's socket with this handle to another process.
    Send(Handle, Shard),
    /// Cancels the transfer of the shard with this index.
    Withdraw(u8),
    /// Receives the shard with this index, or shares a listener of another process.
    Receive(u8),
    /// Reserves a port. No transfer: the application has bound the descriptor at the kernel
    /// and is about to bind the same port here. Every process that has the descriptor may
    /// listen on the port. The listener becomes this shard.
    ReservePort(Shard),
}

/// First message of a connection: its purpose.
#[derive(Debug)]
pub enum Hello {
    /// Attaches an application with this name.
    Attach(String),
    /// Attaches an application with this name; it inherits the sockets of the token's owner.
    Inherit(TakeoverToken, String),
    /// Requests a transfer operation for the application that owns the token. The kernel
    /// descriptor identifies the socket.
    Transfer(TakeoverToken, TransferOperation, OwnedFd),
    /// Queries the daemon's report.
    Report,
    /// Takes over from the running daemon. Sender is a daemon that reads states up to this format;
    /// 0 from a daemon that does not say so.
    Upgrade(u8),
}

impl Hello {
    /// Version in which the message is sent on a connection of a library that speaks `protocol`.
    /// Messages to the daemon alone are in the oldest version, so that an older daemon answers.
    fn version(&self, protocol: ProtocolVersion) -> ProtocolVersion {
        match self {
            Self::Report | Self::Upgrade(_) => ProtocolVersion::OLDEST,
            _ => protocol,
        }
    }
}

const ATTACH: u8 = 1;
const REPORT: u8 = 2;
const INHERIT: u8 = 3;
const UPGRADE: u8 = 4;
const SEND_SOCKET: u8 = 5;
const WITHDRAW_SOCKET: u8 = 6;
const RECEIVE_SOCKET: u8 = 7;
const RESERVE_PORT: u8 = 8;

/// Sends the first message in a version of the protocol. Names are truncated to 48 bytes.
///
/// # Errors
/// Errors of `sendmsg`.
pub fn send_hello(to: BorrowedFd<'_>, protocol: ProtocolVersion, hello: &Hello) -> io::Result<()> {
    let mut fields = [0; SEND_SOCKET_BYTES];
    let (kind, token, text) = match hello {
        Hello::Attach(name) => (ATTACH, None, name.as_bytes()),
        Hello::Inherit(token, name) => (INHERIT, Some(token), name.as_bytes()),
        Hello::Transfer(token, TransferOperation::Send(handle, Shard { index, count }), _) => {
            fields[..2].copy_from_slice(&[*index, *count]);
            fields[2..].copy_from_slice(&handle.to_word().to_ne_bytes());
            (SEND_SOCKET, Some(token), &fields[..])
        }
        Hello::Transfer(token, TransferOperation::Withdraw(index), _) => {
            (WITHDRAW_SOCKET, Some(token), slice::from_ref(index))
        }
        Hello::Transfer(token, TransferOperation::Receive(index), _) => {
            (RECEIVE_SOCKET, Some(token), slice::from_ref(index))
        }
        Hello::Transfer(token, TransferOperation::ReservePort(Shard { index, count }), _) => {
            fields[..2].copy_from_slice(&[*index, *count]);
            (RESERVE_PORT, Some(token), &fields[..2])
        }
        Hello::Report => (REPORT, None, &[][..]),
        Hello::Upgrade(format) => (UPGRADE, None, slice::from_ref(format)),
    };
    let protocol = hello.version(protocol);
    let mut message = [0; HELLO_BYTES + RELEASE_BYTES];
    let (magic, rest) = message.split_at_mut(MAGIC_BYTES);
    magic.copy_from_slice(&magic_of(protocol));
    rest[0] = kind;
    let (token_field, rest) = rest[1..].split_at_mut(TOKEN_BYTES);
    token_field.copy_from_slice(token.map_or(&[0; TOKEN_BYTES], |token| token.bytes()));
    let (name_field, release_field) = rest.split_at_mut(NAME_BYTES);
    put_text(name_field, text);
    put_text(release_field, OWN_RELEASE.as_bytes());
    let len = if protocol.has_release() { message.len() } else { HELLO_BYTES };
    let fd = match hello {
        Hello::Transfer(_, _, fd) => Some(fd.as_fd()),
        _ => None,
    };
    send_with_fds(to, &message[..len], fd.as_slice())
}

/// Puts as much of a text into a field as it has space for.
fn put_text(field: &mut [u8], text: &[u8]) {
    field.iter_mut().zip(text).for_each(|(to, byte)| *to = *byte);
}

/// Printable ASCII characters of a field.
fn printable(field: &[u8]) -> String {
    String::from_utf8_lossy(field).chars().filter(char::is_ascii_graphic).collect()
}

/// Receives the first message, and the library of its sender. Only the printable ASCII characters
/// of a name and a release are kept.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the version is not served, or the message is not valid in it.
pub fn receive_hello(socket: BorrowedFd<'_>) -> io::Result<(Library, Hello)> {
    let mut message = [0; HELLO_BYTES + RELEASE_BYTES];
    let (len, fds) = receive_with_fds(socket, &mut message, 1)?;
    let mut fds = fds.into_iter();
    let malformed = || invalid("the first message is no request of a program on tidegate");
    let fields = message[..len].strip_prefix(&MAGIC);
    let (&number, rest) = fields.and_then(|rest| rest.split_first()).ok_or_else(malformed)?;
    let protocol = ProtocolVersion::served(number).map_err(|error| invalid(error.to_string()))?;
    let (kind, rest) = rest.split_first().ok_or_else(malformed)?;
    let (token, text) = rest.split_first_chunk().ok_or_else(malformed)?;
    let token = TakeoverToken::from_bytes(*token);
    let (text, release) = text.split_at_checked(NAME_BYTES).unwrap_or((text, &[]));
    let release = if protocol.has_release() { printable(release) } else { String::new() };
    let mut transfer = |operation| {
        let fd = fds.next().ok_or_else(|| invalid("the transfer request has no file descriptor"));
        fd.map(|fd| Hello::Transfer(token, operation, fd))
    };
    let (&[shard_index, shard_count], rest) = text.split_first_chunk().ok_or_else(malformed)?;
    let handle = rest.first_chunk().map(|word| Handle::from_word(u64::from_ne_bytes(*word)));
    let hello = match *kind {
        ATTACH => Hello::Attach(printable(text)),
        INHERIT => Hello::Inherit(token, printable(text)),
        SEND_SOCKET => transfer(TransferOperation::Send(
            handle.ok_or_else(malformed)?,
            Shard { index: shard_index, count: shard_count },
        ))?,
        WITHDRAW_SOCKET => transfer(TransferOperation::Withdraw(shard_index))?,
        RECEIVE_SOCKET => transfer(TransferOperation::Receive(shard_index))?,
        RESERVE_PORT => transfer(TransferOperation::ReservePort(Shard {
            index: shard_index,
            count: shard_count,
        }))?,
        REPORT => Hello::Report,
        UPGRADE => Hello::Upgrade(shard_index),
        _ => return Err(invalid("the request is unknown in this version of the attach protocol")),
    };
    Ok((Library { protocol, release }, hello))
}

/// Reply of the daemon to an application that it accepts.
pub struct Welcome<Fd> {
    /// Memory that both sides share.
    pub memory: SharedMemory,
    /// Descriptors by which both sides wake each other.
    pub event_fds: EventFds<Fd>,
    /// Token that identifies the application in later handshakes.
    pub token: TakeoverToken,
    /// Number of network cores. The application may attach this many times to have its sockets
    /// on all of them.
    pub cores: u32,
}

/// Sends the daemon's reply in the version of the application: token, sizes, and the descriptors of
/// both memory regions and of the wake-ups.
///
/// # Errors
/// Errors of `sendmsg`.
pub fn send_welcome(
    socket: BorrowedFd<'_>,
    protocol: ProtocolVersion,
    welcome: &Welcome<impl AsFd>,
) -> io::Result<()> {
    let Welcome { memory, event_fds, token, cores } = welcome;
    let Geometry { sockets, tcp_bytes, udp_bytes } = *memory.geometry();
    let mut message = [0; WELCOME_BYTES];
    message[..MAGIC_BYTES].copy_from_slice(&magic_of(protocol));
    let (token_field, rest) = message[MAGIC_BYTES..].split_at_mut(TOKEN_BYTES);
    token_field.copy_from_slice(token.bytes());
    let numbers = [sockets, tcp_bytes, udp_bytes, *cores];
    for (to, number) in rest.chunks_exact_mut(4).zip(numbers) {
        to.copy_from_slice(&number.to_ne_bytes());
    }
    let [control, data] = memory.regions().map(AsFd::as_fd);
    let [daemon, application] = event_fds.in_order().map(AsFd::as_fd);
    send_with_fds(socket, &message, &[control, data, daemon, application])
}

/// Sends the reason why the daemon refuses the application, cut to 256 bytes.
///
/// # Errors
/// Errors of `send`.
pub fn send_refusal(socket: BorrowedFd<'_>, why: &str) -> io::Result<()> {
    let why = &why.as_bytes()[..why.len().min(REFUSAL_BYTES)];
    send(socket, why, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the daemon's reply to a hello in this version, and maps the shared memory.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] with the daemon's reason if it refuses;
/// [`io::ErrorKind::InvalidData`] if the reply is not valid in this version;
/// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
pub fn receive_welcome(
    socket: BorrowedFd<'_>,
    protocol: ProtocolVersion,
) -> io::Result<Welcome<OwnedFd>> {
    let mut message = [0; REFUSAL_BYTES];
    let (len, fds) = receive_with_fds(socket, &mut message, 4)?;
    let message = &message[..len];
    if message.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::ConnectionAborted,
            "the network daemon has exited",
        ));
    }
    let Some(numbers) = message.strip_prefix(&magic_of(protocol)) else {
        let why = String::from_utf8_lossy(message).into_owned();
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    };
    let other = || {
        invalid("the network daemon uses another version of the protocol: restart this application")
    };
    let (token, numbers) = numbers.split_first_chunk().ok_or_else(other)?;
    let ([sockets, tcp_bytes, udp_bytes, cores], []) = numbers.as_chunks() else {
        return Err(other());
    };
    let number = |bytes: &[u8; 4]| u32::from_ne_bytes(*bytes);
    let geometry = Geometry {
        sockets: number(sockets),
        tcp_bytes: number(tcp_bytes),
        udp_bytes: number(udp_bytes),
    };
    let fds: [OwnedFd; 4] =
        fds.try_into().map_err(|_| invalid("the network daemon has sent no shared memory"))?;
    if !geometry.is_valid() {
        return Err(invalid("the network daemon has sent invalid sizes of the shared memory"));
    }
    let [control, data, daemon, application] = fds;
    let control = Region::open(control, geometry.control_words())?;
    let data = Region::open(data, geometry.data_words())?;
    let (memory, token) =
        (SharedMemory::new(geometry, control, data)?, TakeoverToken::from_bytes(*token));
    let event_fds = EventFds { daemon, application };
    Ok(Welcome { memory, event_fds, token, cores: number(cores) })
}
