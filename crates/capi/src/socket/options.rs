//! Socket options. The values are checked and reported as by the kernel.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{c_int, linger, timeval};
use tidegate::{CongestionControl, TcpStream};
use tidegate_posix::{control, errno, tcp_info};

use super::settings::Settings;
use super::{AtomicTimeout, Endpoint, Protocol, Socket, os_error};

/// Smallest buffers that the kernel allows, as reported (`SOCK_MIN_SNDBUF`, `SOCK_MIN_RCVBUF`).
const MIN_SEND_BUFFER_BYTES: u32 = 4_608;
const MIN_RECEIVE_BUFFER_BYTES: u32 = 2_304;
/// Largest buffer, as reported.
const MAX_BUFFER_BYTES: u32 = 32 << 20;

/// Value of an option that is an integer: the kernel reads four bytes.
fn int(value: &[u8]) -> io::Result<c_int> {
    let bytes = value.first_chunk().ok_or_else(|| os_error(libc::EINVAL))?;
    Ok(c_int::from_ne_bytes(*bytes))
}

/// Value of an IP option that is an integer or one byte.
fn int_or_byte(value: &[u8]) -> io::Result<c_int> {
    match *value {
        [byte, ..] if value.len() < size_of::<c_int>() => Ok(byte.into()),
        _ => int(value),
    }
}

fn byte(number: c_int) -> io::Result<u8> {
    u8::try_from(number).map_err(|_| os_error(libc::EINVAL))
}

/// Seconds from 1 to `max`, as milliseconds.
fn seconds_as_ms(seconds: c_int, max: c_int) -> io::Result<u32> {
    match seconds {
        1.. if seconds <= max => Ok(seconds.unsigned_abs() * 1_000),
        _ => Err(os_error(libc::EINVAL)),
    }
}

/// Bytes of a C structure of integers.
fn struct_bytes<T: Copy>(value: T) -> Vec<u8> {
    // SAFETY: a plain structure of integers without padding.
    unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) }.to_vec()
}

/// C structure of integers from the bytes of an option.
fn read_struct<T: Copy>(value: &[u8]) -> io::Result<T> {
    if value.len() < size_of::<T>() {
        return Err(os_error(libc::EINVAL));
    }
    // SAFETY: a plain structure of integers, for which every value is valid; the length was checked.
    Ok(unsafe { value.as_ptr().cast::<T>().read_unaligned() })
}

fn set_timeout(timeout: &AtomicTimeout, value: &[u8]) -> io::Result<()> {
    let time: timeval = read_struct(value)?;
    if !(0..1_000_000).contains(&time.tv_usec) {
        return Err(os_error(libc::EDOM));
    }
    let seconds = Duration::from_secs(time.tv_sec.max(0).unsigned_abs());
    let time = seconds + Duration::from_micros(time.tv_usec.unsigned_abs());
    timeout.set((!time.is_zero()).then_some(time));
    Ok(())
}

fn timeout_bytes(timeout: &AtomicTimeout) -> Vec<u8> {
    let time = timeout.get().unwrap_or_default();
    let (tv_sec, tv_usec) = (time.as_secs() as i64, time.subsec_micros().into());
    struct_bytes(timeval { tv_sec, tv_usec })
}

fn buffer_bytes(value: &[u8], min: u32) -> io::Result<u32> {
    let wanted = int(value)?.clamp(0, c_int::MAX / 2).unsigned_abs();
    // The kernel doubles the value, for its own overhead.
    Ok((wanted * 2).clamp(min, MAX_BUFFER_BYTES) / 2)
}

