//! Notifications of the daemon to an application.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{TcpInfo, TcpTraffic};

use super::command::{Handle, Tag};
use super::encoding::{
    ADDRESS_WORDS, TCP_TRAFFIC_WORDS, address_from_words, address_to_words, tcp_info_from_words,
    tcp_info_to_words, tcp_traffic_from_words, tcp_traffic_to_words,
};
use super::error_code;

/// Words of a notification.
pub const NOTIFICATION_WORDS: usize = 8;

/// Notification of the daemon to an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    /// The socket's status has changed, data has arrived, or its stream has space.
    Changed(Handle),
    /// Reply to the command with this tag: a socket or an error.
    Reply { tag: Tag, outcome: Result<OpenedSocket, ErrorKind> },
    /// Reply to an address lookup.
    AddressInfo { tag: Tag, info: AddressInfo },
    /// Traffic of a connection, before the reply that has the rest of its state.
    TcpTraffic(TcpTraffic),
    /// Reply to a query of a connection's state, without its traffic.
    TcpInfo { tag: Tag, info: TcpInfo },
    /// Reply to a ping: commands executed so far, including the ping with this tag.
    Pong { tag: Tag, commands: u64 },
}

/// Socket that the daemon has opened or connected, with its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedSocket {
    /// Socket handle.
    pub handle: Handle,
    /// Local address.
    pub local: Option<SocketAddr>,
    /// Remote address of a connected socket.
    pub peer: Option<SocketAddr>,
}

/// Result of an address lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressInfo {
    /// True if the address is one of the daemon's.
    pub is_local: bool,
    /// True if the address is a broadcast address of the daemon's networks.
    pub is_broadcast: bool,
    /// Longest packet to the address that is not fragmented, in bytes, as far as is known.
    pub path_mtu: u16,
    /// Source address of packets to the address; `None` without a route.
    pub source: Option<IpAddr>,
}

const CHANGED: u64 = 1;
const OPENED_SOCKET: u64 = 2;
const ERROR: u64 = 3;
const PONG: u64 = 4;
const ADDRESS_INFO: u64 = 5;
const TCP_INFO: u64 = 6;
const TCP_TRAFFIC: u64 = 7;

impl Notification {
    /// Encodes the notification.
    pub fn to_words(self) -> [u64; NOTIFICATION_WORDS] {
        let mut words = [0; NOTIFICATION_WORDS];
        let [first, second, rest @ ..] = &mut words;
        match self {
            Self::Changed(socket) => (*first, *second) = (CHANGED, socket.to_word()),
            Self::Reply { tag, outcome: Ok(opened) } => {
                *first = OPENED_SOCKET | u64::from(tag) << 32;
                *second = opened.handle.to_word();
                let (local, peer) = rest.split_at_mut(ADDRESS_WORDS);
                local.copy_from_slice(&address_to_words(opened.local));
                peer.copy_from_slice(&address_to_words(opened.peer));
            }
            Self::Reply { tag, outcome: Err(kind) } => {
                *first = ERROR | u64::from(tag) << 32;
                *second = error_code::to_number(kind).into();
            }
            Self::AddressInfo { tag, info } => {
                *first = ADDRESS_INFO | u64::from(tag) << 32;
                *second = u64::from(info.is_local)
                    | u64::from(info.is_broadcast) << 1
                    | u64::from(info.path_mtu) << 16;
                let source = info.source.map(|source| SocketAddr::new(source, 0));
                rest[..ADDRESS_WORDS].copy_from_slice(&address_to_words(source));
            }
            Self::TcpTraffic(traffic) => {
                *first = TCP_TRAFFIC;
                rest[..TCP_TRAFFIC_WORDS].copy_from_slice(&tcp_traffic_to_words(&traffic));
            }
            Self::TcpInfo { tag, info } => {
                *first = TCP_INFO | u64::from(tag) << 32;
                let values = tcp_info_to_words(&info);
                *second = values[0];
                rest.copy_from_slice(&values[1..]);
            }
            Self::Pong { tag, commands } => {
                (*first, *second) = (PONG | u64::from(tag) << 32, commands);
            }
        }
        words
    }

