//! Socket options.
//!
//! The kernel socket keeps, validates and reports all options. Options with a meaning on
//! Tidegate are read from the kernel socket and applied to the Tidegate socket.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{c_int, c_void, socklen_t};
use tidegate::{CongestionControl, Keepalive, TcpOptions, UdpOptions};
use tidegate_posix::control;

use super::{Endpoint, Socket};
use crate::real;
use crate::rules::Protocol;

/// `SO_ZEROCOPY`, which the `libc` crate does not define.
const SO_ZEROCOPY: c_int = 60;

/// Socket option with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SocketOption {
    level: c_int,
    name: c_int,
    value: Vec<u8>,
}

/// Reads an integer option of a kernel socket.
pub(crate) fn get_int(fd: i32, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the value has `len` bytes.
    let result = unsafe { real::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    (result == 0).then_some(value)
}

fn apply(fd: i32, option: &SocketOption) {
    let len = option.value.len() as socklen_t;
    // The kernel has accepted the same value for another socket.
    // SAFETY: the value has `len` bytes.
    unsafe {
        real::setsockopt(fd, option.level, option.name, option.value.as_ptr().cast(), len);
    }
}

/// Sets an integer option; true when the kernel accepts it.
pub(crate) fn set_int(fd: i32, level: c_int, name: c_int, value: c_int) -> bool {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the value has `len` bytes.
    unsafe { real::setsockopt(fd, level, name, (&raw const value).cast(), len) == 0 }
}

/// Binds a kernel socket to a port that the kernel chooses; returns the port.
pub(crate) fn bind_any_port(fd: i32, is_v6: bool) -> Option<u16> {
    // SAFETY: plain integers, for which zero is valid; `sockaddr_storage` is large enough for
    // every address, of which `len` bytes count.
    unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let (family, len) = match is_v6 {
            true => (libc::AF_INET6, size_of::<libc::sockaddr_in6>()),
            false => (libc::AF_INET, size_of::<libc::sockaddr_in>()),
        };
        storage.ss_family = family as u16;
        let address: *mut libc::sockaddr = (&raw mut storage).cast();
        let mut len = len as socklen_t;
        let bound =
            real::bind(fd, address, len) == 0 && real::getsockname(fd, address, &mut len) == 0;
        // The port has the same offset in both families.
        bound.then(|| u16::from_be((*address.cast::<libc::sockaddr_in>()).sin_port))
    }
}

/// Makes the kernel release the port of a TCP socket, unless the application chose the port: it does so
/// where a listener is disconnected.
pub(crate) fn release_unchosen_port(fd: i32) {
    let no_family = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    let len = size_of::<libc::sockaddr>() as socklen_t;
    // SAFETY: the address has `len` bytes.
    unsafe {
        if real::listen(fd, 0) == 0 {
            real::connect(fd, &raw const no_family, len);
        }
    }
}

/// Protocol of a kernel socket, and true for IPv6. `None` for sockets that are neither TCP nor
/// UDP.
pub(crate) fn protocol_and_family(fd: i32) -> Option<(Protocol, bool)> {
    let is_v6 = match get_int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)? {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return None,
    };
    let protocol = match get_int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL)? {
        libc::IPPROTO_TCP => Protocol::Tcp,
        libc::IPPROTO_UDP => Protocol::Udp,
        _ => return None,
    };
    Some((protocol, is_v6))
}

/// The kernel's cookie of a socket (`SO_COOKIE`), which no other socket ever gets.
pub(crate) fn cookie(fd: i32) -> Option<u64> {
    let mut value = 0u64;
    let mut len = size_of::<u64>() as socklen_t;
    let ptr: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value has `len` bytes.
    let result = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, ptr, &mut len) };
    (result == 0).then_some(value)
}

/// Timeout option of a kernel socket; zero is none.
fn timeout(fd: i32, name: c_int) -> Duration {
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>() as socklen_t;
    let ptr: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value has `len` bytes.
    let result = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, ptr, &mut len) };
    match result {
        0 => Duration::new(
            value.tv_sec.max(0) as u64,
            value.tv_usec.clamp(0, 999_999) as u32 * 1_000,
        ),
        _ => Duration::ZERO,
    }
}

