//! Control messages: those that an application requests with its datagrams, in the kernel's order,
//! and those that it passes with a datagram to send.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::c_int;
use tidegate::{DatagramMeta, UdpSendOptions};

use crate::arguments::ControlMessage;

/// Options that the `libc` crate does not define on every target: time stamps with 64-bit seconds.
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;

/// Options that request a control message, in the order of the messages.
const REQUESTS: [(c_int, c_int); 10] = [
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (libc::IPPROTO_IP, libc::IP_PKTINFO),
    (libc::IPPROTO_IP, libc::IP_RECVTTL),
    (libc::IPPROTO_IP, libc::IP_RECVTOS),
];

/// Bits of the first of [`REQUESTS`], which request the time of receiving.
const TIME_REQUESTS: u32 = 0b1111;

/// True for an option that requests a control message.
pub fn is_request(level: c_int, name: c_int) -> bool {
    REQUESTS.contains(&(level, name))
}

/// Requested control messages of a socket: a bit for each request.
#[derive(Default)]
pub struct ControlRequests(AtomicU32);

impl ControlRequests {
    /// Sets the requests; `is_on` reads an option of the kernel socket.
    pub fn set(&self, is_on: impl Fn(c_int, c_int) -> bool) {
        let bits = REQUESTS.iter().enumerate();
        let bits = bits.filter(|(_, (level, name))| is_on(*level, *name));
        self.0.store(bits.map(|(index, _)| 1 << index).sum(), Ordering::Relaxed);
    }

    /// True if the time of receiving is requested.
    pub fn include_time(&self) -> bool {
        self.0.load(Ordering::Relaxed) & TIME_REQUESTS != 0
    }

    /// Messages for a datagram. `interface_index` returns the number of the interface that has an
    /// address.
    pub fn messages(
        &self,
        datagram: &DatagramMeta,
        interface_index: impl Fn(IpAddr) -> u32,
    ) -> Vec<ControlMessage> {
        let bits = self.0.load(Ordering::Relaxed);
        let requested = REQUESTS.iter().enumerate().filter(|(index, _)| bits & 1 << index != 0);
        requested
            .filter_map(|(_, &(level, name))| message(level, name, datagram, &interface_index))
            .collect()
    }
}

/// Message that an option requests for a datagram, if the datagram has one.
fn message(
    level: c_int,
    name: c_int,
    datagram: &DatagramMeta,
    interface_index: &dyn Fn(IpAddr) -> u32,
) -> Option<ControlMessage> {
    let is_v4 = datagram.to.to_canonical().is_ipv4();
    let number = |value: Option<u8>| Some(c_int::from(value?).to_ne_bytes().to_vec());
    let (kind, data) = match (level, name) {
        (libc::SOL_SOCKET, _) => {
            let received = real_time(datagram.received_ns?);
            let fraction = match name {
                libc::SO_TIMESTAMP | SO_TIMESTAMP_NEW => received.subsec_micros(),
                _ => received.subsec_nanos(),
            };
            (name, [received.as_secs(), fraction.into()].map(u64::to_ne_bytes).concat())
        }
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO) => {
            let address = match datagram.to {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            let interface = interface_index(datagram.to).to_ne_bytes();
            (libc::IPV6_PKTINFO, [&address.octets()[..], &interface].concat())
        }
        (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT) if !is_v4 => {
            (libc::IPV6_HOPLIMIT, number(datagram.hop_limit)?)
        }
        (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS) if !is_v4 => {
            (libc::IPV6_TCLASS, number(datagram.traffic_class)?)
        }
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            let IpAddr::V4(address) = datagram.to.to_canonical() else { return None };
            let interface = interface_index(datagram.to).to_ne_bytes();
            (libc::IP_PKTINFO, [interface, address.octets(), address.octets()].concat())
        }
        (libc::IPPROTO_IP, libc::IP_RECVTTL) if is_v4 => {
            (libc::IP_TTL, number(datagram.hop_limit)?)
        }
        (libc::IPPROTO_IP, libc::IP_RECVTOS) if is_v4 => {
            (libc::IP_TOS, vec![datagram.traffic_class?])
        }
        _ => return None,
    };
    Some(ControlMessage { level, kind, data })
}

/// Options of one call that sends datagrams.
#[derive(Clone, Copy, Default)]
pub struct SendOptions {
    /// Header fields.
    pub fields: UdpSendOptions,
    /// Payload bytes of each datagram (`UDP_SEGMENT`); 0 is one datagram. `None` leaves the choice
    /// to the socket.
    pub segment_bytes: Option<u16>,
}

/// Applies a control message of a datagram to be sent, to IPv4 or IPv6.
///
/// # Errors
/// `EINVAL` for a value that the kernel refuses.
pub fn apply_to_sent(
    one: &ControlMessage,
    is_v4: bool,
    options: &mut SendOptions,
) -> io::Result<()> {
    let SendOptions { fields, segment_bytes } = options;
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let number = || one.data.first_chunk().map(|&bytes| c_int::from_ne_bytes(bytes));
    let byte = |number: c_int| u8::try_from(number).map_err(|_| invalid());
    // With -1 the socket's value counts.
    let byte_or_default = |number| if number == -1 { Ok(None) } else { byte(number).map(Some) };
    match (one.level, one.kind) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) if is_v4 => {
            let address = one.data.get(4..8).and_then(<[u8]>::first_chunk::<4>);
            let from = IpAddr::from(*address.ok_or_else(invalid)?);
            fields.from = Some(from).filter(|ip| !ip.is_unspecified());
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            let address = one.data.first_chunk::<16>();
            let from = IpAddr::from(*address.ok_or_else(invalid)?).to_canonical();
            fields.from = Some(from).filter(|ip| !ip.is_unspecified());
        }
        (libc::IPPROTO_IP, libc::IP_TTL) if is_v4 => {
            let hop_limit = byte(number().ok_or_else(invalid)?)?;
            fields.hop_limit = Some(hop_limit).filter(|&limit| limit > 0);
            fields.hop_limit.ok_or_else(invalid)?;
        }
        (libc::IPPROTO_IP, libc::IP_TOS) if is_v4 => {
            let class = match *one.data {
                [class] => Ok(class),
                _ => byte(number().ok_or_else(invalid)?),
            };
            fields.traffic_class = Some(class?);
        }
        (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) if !is_v4 => {
            fields.hop_limit = byte_or_default(number().ok_or_else(invalid)?)?;
        }
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if !is_v4 => {
            fields.traffic_class = byte_or_default(number().ok_or_else(invalid)?)?;
        }
        (libc::IPPROTO_UDP, libc::UDP_SEGMENT) => {
            let bytes: [u8; 2] = one.data[..].try_into().map_err(|_| invalid())?;
            *segment_bytes = Some(u16::from_ne_bytes(bytes));
        }
        (libc::IPPROTO_UDP, _) => return Err(invalid()),
        _ => {}
    }
    Ok(())
}

/// Time since 1970 of a time of the monotonic clock.
pub fn real_time(monotonic_ns: u64) -> Duration {
    let now = |clock| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes the time.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
    };
    let (real, monotonic) = (now(libc::CLOCK_REALTIME), now(libc::CLOCK_MONOTONIC));
    real.saturating_sub(monotonic.saturating_sub(Duration::from_nanos(monotonic_ns)))
}
