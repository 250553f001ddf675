//! Options: the kernel's socket keeps them all, so it judges them and answers
//! for them; those that mean something to Tidegate are read from it and carried
//! over.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{c_int, c_void, socklen_t};
use tidegate::{CongestionControl, Keepalive, TcpInfo, TcpOptions, TcpState, UdpOptions};

use super::{Body, Socket};
use crate::rules::Protocol;
use crate::{log, real};

/// `SO_ATTACH_FILTER` and the like are what `libc` does not name.
const SO_ZEROCOPY: c_int = 60;

/// An option with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    level: c_int,
    name: c_int,
    value: Vec<u8>,
}

/// An option of a kernel's socket that is a number.
pub(crate) fn number(fd: i32, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the value is as long as `len` says.
    let result = unsafe { real::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    (result == 0).then_some(value)
}

fn set(fd: i32, setting: &Setting) {
    let len = setting.value.len() as socklen_t;
    // The kernel took it for another socket already.
    // SAFETY: the value is as long as `len` says.
    unsafe {
        real::setsockopt(fd, setting.level, setting.name, setting.value.as_ptr().cast(), len);
    }
}

/// Sets an option that is a number; whether the kernel takes it.
pub(crate) fn set_number(fd: i32, level: c_int, name: c_int, value: c_int) -> bool {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the value is as long as `len` says.
    unsafe { real::setsockopt(fd, level, name, (&raw const value).cast(), len) == 0 }
}

/// Binds a kernel's socket to a port of the kernel's choice, and says which.
pub(crate) fn bind_any(fd: i32, is_v6: bool) -> Option<u16> {
    // SAFETY: plain numbers, for which zero is a value; a storage is large
    // enough for every address, and `len` says how much of it counts.
    unsafe {
        let mut place: libc::sockaddr_storage = std::mem::zeroed();
        let (family, len) = match is_v6 {
            true => (libc::AF_INET6, size_of::<libc::sockaddr_in6>()),
            false => (libc::AF_INET, size_of::<libc::sockaddr_in>()),
        };
        place.ss_family = family as u16;
        let address: *mut libc::sockaddr = (&raw mut place).cast();
        let mut len = len as socklen_t;
        let bound =
            real::bind(fd, address, len) == 0 && real::getsockname(fd, address, &mut len) == 0;
        // The port stands at the same place in both.
        bound.then(|| u16::from_be((*address.cast::<libc::sockaddr_in>()).sin_port))
    }
}

/// What a kernel's socket is: its protocol, and whether it is IPv6. `None` for
/// all that is neither TCP nor UDP.
pub(crate) fn kind(fd: i32) -> Option<(Protocol, bool)> {
    let is_v6 = match number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)? {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return None,
    };
    let protocol = match number(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL)? {
        libc::IPPROTO_TCP => Protocol::Tcp,
        libc::IPPROTO_UDP => Protocol::Udp,
        _ => return None,
    };
    Some((protocol, is_v6))
}

/// What the kernel calls a socket of its own, and no other one ever.
pub(crate) fn cookie(fd: i32) -> Option<u64> {
    let mut value = 0u64;
    let mut len = size_of::<u64>() as socklen_t;
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value is as long as `len` says.
    let result =
        unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, place, &mut len) };
    (result == 0).then_some(value)
}

/// A time of a kernel's socket; zero is none.
fn time(fd: i32, name: c_int) -> Duration {
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as socklen_t;
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value is as long as `len` says.
    let result = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, place, &mut len) };
    match result {
        0 => Duration::new(
            value.tv_sec.max(0) as u64,
            value.tv_usec.clamp(0, 999_999) as u32 * 1_000,
        ),
        _ => Duration::ZERO,
    }
}

/// Whether closing breaks a connection off.
fn is_abrupt(fd: i32) -> bool {
    let mut value = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut len = size_of::<libc::linger>() as socklen_t;
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value is as long as `len` says.
    unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, place, &mut len) };
    value.l_onoff != 0 && value.l_linger == 0
}

