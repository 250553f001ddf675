//! What an application asks for.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_port::spread::{LocalPort, Sharing};
use tidegate_port::steering::Protocol;
use tidegate_stack::{Shutdown, TcpOptions, UdpOptions};

use super::together::{Together, shares};
use super::words::{
    ADDRESS_WORDS, OPTIONS_WORDS, address_from_words, address_to_words, options_from_words,
    options_to_words, udp_options_from_word, udp_options_to_word,
};

/// Words of a command: its head, a socket or a number, two addresses, options.
pub const COMMAND_WORDS: usize = 12;

/// The name of a socket: its place, and which of those that were there it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Handle {
    /// The number of its place.
    pub place: u32,
    /// Counts the sockets that were in the place.
    pub generation: u32,
}

/// A number by which an application knows the answer to what it asked.
pub type Tag = u32;

/// What an application asks for. Those with a tag are answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Command {
    /// Something was written to the socket's stream, or there is room in it again.
    Look(Handle),
    /// A UDP socket. How long its queue may be is not the application's to say.
    /// With others `together` it may have its port on several cores.
    Bind { tag: Tag, local: SocketAddr, together: Option<Together>, options: UdpOptions },
    /// A UDP socket takes datagrams from this peer alone; from everybody with none.
    Aim { tag: Tag, socket: Handle, peer: Option<SocketAddr> },
    /// A listener with room for so many that wait. With others `together` it may have its
    /// port on several cores.
    Listen {
        tag: Tag,
        local: SocketAddr,
        backlog: u32,
        together: Option<Together>,
        options: TcpOptions,
    },
    /// A connection that waits on the listener.
    Accept { tag: Tag, listener: Handle },
    /// Begins to connect.
    Connect { tag: Tag, local: Option<SocketAddr>, remote: SocketAddr, options: TcpOptions },
    /// Half of a connection is over, or all of it.
    Shut { socket: Handle, how: Shutdown },
    /// The options of a connection or of those to come.
    Set { socket: Handle, options: TcpOptions },
    /// The application has no use for the socket any more. A connection is broken
    /// off if `abrupt`; else what was written still goes out.
    Close { socket: Handle, abrupt: bool },
    /// Whose an address is, and where packets to it leave from.
    Find { tag: Tag, address: IpAddr },
    /// What is known of a connection.
    Inform { tag: Tag, socket: Handle },
    /// How many commands were done so far; with no tag nobody is told.
    Ping { tag: Option<Tag> },
}

/// The kinds of commands.
const LOOK: u64 = 1;
const BIND: u64 = 2;
const AIM: u64 = 3;
const LISTEN: u64 = 4;
const ACCEPT: u64 = 5;
const CONNECT: u64 = 6;
const SHUT: u64 = 7;
const SET: u64 = 8;
const CLOSE: u64 = 9;
const PING: u64 = 10;
const FIND: u64 = 11;
const INFORM: u64 = 12;

/// The first word: the kind, a small number and a tag.
fn head(kind: u64, small: u64, tag: Tag) -> u64 {
    kind | small << 8 | u64::from(tag) << 32
}

impl Handle {
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.place)
    }

    pub(super) fn from_word(word: u64) -> Self {
        Self { place: word as u32, generation: (word >> 32) as u32 }
    }
}

impl Command {
    /// The local port that it asks for, if it asks for a certain one.
    pub fn wanted_port(&self) -> Option<LocalPort> {
        let (protocol, local) = match *self {
            Self::Bind { local, .. } => (Protocol::Udp, local),
            Self::Listen { local, .. } => (Protocol::Tcp, local),
            Self::Connect { local, .. } => (Protocol::Tcp, local?),
            _ => return None,
        };
        (local.port() != 0).then_some((protocol, local.port()))
    }

