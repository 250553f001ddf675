//! Commands of an application to the daemon.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_device::sharded::{LocalPort, PortSharing};
use tidegate_device::steering::TransportProtocol;
use tidegate_stack::{Shutdown, TcpOptions, UdpOptions};

use super::encoding::{
    ADDRESS_WORDS, TCP_OPTIONS_WORDS, address_from_words, address_to_words, tcp_options_from_words,
    tcp_options_to_words, udp_options_from_word, udp_options_to_word,
};
use super::share_group::{ShareGroupId, port_sharing};

/// Words of a command: header, socket or number, two addresses, options.
pub const COMMAND_WORDS: usize = 12;

/// Socket handle: slot index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Handle {
    /// Index of the socket's slot in the shared memory.
    pub slot: u32,
    /// Counts the sockets that have used the slot.
    pub generation: u32,
}

/// Number by which an application matches a reply to its command.
pub type Tag = u32;

/// Command of an application. The daemon replies to the commands that have a tag.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Command {
    /// Polls the socket: its stream has new data, or space again.
    Poll(Handle),
    /// Opens a UDP socket. The application may shorten its queue, but not lengthen it.
    /// Members of a share group may have the port on several cores.
    Bind { tag: Tag, local: SocketAddr, share_group: Option<ShareGroupId>, options: UdpOptions },
    /// Restricts a UDP socket to datagrams of `peer`. `None` removes the restriction.
    ConnectUdp { tag: Tag, socket: Handle, peer: Option<SocketAddr> },
    /// Opens a listener with an accept queue of `backlog` connections. Members of a share group
    /// may have the port on several cores.
    Listen {
        tag: Tag,
        local: SocketAddr,
        backlog: u32,
        share_group: Option<ShareGroupId>,
        options: TcpOptions,
    },
    /// Takes a connection from the listener's accept queue.
    Accept { tag: Tag, listener: Handle },
    /// Starts to connect.
    ConnectTcp { tag: Tag, local: Option<SocketAddr>, remote: SocketAddr, options: TcpOptions },
    /// Shuts down one or both directions of a connection.
    Shutdown { socket: Handle, how: Shutdown },
    /// Sets the options of a connection, or those that a listener passes on.
    SetOptions { socket: Handle, options: TcpOptions },
    /// Sets the options of a UDP socket.
    SetUdpOptions { socket: Handle, options: UdpOptions },
    /// Closes the socket. With `reset_on_close` a connection is reset (RST). Otherwise unsent
    /// data is still sent.
    Close { socket: Handle, reset_on_close: bool },
    /// Looks up an address: is it local, and which source address do packets to it have.
    LookUpAddress { tag: Tag, address: IpAddr },
    /// Queries the state of a connection.
    TcpInfo { tag: Tag, socket: Handle },
    /// Queries the number of executed commands. Without a tag the daemon does not reply.
    Ping { tag: Option<Tag> },
}

/// Command codes: the low byte of the first word.
const POLL: u64 = 1;
const BIND: u64 = 2;
const CONNECT_UDP: u64 = 3;
const LISTEN: u64 = 4;
const ACCEPT: u64 = 5;
const CONNECT_TCP: u64 = 6;
const SHUTDOWN: u64 = 7;
const SET_OPTIONS: u64 = 8;
const CLOSE: u64 = 9;
const PING: u64 = 10;
const LOOK_UP_ADDRESS: u64 = 11;
const TCP_INFO: u64 = 12;
const SET_UDP_OPTIONS: u64 = 13;

/// First word of a command: code, small argument and tag.
fn header_word(kind: u64, argument: u64, tag: Tag) -> u64 {
    kind | argument << 8 | u64::from(tag) << 32
}

impl Handle {
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    pub(super) fn from_word(word: u64) -> Self {
        Self { slot: word as u32, generation: (word >> 32) as u32 }
    }
}

impl Command {
    /// Local port that the command requests. `None` if the daemon may choose it.
    pub fn requested_port(&self) -> Option<LocalPort> {
        let (protocol, local) = match *self {
            Self::Bind { local, .. } => (TransportProtocol::Udp, local),
            Self::Listen { local, .. } => (TransportProtocol::Tcp, local),
            Self::ConnectTcp { local, .. } => (TransportProtocol::Tcp, local?),
            _ => return None,
        };
        (local.port() != 0).then_some((protocol, local.port()))
    }

    /// True if the command opens a socket.
    pub fn opens_socket(&self) -> bool {
        use Command::{Accept, Bind, ConnectTcp, Listen};
        matches!(self, Bind { .. } | Listen { .. } | Accept { .. } | ConnectTcp { .. })
    }

