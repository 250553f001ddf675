//! The first words on the Unix socket.
//!
//! The application says which version it speaks and what it is called; the daemon
//! answers with how much there is of everything and with the memory, or with a
//! sentence that says why not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;

use rustix::net::{SendFlags, send};
use tidegate_memory::shared::Region;

use super::command::Handle;
use super::descriptors::{receive_with, send_with};
use super::layout::{Geometry, Memory};
use super::ticket::{TICKET_BYTES, Ticket};

/// What this is, and which version.
const MAGIC: [u8; 8] = *b"tidegat\x03";

/// Bytes of a name.
const NAME_BYTES: usize = 48;
const HELLO_BYTES: usize = MAGIC.len() + 1 + TICKET_BYTES + NAME_BYTES;
const WELCOME_BYTES: usize = MAGIC.len() + TICKET_BYTES + 4 * 4;
/// Bytes that say which socket is on its way.
const OFFER_BYTES: usize = 2 + 8;
/// Bytes of the longest sentence that says why not.
const REFUSAL_BYTES: usize = 256;

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Which it is of the sockets that go with one descriptor: those that have a port
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its number, from 0 on.
    pub number: u8,
    /// How many there are.
    pub of: u8,
}

impl Part {
    /// The one socket that goes with a descriptor.
    pub const ONLY: Self = Self { number: 0, of: 1 };
}

/// What an application has to say of a socket that is on its way to another process,
/// or was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// Its own socket of this name is on its way.
    Offer(Handle, Part),
    /// The part of this number is not after all.
    Withdraw(u8),
    /// The part of this number has arrived, or is a listener of others.
    Take(u8),
    /// It is none on its way: the program has bound the descriptor itself, and is to
    /// get its port here too. All who have the descriptor may listen there; what listens
    /// is this part.
    Hold(Part),
}

/// What somebody comes for.
#[derive(Debug)]
pub enum Hello {
    /// To attach, under this name.
    Attach(String),
    /// To attach with the sockets of whom the ticket was given to, under this name.
    Inherit(Ticket, String),
    /// To speak of a socket on its way, which this descriptor of the kernel's goes
    /// with, for the application that the ticket was given to.
    Pass(Ticket, Passing, OwnedFd),
    /// To hear how things stand.
    Report,
    /// To go on in the daemon's place.
    Upgrade,
}

const ATTACH: u8 = 1;
const REPORT: u8 = 2;
const INHERIT: u8 = 3;
const UPGRADE: u8 = 4;
const OFFER: u8 = 5;
const WITHDRAW: u8 = 6;
const TAKE: u8 = 7;
const HOLD: u8 = 8;

/// The first message. Names are cut to 48 bytes.
///
/// # Errors
/// What the kernel says.
pub fn send_hello(to: BorrowedFd<'_>, hello: &Hello) -> io::Result<()> {
    let mut words = [0; OFFER_BYTES];
    let (kind, ticket, text) = match hello {
        Hello::Attach(name) => (ATTACH, None, name.as_bytes()),
        Hello::Inherit(ticket, name) => (INHERIT, Some(ticket), name.as_bytes()),
        Hello::Pass(ticket, Passing::Offer(handle, Part { number, of }), _) => {
            words[..2].copy_from_slice(&[*number, *of]);
            words[2..].copy_from_slice(&handle.to_word().to_ne_bytes());
            (OFFER, Some(ticket), &words[..])
        }
        Hello::Pass(ticket, Passing::Withdraw(part), _) => {
            (WITHDRAW, Some(ticket), slice::from_ref(part))
        }
        Hello::Pass(ticket, Passing::Take(part), _) => (TAKE, Some(ticket), slice::from_ref(part)),
        Hello::Pass(ticket, Passing::Hold(Part { number, of }), _) => {
            words[..2].copy_from_slice(&[*number, *of]);
            (HOLD, Some(ticket), &words[..2])
        }
        Hello::Report => (REPORT, None, &[][..]),
        Hello::Upgrade => (UPGRADE, None, &[][..]),
    };
    let mut message = [0; HELLO_BYTES];
    let (magic, rest) = message.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    rest[0] = kind;
    let (shown, rest) = rest[1..].split_at_mut(TICKET_BYTES);
    shown.copy_from_slice(ticket.map_or(&[0; TICKET_BYTES], |ticket| ticket.bytes()));
    let text = &text[..text.len().min(NAME_BYTES)];
    rest[..text.len()].copy_from_slice(text);
    let shown = match hello {
        Hello::Pass(_, _, descriptor) => Some(descriptor.as_fd()),
        _ => None,
    };
    send_with(to, &message, shown.as_slice())
}