    /// To which sockets of this user's it leaves its port, besides.
    pub fn sharing(&self, uid: u32) -> Sharing {
        let (reuse_port, together) = match self {
            Self::Bind { options, together, .. } => (options.reuse_port, *together),
            Self::Listen { options, together, .. } => (options.reuse_port, *together),
            _ => (false, None),
        };
        let (reuse_port, party) = shares(together, reuse_port, uid);
        Sharing::new(reuse_port, party)
    }

    /// The command as words: its head, a socket or a number, addresses, options.
    pub fn to_words(self) -> [u64; COMMAND_WORDS] {
        let mut words = [0; COMMAND_WORDS];
        let [first, second, rest @ ..] = &mut words;
        let (near, rest) = rest.split_at_mut(ADDRESS_WORDS);
        let (far, last) = rest.split_at_mut(ADDRESS_WORDS);
        let mut addresses = |a: Option<SocketAddr>, b: Option<SocketAddr>| {
            near.copy_from_slice(&address_to_words(a));
            far.copy_from_slice(&address_to_words(b));
        };
        let mut with = |options: &TcpOptions| last.copy_from_slice(&options_to_words(options));
        match self {
            Self::Look(socket) => (*first, *second) = (head(LOOK, 0, 0), socket.to_word()),
            Self::Bind { tag, local, together, options } => {
                (*first, *second) = (head(BIND, 0, tag), udp_options_to_word(&options));
                addresses(Some(local), None);
                last[0] = Together::to_word(together);
            }
            Self::Aim { tag, socket, peer } => {
                (*first, *second) = (head(AIM, 0, tag), socket.to_word());
                addresses(None, peer);
            }
            Self::Listen { tag, local, backlog, together, options } => {
                (*first, *second) = (head(LISTEN, 0, tag), backlog.into());
                near.copy_from_slice(&address_to_words(Some(local)));
                far[0] = Together::to_word(together);
                last.copy_from_slice(&options_to_words(&options));
            }
            Self::Accept { tag, listener } => {
                (*first, *second) = (head(ACCEPT, 0, tag), listener.to_word());
            }
            Self::Connect { tag, local, remote, options } => {
                *first = head(CONNECT, 0, tag);
                addresses(local, Some(remote));
                with(&options);
            }
            Self::Shut { socket, how } => {
                let how = match how {
                    Shutdown::Read => 1,
                    Shutdown::Write => 2,
                    Shutdown::Both => 3,
                };
                (*first, *second) = (head(SHUT, how, 0), socket.to_word());
            }
            Self::Set { socket, options } => {
                (*first, *second) = (head(SET, 0, 0), socket.to_word());
                with(&options);
            }
            Self::Close { socket, abrupt } => {
                (*first, *second) = (head(CLOSE, abrupt.into(), 0), socket.to_word());
            }
            Self::Find { tag, address } => {
                *first = head(FIND, 0, tag);
                addresses(Some(SocketAddr::new(address, 0)), None);
            }
            Self::Inform { tag, socket } => {
                (*first, *second) = (head(INFORM, 0, tag), socket.to_word());
            }
            Self::Ping { tag } => *first = head(PING, tag.is_some().into(), tag.unwrap_or(0)),
        }
        words
    }

