//! `getsockopt` and `setsockopt`.

use tidegate_stack::{CongestionControl, Keepalive, TcpInfo, TcpState};

use crate::calls::Outcome;
use crate::errno::{self, Errno};
use crate::host::{Endpoint, Socket, VirtualHost};
use crate::profile::System;

const TCP_CC_INFO: i32 = 26;
const SO_MEMINFO: i32 = 55;
/// State number of a listener in the kernel's `tcp_info`.
const LISTEN: u8 = 10;

fn integer(value: &[u8]) -> Result<i32, Errno> {
    value.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)).ok_or(libc::EINVAL)
}

fn keepalive(socket: &mut Socket, change: impl FnOnce(Keepalive) -> Keepalive) {
    socket.options.keepalive = socket.options.keepalive.map(change);
}

/// State numbers of the kernel's `tcp_info`.
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

/// The kernel's `tcp_info` with the fields that the stack knows.
fn tcp_info_bytes(info: &TcpInfo) -> Vec<u8> {
    // Newer kernels have more fields.
    let mut bytes = vec![0; 512];
    bytes[0] = state_number(info.state);
    let scales = info.send_window_shift > 0 || info.receive_window_shift > 0;
    bytes[5] = u8::from(info.timestamps)
        | u8::from(info.sack) << 1
        | u8::from(scales) << 2
        | u8::from(info.ecn) << 3;
    let mss = u32::from(info.mss_bytes).max(1);
    let fields = [
        (8, (info.rto_ns / 1000) as u32),
        (16, mss),
        (24, info.unacknowledged_bytes.div_ceil(mss)),
        (68, (info.rtt_ns.unwrap_or(0) / 1000) as u32),
        (76, (info.ssthresh_bytes / mss).min(i32::MAX as u32)),
        (80, info.cwnd_bytes / mss),
        (84, mss),
    ];
    for (at, value) in fields {
        bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    bytes
}

impl VirtualHost {
    /// `setsockopt`.
    pub fn set_option(&mut self, fd: i32, level: i32, name: i32, value: &[u8]) -> Outcome {
        let is_linux = self.profile.system == System::Linux;
        let defaults = self.profile.keepalive();
        let socket = self.socket(fd)?;
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = integer(value.get(4..).unwrap_or(&[]))?;
                socket.resets_on_close = integer(value)? != 0 && seconds == 0;
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                let factor = if is_linux { 2 } else { 1 };
                let bytes = integer(value)?.max(0) as u32 * factor;
                match socket.receive_buffer {
                    Some(_) => socket.receive_buffer = Some(bytes),
                    None => socket.options.receive_buffer_bytes = bytes,
                }
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                let factor = if is_linux { 2 } else { 1 };
                socket.options.send_buffer_bytes = integer(value)?.max(0) as u32 * factor;
            }
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => {
                let is_on = integer(value)? != 0;
                socket.options.keepalive = is_on.then_some(defaults);
            }
            (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_DEBUG) => {}
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => {
                socket.options.no_delay = integer(value)? != 0;
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                let ms = positive(value)?.saturating_mul(1000);
                keepalive(socket, |parameters| parameters.idle_ms(ms));
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => {
                let ms = positive(value)?.saturating_mul(1000);
                keepalive(socket, |parameters| parameters.interval_ms(ms));
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => {
                let probes = positive(value)?.min(255) as u8;
                keepalive(socket, |parameters| parameters.probes(probes));
            }
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => {
                let ms = u32::try_from(integer(value)?).map_err(|_| libc::EINVAL)?;
                socket.options.user_timeout_ms = (ms > 0).then_some(ms);
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let text = value.split(|&byte| byte == 0).next().unwrap_or(value);
                socket.options.congestion_control = match text {
                    b"cubic" => CongestionControl::Cubic,
                    b"reno" | b"newreno" => CongestionControl::NewReno,
                    _ => return Err(libc::ENOENT),
                };
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                socket.options.traffic_class = integer(value)? as u8;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) => {
                socket.options.hop_limit = Some(integer(value)? as u8);
            }
            _ => return Err(libc::ENOPROTOOPT),
        }
        socket.stored.insert((level, name), value.to_vec());
        self.apply_options(fd)
    }

    fn apply_options(&mut self, fd: i32) -> Outcome {
        let socket = self.socket(fd)?;
        if let Endpoint::Connection(id) = socket.endpoint {
            let (options, now_ns) = (socket.options, self.now_ns);
            let _ = self.stack.tcp_set_options(now_ns, &mut self.arena, id, options);
            self.collect();
        }
        Ok(0)
    }

    /// `getsockopt`: the bytes of the value.
    pub fn option(&mut self, fd: i32, level: i32, name: i32) -> Result<Vec<u8>, Errno> {
        let keepalive = self.profile.keepalive();
        let socket = self.socket(fd)?.clone();
        let keepalive = socket.options.keepalive.unwrap_or(keepalive);
        let options = socket.options;
        let number = |value: u32| Ok(value.to_ne_bytes().to_vec());
        let connection = match socket.endpoint {
            Endpoint::Connection(id) => Some(id),
            Endpoint::Unconnected | Endpoint::Listener(_) => None,
        };
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let error = connection.and_then(|id| self.stack.tcp_take_error(id));
                let socket = self.socket(fd)?;
                socket.failed |= error.is_some();
                socket.connecting &= error.is_none();
                number(error.map_or(0, |error| errno::of(error) as u32))
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                number(socket.receive_buffer.unwrap_or(options.receive_buffer_bytes))
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => number(options.send_buffer_bytes),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => number(options.keepalive.is_some().into()),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => number(options.no_delay.into()),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => {
                number(options.user_timeout_ms.unwrap_or(0))
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => number(keepalive.idle_ms / 1000),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => number(keepalive.interval_ms / 1000),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => number(keepalive.probes.into()),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                let info = connection.and_then(|id| self.stack.tcp_info(id));
                number(info.map_or(536, |info| info.mss_bytes.into()))
            }
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let info = connection.and_then(|id| self.stack.tcp_info(id));
                let mut bytes = tcp_info_bytes(&info.unwrap_or(TcpInfo::unknown(TcpState::Closed)));
                if matches!(socket.endpoint, Endpoint::Listener(_)) {
                    bytes[0] = LISTEN;
                }
                Ok(bytes)
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let name = match options.congestion_control {
                    CongestionControl::Cubic => "cubic",
                    CongestionControl::NewReno => "reno",
                };
                let mut bytes = name.as_bytes().to_vec();
                bytes.resize(16, 0);
                Ok(bytes)
            }
            // packetdrill reads both before it runs the code of a script.
            (libc::IPPROTO_TCP, TCP_CC_INFO) => Ok(vec![0; 20]),
            (libc::SOL_SOCKET, SO_MEMINFO) => Ok(vec![0; 36]),
            _ => socket.stored.get(&(level, name)).cloned().ok_or(libc::ENOPROTOOPT),
        }
    }
}

fn positive(value: &[u8]) -> Result<u32, Errno> {
    integer(value)?.try_into().ok().filter(|&number| number > 0).ok_or(libc::EINVAL)
}