/// Time for which closing waits (`SO_LINGER`), if it is set. With time 0 closing resets the
/// connection.
fn linger(fd: i32) -> Option<Duration> {
    let mut value = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut len = size_of::<libc::linger>() as socklen_t;
    let ptr: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value has `len` bytes.
    unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, ptr, &mut len) };
    (value.l_onoff != 0).then(|| Duration::from_secs(value.l_linger.max(0) as u64))
}

/// Default buffer size of a new kernel socket of this protocol (`SO_SNDBUF` or `SO_RCVBUF`).
fn default_buffer_bytes(protocol: Protocol, name: c_int) -> Option<c_int> {
    static DEFAULTS: [OnceLock<Option<c_int>>; 4] = [const { OnceLock::new() }; 4];
    let index = usize::from(protocol == Protocol::Udp) * 2 + usize::from(name == libc::SO_SNDBUF);
    *DEFAULTS[index].get_or_init(|| {
        let socket_type =
            if protocol == Protocol::Tcp { libc::SOCK_STREAM } else { libc::SOCK_DGRAM };
        // SAFETY: creates a socket and closes it.
        unsafe {
            let fd = real::socket(libc::AF_INET, socket_type | libc::SOCK_CLOEXEC, 0);
            let value = get_int(fd, libc::SOL_SOCKET, name);
            real::close(fd);
            value
        }
    })
}

/// True if the application has set this buffer size (`SO_SNDBUF` or `SO_RCVBUF`) of a TCP socket.
pub(crate) fn has_chosen_buffer_bytes(fd: i32, name: c_int) -> bool {
    chosen_buffer_bytes(fd, Protocol::Tcp, name).is_some()
}

/// Buffer size in bytes, if the application has set one. The kernel stores twice the value.
fn chosen_buffer_bytes(fd: i32, protocol: Protocol, name: c_int) -> Option<u32> {
    let value = get_int(fd, libc::SOL_SOCKET, name)?;
    let is_chosen = default_buffer_bytes(protocol, name) != Some(value);
    u32::try_from(value / 2).ok().filter(|_| is_chosen)
}

/// True when the application has forbidden to fragment datagrams (`IP_PMTUDISC_DO` and
/// `IP_PMTUDISC_PROBE`, which have the same numbers for IPv6).
fn dont_fragment(fd: i32, is_v6: bool) -> bool {
    let forbids = |mode| matches!(mode, Some(libc::IP_PMTUDISC_DO | libc::IP_PMTUDISC_PROBE));
    match is_v6 {
        true => {
            forbids(get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER))
                || get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG) == Some(1)
        }
        false => forbids(get_int(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)),
    }
}

fn traffic_class(fd: i32, is_v6: bool) -> u8 {
    let value = match is_v6 {
        true => get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        false => get_int(fd, libc::IPPROTO_IP, libc::IP_TOS),
    };
    value.unwrap_or(0) as u8
}

/// Hop limit, if the application has set one.
fn hop_limit(fd: i32, is_v6: bool) -> Option<u8> {
    let value = match is_v6 {
        true => get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
        false => get_int(fd, libc::IPPROTO_IP, libc::IP_TTL),
    };
    value.and_then(|value| u8::try_from(value).ok()).filter(|&value| value != 64 && value != 0)
}

fn keepalive(fd: i32) -> Option<Keepalive> {
    let tcp =
        |name| get_int(fd, libc::IPPROTO_TCP, name).and_then(|value| u32::try_from(value).ok());
    if get_int(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)? == 0 {
        return None;
    }
    let defaults = Keepalive::default();
    let ms = |seconds: Option<u32>, other: u32| seconds.map_or(other, |s| s.saturating_mul(1_000));
    let probes = tcp(libc::TCP_KEEPCNT).and_then(|n| n.try_into().ok());
    let keepalive = defaults
        .idle_ms(ms(tcp(libc::TCP_KEEPIDLE), defaults.idle_ms))
        .interval_ms(ms(tcp(libc::TCP_KEEPINTVL), defaults.interval_ms))
        .probes(probes.unwrap_or(defaults.probes));
    Some(keepalive)
}

fn congestion_control(fd: i32) -> CongestionControl {
    let mut name = [0u8; 16];
    let mut len = name.len() as socklen_t;
    let ptr = name.as_mut_ptr().cast();
    // SAFETY: the buffer of the name has `len` bytes.
    unsafe { real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, ptr, &mut len) };
    match name.starts_with(b"reno") {
        true => CongestionControl::NewReno,
        false => CongestionControl::Cubic,
    }
}