    /// True if the answer says that all earlier commands are executed, and their ports free.
    pub fn awaits_closed(&self) -> bool {
        matches!(self, Self::Ping { tag: Some(_) })
    }

    /// Sharing mode of the port that the command requests, for an application of user `uid`.
    pub fn sharing(&self, uid: u32) -> PortSharing {
        let (reuse_port, share_group) = match self {
            Self::Bind { options, share_group, .. } => (options.reuse_port, *share_group),
            Self::Listen { options, share_group, .. } => (options.reuse_port, *share_group),
            _ => (false, None),
        };
        let (reuse_port, owner) = port_sharing(share_group, reuse_port, uid);
        PortSharing::new(reuse_port, owner)
    }

    /// Encodes the command: header, socket or number, addresses, options.
    pub fn to_words(self) -> [u64; COMMAND_WORDS] {
        let mut words = [0; COMMAND_WORDS];
        let [first, second, rest @ ..] = &mut words;
        let (near, rest) = rest.split_at_mut(ADDRESS_WORDS);
        let (far, last) = rest.split_at_mut(ADDRESS_WORDS);
        let mut put_addresses = |a: Option<SocketAddr>, b: Option<SocketAddr>| {
            near.copy_from_slice(&address_to_words(a));
            far.copy_from_slice(&address_to_words(b));
        };
        let mut put_tcp_options =
            |options: &TcpOptions| last.copy_from_slice(&tcp_options_to_words(options));
        match self {
            Self::Poll(socket) => (*first, *second) = (header_word(POLL, 0, 0), socket.to_word()),
            Self::Bind { tag, local, share_group, options } => {
                (*first, *second) = (header_word(BIND, 0, tag), udp_options_to_word(&options));
                put_addresses(Some(local), None);
                last[0] = ShareGroupId::to_word(share_group);
            }
            Self::ConnectUdp { tag, socket, peer } => {
                (*first, *second) = (header_word(CONNECT_UDP, 0, tag), socket.to_word());
                put_addresses(None, peer);
            }
            Self::Listen { tag, local, backlog, share_group, options } => {
                (*first, *second) = (header_word(LISTEN, 0, tag), backlog.into());
                near.copy_from_slice(&address_to_words(Some(local)));
                far[0] = ShareGroupId::to_word(share_group);
                last.copy_from_slice(&tcp_options_to_words(&options));
            }
            Self::Accept { tag, listener } => {
                (*first, *second) = (header_word(ACCEPT, 0, tag), listener.to_word());
            }
            Self::ConnectTcp { tag, local, remote, options } => {
                *first = header_word(CONNECT_TCP, 0, tag);
                put_addresses(local, Some(remote));
                put_tcp_options(&options);
            }
            Self::Shutdown { socket, how } => {
                let how = match how {
                    Shutdown::Read => 1,
                    Shutdown::Write => 2,
                    Shutdown::Both => 3,
                };
                (*first, *second) = (header_word(SHUTDOWN, how, 0), socket.to_word());
            }
            Self::SetOptions { socket, options } => {
                (*first, *second) = (header_word(SET_OPTIONS, 0, 0), socket.to_word());
                put_tcp_options(&options);
            }
            Self::SetUdpOptions { socket, options } => {
                (*first, *second) = (header_word(SET_UDP_OPTIONS, 0, 0), socket.to_word());
                near[0] = udp_options_to_word(&options);
            }
            Self::Close { socket, reset_on_close } => {
                (*first, *second) =
                    (header_word(CLOSE, reset_on_close.into(), 0), socket.to_word());
            }
            Self::LookUpAddress { tag, address } => {
                *first = header_word(LOOK_UP_ADDRESS, 0, tag);
                put_addresses(Some(SocketAddr::new(address, 0)), None);
            }
            Self::TcpInfo { tag, socket } => {
                (*first, *second) = (header_word(TCP_INFO, 0, tag), socket.to_word());
            }
            Self::Ping { tag } => {
                *first = header_word(PING, tag.is_some().into(), tag.unwrap_or(0));
            }
        }
        words
    }