impl Socket {
    /// Sets an option.
    ///
    /// # Errors
    /// As `setsockopt`.
    pub(crate) fn set_option(
        self: &Arc<Self>,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> io::Result<()> {
        match level {
            libc::SOL_SOCKET => self.set_socket_option(name, value)?,
            libc::IPPROTO_TCP if self.protocol == Protocol::Tcp => {
                self.set_tcp_option(name, value)?;
            }
            libc::IPPROTO_IP => self.set_ip_option(name, value)?,
            libc::IPPROTO_IPV6 if self.is_v6 => self.set_ipv6_option(name, value)?,
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        }
        self.apply_settings()
    }

    /// Applies the settings to the socket of the stack.
    fn apply_settings(&self) -> io::Result<()> {
        let settings = self.settings().clone();
        let tcp = settings.tcp_options(self.is_v6);
        match self.endpoint() {
            Some(Endpoint::Listener(listener)) => listener.set_options(tcp),
            Some(Endpoint::Stream(stream)) => {
                stream.set_reset_on_close(settings.resets_on_close());
                // An ended connection has no options, which is no error of the kernel's call.
                let _ = stream.set_options(|options| {
                    let cork = tcp.cork || self.more_follows.load(Ordering::Relaxed);
                    let (send, receive) = (options.send_buffer_bytes, options.receive_buffer_bytes);
                    let grown = (options.max_send_buffer_bytes, options.max_receive_buffer_bytes);
                    *options = tcp.cork(cork);
                    if settings.send_buffer_bytes.is_none() {
                        (options.send_buffer_bytes, options.max_send_buffer_bytes) =
                            (send, grown.0);
                    }
                    if settings.receive_buffer_bytes.is_none() {
                        (options.receive_buffer_bytes, options.max_receive_buffer_bytes) =
                            (receive, grown.1);
                    }
                });
                Ok(())
            }
            Some(Endpoint::Udp(udp)) => udp.set_options(settings.udp_options(self.is_v6)),
            None => Ok(()),
        }
    }

    fn set_socket_option(&self, name: c_int, value: &[u8]) -> io::Result<()> {
        match name {
            libc::SO_RCVTIMEO => return set_timeout(&self.receive_timeout, value),
            libc::SO_SNDTIMEO => return set_timeout(&self.send_timeout, value),
            libc::SO_LINGER => {
                let wanted: linger = read_struct(value)?;
                self.settings().linger =
                    linger { l_onoff: c_int::from(wanted.l_onoff != 0), ..wanted };
                return Ok(());
            }
            _ => {}
        }
        let number = int(value)?;
        let is_on = number != 0;
        let mut settings = self.settings();
        match name {
            libc::SO_REUSEADDR => settings.reuse_address = is_on,
            libc::SO_REUSEPORT => settings.reuse_port = is_on,
            libc::SO_BROADCAST => settings.broadcast = is_on,
            libc::SO_KEEPALIVE => settings.sends_keepalives = is_on,
            libc::SO_SNDBUF => {
                settings.send_buffer_bytes = Some(buffer_bytes(value, MIN_SEND_BUFFER_BYTES)?);
            }
            libc::SO_RCVBUF => {
                settings.receive_buffer_bytes =
                    Some(buffer_bytes(value, MIN_RECEIVE_BUFFER_BYTES)?);
            }
            // Accepted, without effect.
            libc::SO_OOBINLINE | libc::SO_PRIORITY | libc::SO_DONTROUTE => {}
            libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS => {
                self.set_request(&mut settings, (libc::SOL_SOCKET, name), number)?;
            }
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        }
        Ok(())
    }

    fn set_tcp_option(&self, name: c_int, value: &[u8]) -> io::Result<()> {
        let invalid = || os_error(libc::EINVAL);
        let mut settings = self.settings();
        if name == libc::TCP_CONGESTION {
            settings.congestion_control = match value.split(|&byte| byte == 0).next() {
                Some(b"cubic") => CongestionControl::Cubic,
                Some(b"reno") => CongestionControl::NewReno,
                _ => return Err(os_error(libc::ENOENT)),
            };
            return Ok(());
        }
        let number = int(value)?;
        match name {
            libc::TCP_NODELAY => settings.no_delay = number != 0,
            libc::TCP_CORK => settings.cork = number != 0,
            libc::TCP_KEEPIDLE => settings.keepalive.idle_ms = seconds_as_ms(number, 32_767)?,
            libc::TCP_KEEPINTVL => settings.keepalive.interval_ms = seconds_as_ms(number, 32_767)?,
            libc::TCP_KEEPCNT => match number {
                1..=127 => settings.keepalive.probes = byte(number)?,
                _ => return Err(invalid()),
            },
            libc::TCP_USER_TIMEOUT => {
                let ms = u32::try_from(number).map_err(|_| invalid())?;
                settings.user_timeout_ms = Some(ms).filter(|&ms| ms > 0);
            }
            libc::TCP_DEFER_ACCEPT => {
                let seconds = u16::try_from(number.max(0)).unwrap_or(u16::MAX);
                settings.defer_accept_s = Some(seconds).filter(|&seconds| seconds > 0);
            }
            // Accepted, without effect.
            libc::TCP_QUICKACK | libc::TCP_FASTOPEN => {}
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        }
        Ok(())
    }

    fn set_ip_option(&self, name: c_int, value: &[u8]) -> io::Result<()> {
        let number = int_or_byte(value)?;
        let mut settings = self.settings();
        match name {
            libc::IP_TTL => {
                settings.hop_limit = match number {
                    -1 => None,
                    1..=255 => Some(byte(number)?),
                    _ => return Err(os_error(libc::EINVAL)),
                };
            }
            libc::IP_TOS => settings.traffic_class = number as u8,
            libc::IP_MTU_DISCOVER => match number {
                libc::IP_PMTUDISC_DONT..=libc::IP_PMTUDISC_PROBE => {
                    settings.dont_fragment = number >= libc::IP_PMTUDISC_DO;
                }
                _ => return Err(os_error(libc::EINVAL)),
            },
            _ => self.set_request(&mut settings, (libc::IPPROTO_IP, name), number)?,
        }
        Ok(())
    }

    fn set_ipv6_option(&self, name: c_int, value: &[u8]) -> io::Result<()> {
        let number = int(value)?;
        let mut settings = self.settings();
        match name {
            libc::IPV6_V6ONLY => {
                // The kernel, too, allows this before the socket is bound only.
                if self.endpoint().is_some() || settings.bound.is_some() {
                    return Err(os_error(libc::EINVAL));
                }
                settings.v6_only = number != 0;
            }
            libc::IPV6_UNICAST_HOPS => {
                settings.hop_limit = match number {
                    -1 => None,
                    number => Some(byte(number)?),
                };
            }
            libc::IPV6_TCLASS => {
                settings.traffic_class = if number == -1 { 0 } else { byte(number)? };
            }
            _ => self.set_request(&mut settings, (libc::IPPROTO_IPV6, name), number)?,
        }
        Ok(())
    }

    /// Sets an option that requests a control message.
    fn set_request(
        &self,
        settings: &mut Settings,
        request: (c_int, c_int),
        number: c_int,
    ) -> io::Result<()> {
        if !control::is_request(request.0, request.1) {
            return Err(os_error(libc::ENOPROTOOPT));
        }
        settings.control_requests.retain(|other| *other != request);
        if number != 0 {
            settings.control_requests.push(request);
        }
        let all = &settings.control_requests;
        self.control_requests.set(|level, name| all.contains(&(level, name)));
        Ok(())
    }

    /// Value of an option, as bytes.
    ///
    /// # Errors
    /// As `getsockopt`.
    pub(crate) fn option(&self, level: c_int, name: c_int) -> io::Result<Vec<u8>> {
        let number = match level {
            libc::SOL_SOCKET => match name {
                libc::SO_RCVTIMEO => return Ok(timeout_bytes(&self.receive_timeout)),
                libc::SO_SNDTIMEO => return Ok(timeout_bytes(&self.send_timeout)),
                libc::SO_LINGER => return Ok(struct_bytes(self.settings().linger)),
                libc::SO_ERROR => self.take_error()?,
                _ => self.socket_option(name)?,
            },
            libc::IPPROTO_TCP if self.protocol == Protocol::Tcp => match name {
                libc::TCP_INFO => return Ok(self.tcp_info()),
                libc::TCP_CONGESTION => return Ok(self.congestion_control()),
                _ => self.tcp_option(name)?,
            },
            libc::IPPROTO_IP | libc::IPPROTO_IPV6 => self.ip_option(level, name)?,
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        };
        Ok(number.to_ne_bytes().to_vec())
    }

    fn socket_option(&self, name: c_int) -> io::Result<c_int> {
        let settings = self.settings().clone();
        let stream = || self.stream().and_then(|stream| stream.options().ok());
        let doubled = |bytes: u32| c_int::try_from(bytes.saturating_mul(2)).unwrap_or(c_int::MAX);
        let default_bytes = || settings.tcp_options(self.is_v6);
        Ok(match name {
            libc::SO_TYPE => match self.protocol {
                Protocol::Tcp => libc::SOCK_STREAM,
                Protocol::Udp => libc::SOCK_DGRAM,
            },
            libc::SO_PROTOCOL => match self.protocol {
                Protocol::Tcp => libc::IPPROTO_TCP,
                Protocol::Udp => libc::IPPROTO_UDP,
            },
            libc::SO_DOMAIN => match self.is_v6 {
                true => libc::AF_INET6,
                false => libc::AF_INET,
            },
            libc::SO_ACCEPTCONN => matches!(self.endpoint(), Some(Endpoint::Listener(_))).into(),
            libc::SO_REUSEADDR => settings.reuse_address.into(),
            libc::SO_REUSEPORT => settings.reuse_port.into(),
            libc::SO_BROADCAST => settings.broadcast.into(),
            libc::SO_KEEPALIVE => settings.sends_keepalives.into(),
            libc::SO_SNDBUF => {
                let chosen = settings.send_buffer_bytes;
                let bytes = chosen.or_else(|| stream().map(|options| options.send_buffer_bytes));
                doubled(bytes.unwrap_or_else(|| default_bytes().send_buffer_bytes))
            }
            libc::SO_RCVBUF => {
                let chosen = settings.receive_buffer_bytes;
                let bytes = chosen.or_else(|| stream().map(|options| options.receive_buffer_bytes));
                doubled(bytes.unwrap_or_else(|| default_bytes().receive_buffer_bytes))
            }
            libc::SO_OOBINLINE | libc::SO_PRIORITY | libc::SO_DONTROUTE => 0,
            libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS => {
                settings.control_requests.contains(&(libc::SOL_SOCKET, name)).into()
            }
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        })
    }

    fn tcp_option(&self, name: c_int) -> io::Result<c_int> {
        /// The kernel's value before a connection is established (`TCP_MSS_DEFAULT`).
        const DEFAULT_MSS_BYTES: c_int = 536;
        let settings = self.settings();
        Ok(match name {
            libc::TCP_NODELAY => settings.no_delay.into(),
            libc::TCP_CORK => settings.cork.into(),
            libc::TCP_KEEPIDLE => (settings.keepalive.idle_ms / 1_000) as c_int,
            libc::TCP_KEEPINTVL => (settings.keepalive.interval_ms / 1_000) as c_int,
            libc::TCP_KEEPCNT => settings.keepalive.probes.into(),
            libc::TCP_USER_TIMEOUT => settings.user_timeout_ms.unwrap_or(0) as c_int,
            libc::TCP_DEFER_ACCEPT => settings.defer_accept_s.unwrap_or(0).into(),
            libc::TCP_MAXSEG => {
                let info = self.stream().and_then(|stream| stream.info().ok());
                info.map_or(DEFAULT_MSS_BYTES, |info| info.mss_bytes.into())
            }
            libc::TCP_QUICKACK => 1,
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        })
    }

    fn ip_option(&self, level: c_int, name: c_int) -> io::Result<c_int> {
        const DEFAULT_HOP_LIMIT: c_int = 64;
        let settings = self.settings();
        if control::is_request(level, name) {
            return Ok(settings.control_requests.contains(&(level, name)).into());
        }
        let hop_limit = settings.hop_limit.map_or(DEFAULT_HOP_LIMIT, c_int::from);
        Ok(match (level, name) {
            (libc::IPPROTO_IP, libc::IP_TTL) => hop_limit,
            (libc::IPPROTO_IP, libc::IP_TOS) => settings.traffic_class.into(),
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER) => match settings.dont_fragment {
                true => libc::IP_PMTUDISC_DO,
                false => libc::IP_PMTUDISC_WANT,
            },
            (libc::IPPROTO_IPV6, _) if !self.is_v6 => return Err(os_error(libc::ENOPROTOOPT)),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => settings.v6_only.into(),
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) => hop_limit,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => settings.traffic_class.into(),
            _ => return Err(os_error(libc::ENOPROTOOPT)),
        })
    }

    fn tcp_info(&self) -> Vec<u8> {
        match self.endpoint() {
            Some(Endpoint::Listener(_)) => tcp_info::of_listener().to_vec(),
            _ => {
                let info = self.stream().and_then(|stream| stream.info().ok());
                let info =
                    info.unwrap_or_else(|| tidegate::TcpInfo::unknown(tidegate::TcpState::Closed));
                tcp_info::to_kernel(&info).to_vec()
            }
        }
    }

    fn congestion_control(&self) -> Vec<u8> {
        // The kernel returns a field of 16 bytes.
        let mut name = match self.settings().congestion_control {
            CongestionControl::Cubic => b"cubic".to_vec(),
            CongestionControl::NewReno => b"reno".to_vec(),
        };
        name.resize(16, 0);
        name
    }

    /// Error that waits, as a code; clears it.
    fn take_error(&self) -> io::Result<c_int> {
        let error = match self.endpoint() {
            Some(Endpoint::Stream(stream)) => self.take_stream_error(stream)?,
            Some(Endpoint::Udp(udp)) => udp.take_error()?,
            Some(Endpoint::Listener(_)) | None => None,
        };
        Ok(error.as_ref().map_or(0, errno::code))
    }

    /// Error of a connection; that of connecting tells the program the result.
    fn take_stream_error(&self, stream: &TcpStream) -> io::Result<Option<io::Error>> {
        if self.is_connecting.load(Ordering::Relaxed) {
            return match self.finish_connect(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Ok(Some(error)),
                // A further call of `connect` finds the connection established.
                Ok(()) => Ok(None),
            };
        }
        let error = stream.take_error()?;
        Ok(error.map(|error| tidegate_posix::unreachable::with_unreachable_reason(stream, error)))
    }
}