/// Maximum time in FIN-WAIT-2 after closing (`TCP_LINGER2`), if the application has set one.
fn fin_wait_2_ms(fd: i32) -> Option<u32> {
    /// The kernel's own limit (`tcp_fin_timeout`), in seconds.
    const DEFAULT_SECONDS: u32 = 60;
    let seconds = u32::try_from(get_int(fd, libc::IPPROTO_TCP, libc::TCP_LINGER2)?).ok()?;
    let is_chosen = seconds > 0 && seconds != DEFAULT_SECONDS;
    is_chosen.then(|| seconds.saturating_mul(1_000))
}

/// Time for which connections of a listener wait for data (`TCP_DEFER_ACCEPT`), in seconds.
fn defer_accept_s(fd: i32) -> Option<u16> {
    let seconds = get_int(fd, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT)?;
    Some(u16::try_from(seconds).unwrap_or(u16::MAX)).filter(|&seconds| seconds > 0)
}

/// True when an IPv6 socket accepts both families.
pub(crate) fn is_dual_stack(fd: i32, is_v6: bool) -> bool {
    is_v6 && get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Some(0)
}

/// Tidegate options of a kernel TCP socket.
pub(crate) fn tcp_options(fd: i32, is_v6: bool) -> TcpOptions {
    let mut options = TcpOptions::default();
    let is_on = |level, name| get_int(fd, level, name).is_some_and(|value| value != 0);
    // A buffer of a chosen size does not grow.
    if let Some(bytes) = chosen_buffer_bytes(fd, Protocol::Tcp, libc::SO_SNDBUF) {
        options = options.send_buffer_bytes(bytes);
    }
    if let Some(bytes) = chosen_buffer_bytes(fd, Protocol::Tcp, libc::SO_RCVBUF) {
        options = options.receive_buffer_bytes(bytes);
    }
    let user_timeout = get_int(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);
    options
        .no_delay(is_on(libc::IPPROTO_TCP, libc::TCP_NODELAY))
        .cork(is_on(libc::IPPROTO_TCP, libc::TCP_CORK))
        .dual_stack(is_dual_stack(fd, is_v6))
        .reuse_port(is_on(libc::SOL_SOCKET, libc::SO_REUSEPORT))
        .congestion_control(congestion_control(fd))
        .hop_limit(hop_limit(fd, is_v6))
        .traffic_class(traffic_class(fd, is_v6))
        .keepalive(keepalive(fd))
        .user_timeout_ms(user_timeout.and_then(|ms| u32::try_from(ms).ok()).filter(|&ms| ms > 0))
        .fin_wait_2_ms(fin_wait_2_ms(fd))
        .defer_accept_s(defer_accept_s(fd))
        .dont_fragment(
            get_int(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER) != Some(libc::IP_PMTUDISC_DONT),
        )
}

/// Tidegate options of a kernel UDP socket.
pub(crate) fn udp_options(fd: i32, is_v6: bool) -> UdpOptions {
    let receive_buffer_bytes = chosen_buffer_bytes(fd, Protocol::Udp, libc::SO_RCVBUF);
    UdpOptions::default()
        .dual_stack(is_dual_stack(fd, is_v6))
        .reuse_address(get_int(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR) == Some(1))
        .reuse_port(get_int(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT) == Some(1))
        .hop_limit(hop_limit(fd, is_v6))
        .traffic_class(traffic_class(fd, is_v6))
        .dont_fragment(dont_fragment(fd, is_v6))
        .report_errors(reports_errors(fd, is_v6))
        .queue_bytes(receive_buffer_bytes.map(|bytes| bytes as usize))
}

/// True if a kernel socket queues errors of its own family (`IP_RECVERR`).
fn reports_errors(fd: i32, is_v6: bool) -> bool {
    let (level, name) = match is_v6 {
        true => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        false => (libc::IPPROTO_IP, libc::IP_RECVERR),
    };
    get_int(fd, level, name) == Some(1)
}

/// Options that accepted connections inherit from a listener, if they differ from the defaults
/// of a new socket.
pub(crate) fn inheritable(fd: i32) -> Vec<SocketOption> {
    let names = [
        (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::SOL_SOCKET, SO_ZEROCOPY),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    ];
    let chosen = names.into_iter().filter_map(|(level, name)| {
        let value = get_int(fd, level, name).filter(|&value| value != 0)?;
        Some(SocketOption { level, name, value: value.to_ne_bytes().into() })
    });
    chosen.collect()
}

