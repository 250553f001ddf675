//! State of the kernel's socket queues, from socket diagnostics (sock_diag(7)).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// Local port whose sockets measure overload, as `udp/53`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedPort {
    tcp: bool,
    /// The local port.
    pub port: u16,
}

impl WatchedPort {
    /// True for a TCP port, false for a UDP port.
    pub fn is_tcp(self) -> bool {
        self.tcp
    }
}

impl fmt::Display for WatchedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", if self.tcp { "tcp" } else { "udp" }, self.port)
    }
}

impl FromStr for WatchedPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a port: write udp/53 or tcp/443");
        let (protocol, port) = text.split_once('/').ok_or_else(wrong)?;
        let tcp = match protocol {
            "udp" => false,
            "tcp" => true,
            _ => return Err(wrong()),
        };
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { tcp, port }),
            _ => Err(wrong()),
        }
    }
}

/// State of the sockets on the watched ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueState {
    /// Fill of the fullest receive queue, in percent.
    pub(super) level_percent: u32,
    /// Packets dropped by the currently open sockets since they were created.
    pub(super) dropped: u64,
}

const RECEIVE_BUFFER_BYTES: usize = 64 << 10;

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP` of `linux/netlink.h`.
const REQUEST_DUMP: u16 = 0x301;
/// `NLMSG_ERROR` and `NLMSG_DONE`.
const MESSAGE_TYPE_ERROR: u16 = 2;
const MESSAGE_TYPE_DONE: u16 = 3;
/// `INET_DIAG_SKMEMINFO` of `linux/inet_diag.h`.
const ATTRIBUTE_SKMEMINFO: u16 = 7;
/// `TCP_LISTEN` of `net/tcp_states.h`.
const TCP_STATE_LISTEN: u32 = 10;
/// Bytes of `struct nlmsghdr` and `struct inet_diag_msg`.
const NETLINK_HEADER_BYTES: usize = 16;
const DIAG_MESSAGE_BYTES: usize = 72;

/// Netlink socket for socket diagnostics.
pub(super) struct SocketQueues {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl SocketQueues {
    /// Opens a netlink socket for the sockets of the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let fd = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?;
        Ok(Self { fd, buffer: vec![0; RECEIVE_BUFFER_BYTES] })
    }

    /// Reads the state of the sockets on the ports `watch`, for IPv4 and IPv6.
    pub(super) fn read(&mut self, watch: &[WatchedPort]) -> io::Result<QueueState> {
        let mut state = QueueState::default();
        for &watch in watch {
            for family in [AddressFamily::INET, AddressFamily::INET6] {
                self.dump(watch, family, &mut state)?;
            }
        }
        Ok(state)
    }

    fn dump(
        &mut self,
        watch: WatchedPort,
        family: AddressFamily,
        state: &mut QueueState,
    ) -> io::Result<()> {
        rustix::net::send(&self.fd, &request(watch, family), SendFlags::empty())?;
        loop {
            let len = match rustix::net::recv(&self.fd, &mut self.buffer[..], RecvFlags::empty()) {
                Ok((len, _)) => len,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let bytes = self.buffer.get(..len).unwrap_or(&[]);
            if parse_reply(bytes, watch.tcp, state)? {
                return Ok(());
            }
        }
    }
}

/// Builds a `struct nlmsghdr` with a `struct inet_diag_req_v2`.
fn request(watch: WatchedPort, family: AddressFamily) -> [u8; NETLINK_HEADER_BYTES + 56] {
    let mut bytes = [0; NETLINK_HEADER_BYTES + 56];
    bytes[..4].copy_from_slice(&((NETLINK_HEADER_BYTES + 56) as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST_DUMP.to_ne_bytes());
    let body = &mut bytes[NETLINK_HEADER_BYTES..];
    body[0] = family.as_raw() as u8;
    body[1] = if watch.tcp { 6 } else { 17 };
    body[2] = 1 << (ATTRIBUTE_SKMEMINFO - 1);
    let states: u32 = if watch.tcp { 1 << TCP_STATE_LISTEN } else { u32::MAX };
    body[4..8].copy_from_slice(&states.to_ne_bytes());
    body[8..10].copy_from_slice(&watch.port.to_be_bytes());
    bytes
}

/// Adds the sockets of one reply datagram to `state`; returns true after the last message.
fn parse_reply(mut bytes: &[u8], tcp: bool, state: &mut QueueState) -> io::Result<bool> {
    while let Some((length, kind)) = parse_message_header(bytes) {
        // Messages begin on multiples of four bytes (NLMSG_ALIGN).
        let message = bytes.get(NETLINK_HEADER_BYTES..length).unwrap_or(&[]);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        match kind {
            MESSAGE_TYPE_DONE => return Ok(true),
            MESSAGE_TYPE_ERROR => {
                let code = u32_at(message, 0).unwrap_or(0).cast_signed();
                return Err(io::Error::from_raw_os_error(code.wrapping_neg()));
            }
            SOCK_DIAG_BY_FAMILY => parse_socket(message, tcp, state),
            _ => {}
        }
    }
    Ok(false)
}

fn parse_message_header(bytes: &[u8]) -> Option<(usize, u16)> {
    let length = u32_at(bytes, 0)? as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    (NETLINK_HEADER_BYTES..=bytes.len()).contains(&length).then_some((length, kind))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn parse_socket(message: &[u8], tcp: bool, state: &mut QueueState) {
    let percent = |part: u32, whole: u32| {
        u32::try_from(u64::from(part) * 100 / u64::from(whole.max(1))).unwrap_or(u32::MAX)
    };
    if tcp {
        // Of a listener: length and limit of the accept queue.
        if let (Some(waiting), Some(limit)) = (u32_at(message, 56), u32_at(message, 60)) {
            state.level_percent = state.level_percent.max(percent(waiting, limit));
        }
        return;
    }
    let mut rest = message.get(DIAG_MESSAGE_BYTES..).unwrap_or(&[]);
    while let Some(head) = rest.first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]);
        let Some(value) = rest.get(4..length) else { return };
        if kind == ATTRIBUTE_SKMEMINFO {
            // SK_MEMINFO_RMEM_ALLOC, SK_MEMINFO_RCVBUF, SK_MEMINFO_DROPS.
            let word = |index: usize| u32_at(value, 4 * index);
            if let (Some(used), Some(limit)) = (word(0), word(1)) {
                state.level_percent = state.level_percent.max(percent(used, limit));
            }
            state.dropped += u64::from(word(8).unwrap_or(0));
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn watched_port_display_parses_back() {
        for text in ["udp/53", "tcp/65535"] {
            assert_eq!(text.parse::<WatchedPort>().unwrap().to_string(), text);
        }
        for text in ["", "53", "udp/0", "udp/65536", "sctp/5", "udp/"] {
            assert!(text.parse::<WatchedPort>().unwrap_err().contains("udp/53"), "{text}");
        }
    }

    #[test]
    fn reports_fill_and_drops_of_udp_sockets() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).unwrap();
            let target = socket.local_addr().unwrap();
            let watch = [WatchedPort { tcp: false, port: target.port() }];
            let mut queues = SocketQueues::open().unwrap();
            assert_eq!(queues.read(&watch).unwrap(), QueueState::default());
            let sender = UdpSocket::bind(address).unwrap();
            // More than any default of `net.core.rmem_default`.
            for _ in 0..20_000 {
                let _ = sender.send_to(&[0; 1000], target);
            }
            let state = queues.read(&watch).unwrap();
            assert!(state.level_percent >= 75 && state.dropped > 0, "{state:?}");
            let other = WatchedPort { tcp: false, port: 1 };
            assert_eq!(queues.read(&[other]).unwrap(), QueueState::default());
        }
    }

    #[test]
    fn reports_fill_of_accept_queue() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut queues = SocketQueues::open().unwrap();
        let watch = [WatchedPort { tcp: true, port: address.port() }];
        assert_eq!(queues.read(&watch).unwrap().level_percent, 0);
        let waiting: Vec<_> =
            (0..8).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
        assert!(queues.read(&watch).unwrap().level_percent > 0);
        drop(waiting);
    }

    #[test]
    fn survives_damaged_replies() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = (0..rng.usize(0..160)).map(|_| rng.u8(..)).collect();
            if let Some(head) = bytes.first_chunk_mut::<6>() {
                head[..4].copy_from_slice(&rng.u32(0..200).to_ne_bytes());
                head[4..]
                    .copy_from_slice(&[[20_u16, 2, 3][rng.usize(0..3)].to_ne_bytes()].concat());
            }
            let mut state = QueueState::default();
            let _ = parse_reply(&bytes, rng.bool(), &mut state);
        }
    }
}