    /// The command that words are; `None` when they are none.
    pub fn from_words(words: [u64; COMMAND_WORDS]) -> Option<Self> {
        let [first, second, a, b, c, d, e, f, last @ ..] = words;
        let last: [u64; OPTIONS_WORDS] = last;
        let near = address_from_words([a, b, c])?;
        let far = match first & 0xff {
            LISTEN => None,
            _ => address_from_words([d, e, f])?,
        };
        let options = options_from_words(last);
        let (small, tag) = ((first >> 8) as u8, (first >> 32) as u32);
        let socket = Handle::from_word(second);
        Some(match first & 0xff {
            LOOK => Self::Look(socket),
            BIND => {
                let (together, options) =
                    (Together::from_word(last[0]), udp_options_from_word(second));
                Self::Bind { tag, local: near?, together, options }
            }
            AIM => Self::Aim { tag, socket, peer: far },
            LISTEN => {
                let (backlog, together) = (second as u32, Together::from_word(d));
                Self::Listen { tag, local: near?, backlog, together, options }
            }
            ACCEPT => Self::Accept { tag, listener: socket },
            CONNECT => Self::Connect { tag, local: near, remote: far?, options },
            SHUT => {
                let how = match small {
                    1 => Shutdown::Read,
                    2 => Shutdown::Write,
                    3 => Shutdown::Both,
                    _ => return None,
                };
                Self::Shut { socket, how }
            }
            SET => Self::Set { socket, options },
            CLOSE => Self::Close { socket, abrupt: small != 0 },
            FIND => Self::Find { tag, address: near?.ip() },
            INFORM => Self::Inform { tag, socket },
            PING => Self::Ping { tag: (small != 0).then_some(tag) },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_stack::{CongestionControl, Keepalive};

    use super::*;

    fn commands() -> Vec<Command> {
        let socket = Handle { place: 7, generation: 0xffff_fffe };
        let plain = TcpOptions::default();
        let odd = TcpOptions {
            send_buffer_bytes: 1,
            receive_buffer_bytes: u32::MAX,
            receive_low_water_bytes: 3,
            no_delay: true,
            ecn: true,
            dual_stack: true,
            reuse_port: true,
            party: 0,
            congestion_control: CongestionControl::NewReno,
            hop_limit: Some(255),
            traffic_class: 0xfc,
            keepalive: Some(Keepalive { idle_ms: 1, interval_ms: u32::MAX, probes: 9 }),
            user_timeout_ms: Some(0),
        };
        let odd_datagrams = UdpOptions {
            dual_stack: true,
            reuse_address: true,
            reuse_port: true,
            party: 0,
            dont_fragment: true,
            report_errors: true,
            hop_limit: Some(0),
            traffic_class: 0xff,
            queue_packets: None,
            queue_bytes: None,
        };
        let together = Together::from_word(u64::MAX);
        let v4 = "192.0.2.1:65535".parse().unwrap();
        let v6: SocketAddr = "[fe80::1%3]:1".parse().unwrap();
        vec![
            Command::Look(socket),
            Command::Bind {
                tag: u32::MAX,
                local: v4,
                together: None,
                options: UdpOptions::default(),
            },
            Command::Bind { tag: 0, local: v6, together, options: odd_datagrams },
            Command::Aim { tag: 1, socket, peer: Some(v6) },
            Command::Aim { tag: 1, socket, peer: None },
            Command::Listen { tag: 2, local: v6, backlog: u32::MAX, together, options: odd },
            Command::Listen { tag: 2, local: v4, backlog: 0, together: None, options: plain },
            Command::Accept { tag: 3, listener: socket },
            Command::Connect { tag: 4, local: None, remote: v4, options: plain },
            Command::Connect { tag: 4, local: Some(v6), remote: v6, options: odd },
            Command::Shut { socket, how: Shutdown::Read },
            Command::Shut { socket, how: Shutdown::Write },
            Command::Shut { socket, how: Shutdown::Both },
            Command::Set { socket, options: odd },
            Command::Close { socket, abrupt: true },
            Command::Close { socket, abrupt: false },
            Command::Find { tag: 5, address: v6.ip() },
            Command::Inform { tag: 6, socket },
            Command::Ping { tag: Some(0) },
            Command::Ping { tag: None },
        ]
    }

    #[test]
    fn every_command_comes_back_as_it_was() {
        for command in commands() {
            assert_eq!(Command::from_words(command.to_words()), Some(command));
        }
    }

    proptest! {
        #[test]
        fn any_words_are_a_command_or_none(words: [u64; COMMAND_WORDS], kind in 0..14_u64) {
            let mut words = words;
            words[0] = words[0] & !0xff | kind;
            if let Some(command) = Command::from_words(words) {
                prop_assert_eq!(Command::from_words(command.to_words()), Some(command));
            }
        }
    }
}