/// The buffer sizes that the kernel gives a new socket of this kind.
fn default_buffer(protocol: Protocol, name: c_int) -> Option<c_int> {
    static DEFAULTS: [OnceLock<Option<c_int>>; 4] = [const { OnceLock::new() }; 4];
    let at = usize::from(protocol == Protocol::Udp) * 2 + usize::from(name == libc::SO_SNDBUF);
    *DEFAULTS[at].get_or_init(|| {
        let kind = if protocol == Protocol::Tcp { libc::SOCK_STREAM } else { libc::SOCK_DGRAM };
        // SAFETY: makes a socket of its own, and closes it.
        unsafe {
            let fd = real::socket(libc::AF_INET, kind | libc::SOCK_CLOEXEC, 0);
            let value = number(fd, libc::SOL_SOCKET, name);
            real::close(fd);
            value
        }
    })
}

/// A buffer size that the program has chosen. The kernel doubles what it is
/// given.
fn buffer(fd: i32, protocol: Protocol, name: c_int) -> Option<u32> {
    let value = number(fd, libc::SOL_SOCKET, name)?;
    let is_chosen = default_buffer(protocol, name) != Some(value);
    u32::try_from(value / 2).ok().filter(|_| is_chosen)
}

fn traffic_class(fd: i32, is_v6: bool) -> u8 {
    let value = match is_v6 {
        true => number(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        false => number(fd, libc::IPPROTO_IP, libc::IP_TOS),
    };
    value.unwrap_or(0) as u8
}

/// The hop limit, if the program has chosen one.
fn hop_limit(fd: i32, is_v6: bool) -> Option<u8> {
    let value = match is_v6 {
        true => number(fd, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
        false => number(fd, libc::IPPROTO_IP, libc::IP_TTL),
    };
    value.and_then(|value| u8::try_from(value).ok()).filter(|&value| value != 64 && value != 0)
}

fn keepalive(fd: i32) -> Option<Keepalive> {
    let tcp =
        |name| number(fd, libc::IPPROTO_TCP, name).and_then(|value| u32::try_from(value).ok());
    if number(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)? == 0 {
        return None;
    }
    let own = Keepalive::default();
    let ms = |seconds: Option<u32>, other: u32| seconds.map_or(other, |s| s.saturating_mul(1_000));
    Some(Keepalive {
        idle_ms: ms(tcp(libc::TCP_KEEPIDLE), own.idle_ms),
        interval_ms: ms(tcp(libc::TCP_KEEPINTVL), own.interval_ms),
        probes: tcp(libc::TCP_KEEPCNT).and_then(|n| n.try_into().ok()).unwrap_or(own.probes),
    })
}

fn congestion_control(fd: i32) -> CongestionControl {
    let mut name = [0u8; 16];
    let mut len = name.len() as socklen_t;
    let place = name.as_mut_ptr().cast();
    // SAFETY: the name is as long as `len` says.
    unsafe { real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, place, &mut len) };
    match name.starts_with(b"reno") {
        true => CongestionControl::NewReno,
        false => CongestionControl::Cubic,
    }
}

/// Whether a socket takes both families.
pub(crate) fn is_dual(fd: i32, is_v6: bool) -> bool {
    is_v6 && number(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Some(0)
}

/// The options of a kernel's TCP socket, as Tidegate has them.
pub(crate) fn of_tcp(fd: i32, is_v6: bool) -> TcpOptions {
    let own = TcpOptions::default();
    let is_on = |level, name| number(fd, level, name).is_some_and(|value| value != 0);
    let user_timeout = number(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);
    TcpOptions {
        send_buffer_bytes: buffer(fd, Protocol::Tcp, libc::SO_SNDBUF)
            .unwrap_or(own.send_buffer_bytes),
        receive_buffer_bytes: buffer(fd, Protocol::Tcp, libc::SO_RCVBUF)
            .unwrap_or(own.receive_buffer_bytes),
        no_delay: is_on(libc::IPPROTO_TCP, libc::TCP_NODELAY),
        dual_stack: is_dual(fd, is_v6),
        reuse_port: is_on(libc::SOL_SOCKET, libc::SO_REUSEPORT),
        congestion_control: congestion_control(fd),
        hop_limit: hop_limit(fd, is_v6),
        traffic_class: traffic_class(fd, is_v6),
        keepalive: keepalive(fd),
        user_timeout_ms: user_timeout.and_then(|ms| u32::try_from(ms).ok()).filter(|&ms| ms > 0),
        ..own
    }
}

/// The options of a kernel's UDP socket, as Tidegate has them.
pub(crate) fn of_udp(fd: i32, is_v6: bool) -> UdpOptions {
    UdpOptions {
        dual_stack: is_dual(fd, is_v6),
        reuse_address: number(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR) == Some(1),
        reuse_port: number(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT) == Some(1),
        hop_limit: hop_limit(fd, is_v6),
        traffic_class: traffic_class(fd, is_v6),
        ..UdpOptions::default()
    }
}

/// The options that a listener hands down to its connections, and that a new
/// socket does not have by itself.
pub(crate) fn inherited(fd: i32) -> Vec<Setting> {
    let names = [
        (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    ];
    let chosen = names.into_iter().filter_map(|(level, name)| {
        let value = number(fd, level, name).filter(|&value| value != 0)?;
        Some(Setting { level, name, value: value.to_ne_bytes().into() })
    });
    chosen.collect()
}

/// Gives the kernel's socket of a connection what its listener hands down.
pub(crate) fn inherit(fd: i32, settings: &[Setting]) {
    settings.iter().for_each(|setting| set(fd, setting));
}

/// Carries over what a socket that moves has besides the options of its
/// protocol.
pub(crate) fn adopt(fd: i32, socket: &Socket) {
    // SAFETY: asks for flags.
    let flags = unsafe { real::fcntl64(fd, libc::F_GETFL, 0) };
    socket.set_nonblocking(flags != -1 && flags & libc::O_NONBLOCK != 0);
    socket.receive_timeout.set(time(fd, libc::SO_RCVTIMEO));
    socket.send_timeout.set(time(fd, libc::SO_SNDTIMEO));
    match &socket.body {
        Body::Stream(stream) => stream.stream.set_abrupt(is_abrupt(fd)),
        Body::Udp(udp) => {
            let is_told = number(fd, libc::IPPROTO_IP, libc::IP_PKTINFO).is_some_and(|on| on != 0)
                || number(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO).is_some_and(|on| on != 0);
            udp.tells_destination.store(is_told, Ordering::Relaxed);
        }
        Body::Listener(_) => {}
    }
}

/// What comes of an option for Tidegate.
#[derive(Debug, PartialEq, Eq)]
enum Meaning {
    /// It is one of the protocol's: see [`of_tcp`].
    Protocol,
    /// It is one of [`adopt`].
    Adopted,
    /// `TCP_CORK`.
    Cork,
    /// The kernel's socket keeps it, and Tidegate behaves as if it were obeyed.
    Kept,
    /// Tidegate cannot do it.
    Unknown,
}

fn meaning(level: c_int, name: c_int) -> Meaning {
    match level {
        libc::SOL_SOCKET => match name {
            libc::SO_KEEPALIVE | libc::SO_RCVBUF | libc::SO_SNDBUF => Meaning::Protocol,
            libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_LINGER => Meaning::Adopted,
            libc::SO_REUSEADDR
            | libc::SO_REUSEPORT
            | libc::SO_PRIORITY
            | libc::SO_BROADCAST
            | libc::SO_OOBINLINE
            | libc::SO_BUSY_POLL
            | libc::SO_INCOMING_CPU
            | SO_ZEROCOPY => Meaning::Kept,
            _ => Meaning::Unknown,
        },
        libc::IPPROTO_TCP => match name {
            libc::TCP_NODELAY
            | libc::TCP_KEEPIDLE
            | libc::TCP_KEEPINTVL
            | libc::TCP_KEEPCNT
            | libc::TCP_USER_TIMEOUT
            | libc::TCP_CONGESTION => Meaning::Protocol,
            libc::TCP_CORK => Meaning::Cork,
            libc::TCP_QUICKACK
            | libc::TCP_DEFER_ACCEPT
            | libc::TCP_SYNCNT
            | libc::TCP_NOTSENT_LOWAT
            | libc::TCP_LINGER2
            | libc::TCP_MAXSEG => Meaning::Kept,
            _ => Meaning::Unknown,
        },
        libc::IPPROTO_IP => match name {
            libc::IP_TOS | libc::IP_TTL => Meaning::Protocol,
            libc::IP_PKTINFO => Meaning::Adopted,
            libc::IP_MTU_DISCOVER | libc::IP_FREEBIND | libc::IP_BIND_ADDRESS_NO_PORT => {
                Meaning::Kept
            }
            _ => Meaning::Unknown,
        },
        libc::IPPROTO_IPV6 => match name {
            libc::IPV6_TCLASS | libc::IPV6_UNICAST_HOPS => Meaning::Protocol,
            libc::IPV6_RECVPKTINFO => Meaning::Adopted,
            libc::IPV6_V6ONLY | libc::IPV6_MTU_DISCOVER => Meaning::Kept,
            _ => Meaning::Unknown,
        },
        _ => Meaning::Unknown,
    }
}

/// Whether Tidegate can do what an option asks for.
pub(crate) fn is_known(level: c_int, name: c_int) -> bool {
    meaning(level, name) != Meaning::Unknown
}

/// The name of an option for the log.
pub(crate) fn describe(level: c_int, name: c_int) -> String {
    let level = match level {
        libc::SOL_SOCKET => "SOL_SOCKET".into(),
        libc::IPPROTO_TCP => "IPPROTO_TCP".into(),
        libc::IPPROTO_UDP => "IPPROTO_UDP".into(),
        libc::IPPROTO_IP => "IPPROTO_IP".into(),
        libc::IPPROTO_IPV6 => "IPPROTO_IPV6".into(),
        other => format!("level {other}"),
    };
    format!("option {name} of {level}")
}

/// The kernel's socket has a new value of an option: Tidegate's gets it too.
///
/// # Errors
/// What Tidegate's socket says.
pub(crate) fn carry_over(fd: i32, socket: &Socket, level: c_int, name: c_int) -> io::Result<()> {
    match meaning(level, name) {
        Meaning::Adopted => adopt(fd, socket),
        Meaning::Cork => {
            if let Body::Stream(stream) = &socket.body {
                let value = number(fd, libc::IPPROTO_TCP, libc::TCP_CORK);
                stream.set_corked(socket, value.is_some_and(|value| value != 0));
            }
        }
        Meaning::Protocol => match &socket.body {
            Body::Stream(stream) => {
                let options = of_tcp(fd, socket.is_v6);
                stream.stream.set_options(|own| *own = options)?;
            }
            Body::Listener(listener) => {
                let mut settings =
                    listener.inherited.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *settings = inherited(fd);
            }
            Body::Udp(_) => log::say_once(&format!(
                "{} is not changed any more once a UDP socket is bound",
                describe(level, name)
            )),
        },
        Meaning::Kept | Meaning::Unknown => {}
    }
    Ok(())
}

/// The number that the kernel has for a state (`tcp_states.h`).
fn state_number(state: TcpState) -> u8 {
    match state {
        TcpState::Established => 1,
        TcpState::SynSent => 2,
        TcpState::SynReceived => 3,
        TcpState::FinWait1 => 4,
        TcpState::FinWait2 => 5,
        TcpState::TimeWait => 6,
        TcpState::Closed => 7,
        TcpState::CloseWait => 8,
        TcpState::LastAck => 9,
        TcpState::Closing => 11,
    }
}

/// A connection as `TCP_INFO` tells of it, as far as Tidegate knows.
pub(crate) fn tcp_info(info: &TcpInfo) -> [u8; size_of::<libc::tcp_info>()] {
    let us = |ns: u64| u32::try_from(ns / 1_000).unwrap_or(u32::MAX);
    let mss = u32::from(info.mss_bytes).max(1);
    // SAFETY: a plain struct of numbers.
    let mut told: libc::tcp_info = unsafe { std::mem::zeroed() };
    told.tcpi_state = state_number(info.state);
    told.tcpi_options =
        u8::from(info.timestamps) | u8::from(info.sack) << 1 | u8::from(info.ecn) << 3;
    told.tcpi_rto = us(info.rto_ns);
    told.tcpi_rtt = info.rtt_ns.map_or(0, us);
    told.tcpi_snd_mss = mss;
    told.tcpi_rcv_mss = mss;
    told.tcpi_advmss = mss;
    told.tcpi_pmtu = mss + 40;
    told.tcpi_snd_cwnd = info.cwnd_bytes / mss;
    told.tcpi_snd_ssthresh = info.ssthresh_bytes / mss;
    told.tcpi_unacked = info.unacknowledged_bytes.div_ceil(mss);
    told.tcpi_rcv_space = info.receive_window_bytes;
    // SAFETY: a struct of numbers without gaps that matter, as bytes.
    unsafe { std::mem::transmute(told) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_everybody_sets_is_known() {
        for (level, name) in [
            (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            (libc::SOL_SOCKET, libc::SO_LINGER),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY),
            (libc::IPPROTO_TCP, libc::TCP_CORK),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        ] {
            assert!(is_known(level, name), "{}", describe(level, name));
        }
        assert!(!is_known(libc::IPPROTO_TCP, libc::TCP_FASTOPEN));
        assert!(!is_known(libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP));
    }
}
