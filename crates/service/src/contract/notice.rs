//! What the daemon tells an application.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use tidegate_stack::TcpInfo;

use super::command::{Handle, Tag};
use super::failure;
use super::words::{
    ADDRESS_WORDS, address_from_words, address_to_words, info_from_words, info_to_words,
};

/// Words of a notice.
pub const NOTICE_WORDS: usize = 8;

/// What the daemon tells an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The socket's status is another one, something came, or there is room.
    Changed(Handle),
    /// The answer to what was asked with this tag.
    Answer { tag: Tag, outcome: Result<Granted, ErrorKind> },
    /// Whose the address that was asked for is.
    Found { tag: Tag, found: Found },
    /// What is known of the connection that was asked for.
    Informed { tag: Tag, info: TcpInfo },
    /// So many commands were done, up to the one with this tag.
    Pong { tag: Tag, commands: u64 },
}

/// A socket that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Its name.
    pub socket: Handle,
    /// Its own address.
    pub local: Option<SocketAddr>,
    /// Whom it is connected to.
    pub peer: Option<SocketAddr>,
}

/// What the daemon knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// It is one of the daemon's own.
    pub is_own: bool,
    /// The address that packets to it leave from; none when nothing leads there.
    pub source: Option<IpAddr>,
}

const CHANGED: u64 = 1;
const GRANTED: u64 = 2;
const REFUSED: u64 = 3;
const PONG: u64 = 4;
const FOUND: u64 = 5;
const INFORMED: u64 = 6;

impl Notice {
    /// The notice as words.
    pub fn to_words(self) -> [u64; NOTICE_WORDS] {
        let mut words = [0; NOTICE_WORDS];
        let [first, second, rest @ ..] = &mut words;
        match self {
            Self::Changed(socket) => (*first, *second) = (CHANGED, socket.to_word()),
            Self::Answer { tag, outcome: Ok(granted) } => {
                *first = GRANTED | u64::from(tag) << 32;
                *second = granted.socket.to_word();
                let (local, peer) = rest.split_at_mut(ADDRESS_WORDS);
                local.copy_from_slice(&address_to_words(granted.local));
                peer.copy_from_slice(&address_to_words(granted.peer));
            }
            Self::Answer { tag, outcome: Err(kind) } => {
                *first = REFUSED | u64::from(tag) << 32;
                *second = failure::to_number(kind).into();
            }
            Self::Found { tag, found } => {
                (*first, *second) = (FOUND | u64::from(tag) << 32, found.is_own.into());
                let source = found.source.map(|source| SocketAddr::new(source, 0));
                rest[..ADDRESS_WORDS].copy_from_slice(&address_to_words(source));
            }
            Self::Informed { tag, info } => {
                *first = INFORMED | u64::from(tag) << 32;
                let values = info_to_words(&info);
                *second = values[0];
                rest.copy_from_slice(&values[1..]);
            }
            Self::Pong { tag, commands } => {
                (*first, *second) = (PONG | u64::from(tag) << 32, commands);
            }
        }
        words
    }

    /// The notice that words are; `None` when they are none.
    pub fn from_words(words: [u64; NOTICE_WORDS]) -> Option<Self> {
        let [first, second, a, b, c, d, e, f] = words;
        let tag = (first >> 32) as u32;
        Some(match first & 0xffff_ffff {
            CHANGED => Self::Changed(Handle::from_word(second)),
            GRANTED => {
                let local = address_from_words([a, b, c])?;
                let peer = address_from_words([d, e, f])?;
                let socket = Handle::from_word(second);
                Self::Answer { tag, outcome: Ok(Granted { socket, local, peer }) }
            }
            REFUSED => {
                let kind = failure::from_number(second as u8).unwrap_or(ErrorKind::Other);
                Self::Answer { tag, outcome: Err(kind) }
            }
            FOUND => {
                let source = address_from_words([a, b, c])?.map(|source| source.ip());
                Self::Found { tag, found: Found { is_own: second != 0, source } }
            }
            INFORMED => Self::Informed { tag, info: info_from_words([second, a, b, c, d, e, f])? },
            PONG => Self::Pong { tag, commands: second },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use tidegate_stack::TcpState;

    use super::*;

    #[test]
    fn every_notice_comes_back_as_it_was() {
        let socket = Handle { place: u32::MAX, generation: 1 };
        let local = Some("[2001:db8::1]:53".parse().unwrap());
        let peer = Some("192.0.2.1:1024".parse().unwrap());
        for outcome in [
            Ok(Granted { socket, local, peer }),
            Ok(Granted { socket, local, peer: None }),
            Err(ErrorKind::AddrInUse),
        ] {
            let notice = Notice::Answer { tag: 9, outcome };
            assert_eq!(Notice::from_words(notice.to_words()), Some(notice));
        }
        for source in [None, Some("192.0.2.1".parse().unwrap())] {
            let notice = Notice::Found { tag: 3, found: Found { is_own: true, source } };
            assert_eq!(Notice::from_words(notice.to_words()), Some(notice));
        }
        let info = TcpInfo {
            rtt_ns: Some(u64::MAX - 1),
            rto_ns: 1,
            cwnd_bytes: 2,
            ssthresh_bytes: u32::MAX,
            send_window_bytes: 3,
            receive_window_bytes: 4,
            mss_bytes: 65_535,
            unacknowledged_bytes: 5,
            unread_bytes: 6,
            sack: true,
            timestamps: false,
            ecn: true,
            ..TcpInfo::unknown(TcpState::TimeWait)
        };
        for info in [info, TcpInfo::unknown(TcpState::Closed)] {
            let notice = Notice::Informed { tag: 4, info };
            assert_eq!(Notice::from_words(notice.to_words()), Some(notice));
        }
        let notice = Notice::Pong { tag: u32::MAX, commands: u64::MAX };
        assert_eq!(Notice::from_words(notice.to_words()), Some(notice));
        let notice = Notice::Changed(socket);
        assert_eq!(Notice::from_words(notice.to_words()), Some(notice));
        assert_eq!(Notice::from_words([0; NOTICE_WORDS]), None);
        assert_eq!(Notice::from_words([GRANTED, 0, 1, 0, 0, 0, 0, 0]), None, "no such family");
    }
}