    /// Decodes a notification. `None` if the words are not a valid notification.
    pub fn from_words(words: [u64; NOTIFICATION_WORDS]) -> Option<Self> {
        let [first, second, a, b, c, d, e, f] = words;
        let tag = (first >> 32) as u32;
        Some(match first & 0xffff_ffff {
            CHANGED => Self::Changed(Handle::from_word(second)),
            OPENED_SOCKET => {
                let local = address_from_words([a, b, c])?;
                let peer = address_from_words([d, e, f])?;
                let handle = Handle::from_word(second);
                Self::Reply { tag, outcome: Ok(OpenedSocket { handle, local, peer }) }
            }
            ERROR => {
                let kind = error_code::from_number(second as u8).unwrap_or(ErrorKind::Other);
                Self::Reply { tag, outcome: Err(kind) }
            }
            ADDRESS_INFO => {
                let source = address_from_words([a, b, c])?.map(|source| source.ip());
                let (is_local, is_broadcast) = (second & 1 != 0, second & 2 != 0);
                let path_mtu = (second >> 16) as u16;
                Self::AddressInfo {
                    tag,
                    info: AddressInfo { is_local, is_broadcast, path_mtu, source },
                }
            }
            TCP_INFO => {
                Self::TcpInfo { tag, info: tcp_info_from_words([second, a, b, c, d, e, f])? }
            }
            TCP_TRAFFIC => Self::TcpTraffic(tcp_traffic_from_words([a, b, c, d, e])),
            PONG => Self::Pong { tag, commands: second },
            _ => return None,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tidegate_stack::{RecoveryPhase, TcpState, UnreachableReason};

    use super::*;

    /// Notifications of every kind, with every encoded field.
    pub(in crate::ipc) fn notifications() -> Vec<Notification> {
        let handle = Handle { slot: u32::MAX, generation: 1 };
        let local = Some("[2001:db8::1]:53".parse().unwrap());
        let peer = Some("192.0.2.1:1024".parse().unwrap());
        let outcomes = [
            Ok(OpenedSocket { handle, local, peer }),
            Ok(OpenedSocket { handle, local, peer: None }),
            Err(ErrorKind::AddrInUse),
        ];
        let info = TcpInfo {
            rtt_ns: Some(1_000),
            rtt_variation_ns: 1_000 * u64::from(u32::MAX),
            min_rtt_ns: Some(2_000),
            rto_ns: 120_000_000_000,
            retries: u8::MAX,
            unsent_bytes: 6,
            lost_bytes: u32::MAX,
            send_window_shift: 14,
            receive_window_shift: 1,
            recovery: RecoveryPhase::Loss,
            unreachable: Some(UnreachableReason::SourceIsolated),
            cwnd_bytes: 2,
            ssthresh_bytes: u32::MAX,
            send_window_bytes: 3,
            receive_window_bytes: 4,
            mss_bytes: 65_535,
            unacknowledged_bytes: 5,
            unread_bytes: u32::MAX,
            sack: true,
            timestamps: false,
            ecn: true,
            ..TcpInfo::unknown(TcpState::TimeWait)
        };
        let traffic = TcpTraffic {
            acknowledged_bytes: u64::MAX,
            received_bytes: u64::MAX - 1,
            sent_segments: u32::MAX,
            received_segments: 1,
            retransmitted_segments: u32::MAX - 1,
            delivery_bytes_per_ms: 2,
        };
        let replies = outcomes.map(|outcome| Notification::Reply { tag: 9, outcome });
        let sources = [None, Some("192.0.2.1".parse().unwrap())];
        let addresses = sources.map(|source| {
            let info =
                AddressInfo { is_local: false, is_broadcast: true, path_mtu: u16::MAX, source };
            Notification::AddressInfo { tag: 3, info }
        });
        let infos = [info, TcpInfo::unknown(TcpState::Closed)];
        let infos = infos.map(|info| Notification::TcpInfo { tag: 4, info });
        let others = [
            Notification::TcpTraffic(traffic),
            Notification::Pong { tag: u32::MAX, commands: u64::MAX },
            Notification::Changed(handle),
        ];
        replies.into_iter().chain(addresses).chain(infos).chain(others).collect()
    }

    #[test]
    fn every_notification_round_trips() {
        for notification in notifications() {
            assert_eq!(Notification::from_words(notification.to_words()), Some(notification));
        }
        assert_eq!(Notification::from_words([0; NOTIFICATION_WORDS]), None);
        assert_eq!(
            Notification::from_words([OPENED_SOCKET, 0, 1, 0, 0, 0, 0, 0]),
            None,
            "no such family"
        );
    }
}