/// Sets inherited options on the kernel socket of an accepted connection.
pub(crate) fn apply_inherited(fd: i32, options: &[SocketOption]) {
    options.iter().for_each(|setting| apply(fd, setting));
}

/// Copies settings outside the protocol options to a socket that moves: flags, timeouts,
/// linger and requests of control messages.
pub(crate) fn copy_from_kernel(fd: i32, socket: &Socket) {
    // SAFETY: reads flags.
    let flags = unsafe { real::fcntl64(fd, libc::F_GETFL, 0) };
    socket.set_nonblocking(flags != -1 && flags & libc::O_NONBLOCK != 0);
    let is_v6_only = socket.is_v6 && !is_dual_stack(fd, socket.is_v6);
    socket.is_v6_only.store(is_v6_only, Ordering::Relaxed);
    socket.receive_timeout.set(timeout(fd, libc::SO_RCVTIMEO));
    socket.send_timeout.set(timeout(fd, libc::SO_SNDTIMEO));
    match &*socket.endpoint {
        Endpoint::Stream(stream) => {
            let linger = linger(fd);
            stream.stream.set_reset_on_close(linger == Some(Duration::ZERO));
            stream.linger.set(linger.unwrap_or(Duration::ZERO));
            let reports_left_bytes = get_int(fd, libc::IPPROTO_TCP, libc::TCP_INQ) == Some(1);
            stream.reports_left_bytes.store(reports_left_bytes, Ordering::Relaxed);
            stream.zero_copy.set(is_zero_copy(fd));
        }
        Endpoint::Udp(udp) => {
            let is_on = |level, name| get_int(fd, level, name).is_some_and(|value| value != 0);
            udp.control_requests.set(is_on);
            udp.set_dont_fragment(dont_fragment(fd, socket.is_v6));
            let segment_bytes = get_int(fd, libc::IPPROTO_UDP, libc::UDP_SEGMENT);
            udp.set_segment_bytes(segment_bytes.map_or(0, |bytes| bytes as u16));
            udp.zero_copy.set(is_zero_copy(fd));
        }
        Endpoint::Listener(listener) => {
            listener.passes_zero_copy.store(is_zero_copy(fd), Ordering::Relaxed);
            listener.set_inherited(inheritable(fd));
        }
    }
}

/// True if the application asks to be notified of data sent with `MSG_ZEROCOPY`.
fn is_zero_copy(fd: i32) -> bool {
    get_int(fd, libc::SOL_SOCKET, SO_ZEROCOPY) == Some(1)
}

/// Effect of an option on Tidegate.
#[derive(Debug, PartialEq, Eq)]
enum OptionEffect {
    /// Protocol option: see [`tcp_options`].
    Protocol,
    /// Copied by [`copy_from_kernel`].
    Copied,
    /// `TCP_CORK`.
    Cork,
    /// Stored by the kernel socket, without effect on Tidegate; setting it succeeds.
    KernelOnly,
    /// Not supported by Tidegate.
    Unsupported,
}

fn effect(level: c_int, name: c_int) -> OptionEffect {
    match level {
        _ if control::is_request(level, name) => OptionEffect::Copied,
        libc::SOL_SOCKET => match name {
            libc::SO_KEEPALIVE | libc::SO_RCVBUF | libc::SO_SNDBUF => OptionEffect::Protocol,
            libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_LINGER | SO_ZEROCOPY => {
                OptionEffect::Copied
            }
            libc::SO_REUSEADDR
            | libc::SO_REUSEPORT
            | libc::SO_PRIORITY
            | libc::SO_BROADCAST
            | libc::SO_BINDTODEVICE
            | libc::SO_OOBINLINE
            | libc::SO_BUSY_POLL
            | libc::SO_INCOMING_CPU => OptionEffect::KernelOnly,
            _ => OptionEffect::Unsupported,
        },
        libc::IPPROTO_TCP => match name {
            libc::TCP_NODELAY
            | libc::TCP_KEEPIDLE
            | libc::TCP_KEEPINTVL
            | libc::TCP_KEEPCNT
            | libc::TCP_USER_TIMEOUT
            | libc::TCP_LINGER2
            | libc::TCP_DEFER_ACCEPT
            | libc::TCP_CONGESTION => OptionEffect::Protocol,
            libc::TCP_INQ => OptionEffect::Copied,
            libc::TCP_CORK => OptionEffect::Cork,
            libc::TCP_QUICKACK | libc::TCP_SYNCNT | libc::TCP_NOTSENT_LOWAT | libc::TCP_MAXSEG => {
                OptionEffect::KernelOnly
            }
            _ => OptionEffect::Unsupported,
        },
        libc::IPPROTO_UDP if name == libc::UDP_SEGMENT => OptionEffect::Copied,
        libc::IPPROTO_IP => match name {
            libc::IP_TOS | libc::IP_TTL | libc::IP_MTU_DISCOVER | libc::IP_RECVERR => {
                OptionEffect::Protocol
            }
            libc::IP_FREEBIND | libc::IP_BIND_ADDRESS_NO_PORT => OptionEffect::KernelOnly,
            _ => OptionEffect::Unsupported,
        },
        libc::IPPROTO_IPV6 => match name {
            libc::IPV6_TCLASS
            | libc::IPV6_UNICAST_HOPS
            | libc::IPV6_MTU_DISCOVER
            | libc::IPV6_RECVERR
            | libc::IPV6_DONTFRAG => OptionEffect::Protocol,
            libc::IPV6_V6ONLY => OptionEffect::KernelOnly,
            _ => OptionEffect::Unsupported,
        },
        _ => OptionEffect::Unsupported,
    }
}