/// Reads the first message. Of a name only printable characters are taken.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] when it is none of this version.
pub fn receive_hello(socket: BorrowedFd<'_>) -> io::Result<Hello> {
    let mut message = [0; HELLO_BYTES];
    let (len, shown) = receive_with(socket, &mut message, 1)?;
    let mut shown = shown.into_iter();
    let unknown = || invalid("it does not speak this version of the protocol");
    let words = message[..len].strip_prefix(&MAGIC);
    let (kind, rest) = words.and_then(|words| words.split_first()).ok_or_else(unknown)?;
    let (ticket, text) = rest.split_first_chunk().ok_or_else(unknown)?;
    let ticket = Ticket::from_bytes(*ticket);
    let mut pass = |passing| {
        let shown = shown.next().ok_or_else(|| invalid("it shows no descriptor"));
        shown.map(|shown| Hello::Pass(ticket, passing, shown))
    };
    let (&[part, of], rest) = text.split_first_chunk().ok_or_else(unknown)?;
    let handle = rest.first_chunk().map(|word| Handle::from_word(u64::from_ne_bytes(*word)));
    let name = String::from_utf8_lossy(text).chars().filter(char::is_ascii_graphic).collect();
    match *kind {
        ATTACH => Ok(Hello::Attach(name)),
        INHERIT => Ok(Hello::Inherit(ticket, name)),
        OFFER => pass(Passing::Offer(handle.ok_or_else(unknown)?, Part { number: part, of })),
        WITHDRAW => pass(Passing::Withdraw(part)),
        TAKE => pass(Passing::Take(part)),
        HOLD => pass(Passing::Hold(Part { number: part, of })),
        REPORT => Ok(Hello::Report),
        UPGRADE => Ok(Hello::Upgrade),
        _ => Err(invalid("it wants something that there is not in this version")),
    }
}

/// What an application gets that is let in.
pub struct Welcome {
    /// All that both sides share.
    pub memory: Memory,
    /// Who it is.
    pub ticket: Ticket,
    /// How many network cores there are: it may attach so often, to have its sockets on
    /// all of them.
    pub cores: u32,
}

/// The daemon's answer.
///
/// # Errors
/// What the kernel says.
pub fn send_welcome(socket: BorrowedFd<'_>, welcome: &Welcome) -> io::Result<()> {
    let Welcome { memory, ticket, cores } = welcome;
    let Geometry { sockets, tcp_bytes, udp_bytes } = *memory.geometry();
    let mut message = [0; WELCOME_BYTES];
    message[..MAGIC.len()].copy_from_slice(&MAGIC);
    let (shown, rest) = message[MAGIC.len()..].split_at_mut(TICKET_BYTES);
    shown.copy_from_slice(ticket.bytes());
    let numbers = [sockets, tcp_bytes, udp_bytes, *cores];
    for (to, number) in rest.chunks_exact_mut(4).zip(numbers) {
        to.copy_from_slice(&number.to_ne_bytes());
    }
    send_with(socket, &message, &memory.regions().map(AsFd::as_fd))
}

/// The daemon's answer to whom it does not serve.
///
/// # Errors
/// What the kernel says.
pub fn send_refusal(socket: BorrowedFd<'_>, why: &str) -> io::Result<()> {
    let why = &why.as_bytes()[..why.len().min(REFUSAL_BYTES)];
    send(socket, why, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Reads the daemon's answer.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] with the daemon's reason when it refuses;
/// [`io::ErrorKind::InvalidData`] when it is none of this version;
/// [`io::ErrorKind::ConnectionAborted`] when it has ended.
pub fn receive_welcome(socket: BorrowedFd<'_>) -> io::Result<Welcome> {
    let mut message = [0; REFUSAL_BYTES];
    let (len, fds) = receive_with(socket, &mut message, 2)?;
    let message = &message[..len];
    if message.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::ConnectionAborted,
            "the network daemon has ended",
        ));
    }
    let Some(numbers) = message.strip_prefix(&MAGIC) else {
        let why = String::from_utf8_lossy(message).into_owned();
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    };
    let other = || invalid("the network daemon speaks another version: restart this program");
    let (ticket, numbers) = numbers.split_first_chunk().ok_or_else(other)?;
    let ([sockets, tcp_bytes, udp_bytes, cores], []) = numbers.as_chunks() else {
        return Err(other());
    };
    let number = |bytes: &[u8; 4]| u32::from_ne_bytes(*bytes);
    let geometry = Geometry {
        sockets: number(sockets),
        tcp_bytes: number(tcp_bytes),
        udp_bytes: number(udp_bytes),
    };
    let fds: [OwnedFd; 2] =
        fds.try_into().map_err(|_| invalid("the network daemon has sent no memory"))?;
    if !geometry.is_sound() {
        return Err(invalid("the network daemon offers memory of a size that makes no sense"));
    }
    let [control, data] = fds;
    let control = Region::open(control, geometry.control_words())?;
    let data = Region::open(data, geometry.data_words())?;
    let (memory, ticket) = (Memory::new(geometry, control, data)?, Ticket::from_bytes(*ticket));
    Ok(Welcome { memory, ticket, cores: number(cores) })
}