    /// Decodes a command. `None` if the words are not a valid command.
    pub fn from_words(words: [u64; COMMAND_WORDS]) -> Option<Self> {
        let [first, second, a, b, c, d, e, f, last @ ..] = words;
        let last: [u64; TCP_OPTIONS_WORDS] = last;
        let near = match first & 0xff {
            SET_UDP_OPTIONS => None,
            _ => address_from_words([a, b, c])?,
        };
        let far = match first & 0xff {
            LISTEN => None,
            _ => address_from_words([d, e, f])?,
        };
        let options = tcp_options_from_words(last);
        let (argument, tag) = ((first >> 8) as u8, (first >> 32) as u32);
        let socket = Handle::from_word(second);
        Some(match first & 0xff {
            POLL => Self::Poll(socket),
            BIND => {
                let (share_group, options) =
                    (ShareGroupId::from_word(last[0]), udp_options_from_word(second));
                Self::Bind { tag, local: near?, share_group, options }
            }
            CONNECT_UDP => Self::ConnectUdp { tag, socket, peer: far },
            LISTEN => {
                let (backlog, share_group) = (second as u32, ShareGroupId::from_word(d));
                Self::Listen { tag, local: near?, backlog, share_group, options }
            }
            ACCEPT => Self::Accept { tag, listener: socket },
            CONNECT_TCP => Self::ConnectTcp { tag, local: near, remote: far?, options },
            SHUTDOWN => {
                let how = match argument {
                    1 => Shutdown::Read,
                    2 => Shutdown::Write,
                    3 => Shutdown::Both,
                    _ => return None,
                };
                Self::Shutdown { socket, how }
            }
            SET_OPTIONS => Self::SetOptions { socket, options },
            SET_UDP_OPTIONS => Self::SetUdpOptions { socket, options: udp_options_from_word(a) },
            CLOSE => Self::Close { socket, reset_on_close: argument != 0 },
            LOOK_UP_ADDRESS => Self::LookUpAddress { tag, address: near?.ip() },
            TCP_INFO => Self::TcpInfo { tag, socket },
            PING => Self::Ping { tag: (argument != 0).then_some(tag) },
            _ => return None,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ipc::encoding::tests::{changed_tcp_options, changed_udp_options};

    /// Commands of every kind, with every encoded field.
    pub(in crate::ipc) fn commands() -> Vec<Command> {
        let socket = Handle { slot: 7, generation: 0xffff_fffe };
        let plain = TcpOptions::default();
        let odd = changed_tcp_options();
        let odd_datagrams = changed_udp_options();
        let share_group = ShareGroupId::from_word(u64::MAX);
        let v4 = "192.0.2.1:65535".parse().unwrap();
        let v6: SocketAddr = "[fe80::1%3]:1".parse().unwrap();
        vec![
            Command::Poll(socket),
            Command::Bind {
                tag: u32::MAX,
                local: v4,
                share_group: None,
                options: UdpOptions::default(),
            },
            Command::Bind { tag: 0, local: v6, share_group, options: odd_datagrams },
            Command::ConnectUdp { tag: 1, socket, peer: Some(v6) },
            Command::ConnectUdp { tag: 1, socket, peer: None },
            Command::Listen { tag: 2, local: v6, backlog: u32::MAX, share_group, options: odd },
            Command::Listen { tag: 2, local: v4, backlog: 0, share_group: None, options: plain },
            Command::Accept { tag: 3, listener: socket },
            Command::ConnectTcp { tag: 4, local: None, remote: v4, options: plain },
            Command::ConnectTcp { tag: 4, local: Some(v6), remote: v6, options: odd },
            Command::Shutdown { socket, how: Shutdown::Read },
            Command::Shutdown { socket, how: Shutdown::Write },
            Command::Shutdown { socket, how: Shutdown::Both },
            Command::SetOptions { socket, options: odd },
            Command::SetUdpOptions { socket, options: odd_datagrams },
            Command::SetUdpOptions { socket, options: UdpOptions::default() },
            Command::Close { socket, reset_on_close: true },
            Command::Close { socket, reset_on_close: false },
            Command::LookUpAddress { tag: 5, address: v6.ip() },
            Command::TcpInfo { tag: 6, socket },
            Command::Ping { tag: Some(0) },
            Command::Ping { tag: None },
        ]
    }

    #[test]
    fn every_command_round_trips() {
        for command in commands() {
            assert_eq!(Command::from_words(command.to_words()), Some(command));
        }
    }

    proptest! {
        #[test]
        fn random_words_decode_to_a_command_or_none(words: [u64; COMMAND_WORDS], kind in 0..14_u64) {
            let mut words = words;
            words[0] = words[0] & !0xff | kind;
            if let Some(command) = Command::from_words(words) {
                prop_assert_eq!(Command::from_words(command.to_words()), Some(command));
            }
        }
    }
}