/// True when Tidegate supports an option.
pub(crate) fn is_supported(level: c_int, name: c_int) -> bool {
    effect(level, name) != OptionEffect::Unsupported
}

/// True for an option that would change which socket gets a datagram or a connection: the
/// application is told that it has no effect.
pub(crate) fn is_refused(level: c_int, name: c_int) -> bool {
    matches!(
        (level, name),
        (libc::IPPROTO_TCP, libc::TCP_FASTOPEN)
            | (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF | libc::SO_ATTACH_REUSEPORT_EBPF)
    )
}

/// Description of an option for the log.
pub(crate) fn describe(level: c_int, name: c_int) -> String {
    let known = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF) => Some("SO_ATTACH_REUSEPORT_CBPF"),
        (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF) => Some("SO_ATTACH_REUSEPORT_EBPF"),
        (libc::IPPROTO_TCP, libc::TCP_FASTOPEN) => Some("TCP_FASTOPEN"),
        _ => None,
    };
    if let Some(known) = known {
        return known.to_owned();
    }
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

/// Applies a new value of an option of the kernel socket to the Tidegate socket.
///
/// # Errors
/// As the Tidegate socket reports them.
pub(crate) fn apply_change(fd: i32, socket: &Socket, level: c_int, name: c_int) -> io::Result<()> {
    match effect(level, name) {
        OptionEffect::Copied => copy_from_kernel(fd, socket),
        OptionEffect::Cork => {
            if let Endpoint::Stream(stream) = &*socket.endpoint {
                let value = get_int(fd, libc::IPPROTO_TCP, libc::TCP_CORK);
                stream.set_corked(value.is_some_and(|value| value != 0));
            }
        }
        OptionEffect::Protocol => match &*socket.endpoint {
            Endpoint::Stream(stream) => {
                let options = tcp_options(fd, socket.is_v6).cork(stream.holds_partial());
                stream.stream.set_options(|own| *own = options)?;
            }
            Endpoint::Listener(listener) => {
                listener.set_inherited(inheritable(fd));
                listener.listener.set_options(tcp_options(fd, socket.is_v6))?;
            }
            Endpoint::Udp(udp) => {
                udp.set_dont_fragment(dont_fragment(fd, socket.is_v6));
                udp.socket.set_options(udp_options(fd, socket.is_v6))?;
            }
        },
        OptionEffect::KernelOnly | OptionEffect::Unsupported => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supports_common_options() {
        for (level, name) in [
            (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            (libc::SOL_SOCKET, libc::SO_LINGER),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY),
            (libc::IPPROTO_TCP, libc::TCP_CORK),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        ] {
            assert!(is_supported(level, name), "{}", describe(level, name));
        }
        assert!(!is_supported(libc::IPPROTO_TCP, libc::TCP_FASTOPEN));
        let by_bpf = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF);
        assert!(!is_supported(by_bpf.0, by_bpf.1) && is_refused(by_bpf.0, by_bpf.1));
        assert_eq!(describe(by_bpf.0, by_bpf.1), "SO_ATTACH_REUSEPORT_EBPF");
        assert!(!is_supported(libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP));
    }
}
