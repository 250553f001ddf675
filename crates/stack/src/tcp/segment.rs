//! Segments as they come in and as they go out.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_wire::tcp::TcpFlags;
use tidegate_wire::{DropReason, TcpHeader};

use super::options::{OptionBytes, Options};
use super::seq::Seq;

/// Both ends of a connection. IPv4 addresses are kept as IPv4-mapped ones,
/// which never stand in packets, so that all are of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Ends {
    local: [u8; 16],
    remote: [u8; 16],
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
}

impl Ends {
    pub(crate) fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            local: octets(local.ip()),
            remote: octets(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
        }
    }

    /// Between IPv4 addresses. The ports are as they stand in a header of the
    /// peer's.
    #[inline(always)]
    pub(crate) fn v4(local: [u8; 4], remote: [u8; 4], ports: [u8; 4]) -> Self {
        let mapped = |[a, b, c, d]: [u8; 4]| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d];
        Self::v6(mapped(local), mapped(remote), ports)
    }

    /// As [`Ends::v4`].
    #[inline(always)]
    pub(crate) fn v6(local: [u8; 16], remote: [u8; 16], [a, b, c, d]: [u8; 4]) -> Self {
        let (local_port, remote_port) = (u16::from_be_bytes([c, d]), u16::from_be_bytes([a, b]));
        Self { local, remote, local_port, remote_port }
    }

    pub(crate) fn local(&self) -> SocketAddr {
        SocketAddr::new(ip(self.local), self.local_port)
    }

    pub(crate) fn remote(&self) -> SocketAddr {
        SocketAddr::new(self.remote_ip(), self.remote_port)
    }

    #[inline]
    pub(crate) fn local_ip(&self) -> IpAddr {
        ip(self.local)
    }

    #[inline]
    pub(crate) fn remote_ip(&self) -> IpAddr {
        ip(self.remote)
    }

    pub(crate) fn is_v4(&self) -> bool {
        self.remote[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    /// All of it, for a keyed function.
    pub(crate) fn to_bytes(self) -> [u8; 36] {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&self.local);
        bytes[16..32].copy_from_slice(&self.remote);
        bytes[32..34].copy_from_slice(&self.local_port.to_be_bytes());
        bytes[34..].copy_from_slice(&self.remote_port.to_be_bytes());
        bytes
    }

    /// The words for the hash of the tables.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 5] {
        let half = |bytes: &[u8; 16], at: usize| {
            bytes[at..].first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
        };
        let ports = u64::from(self.local_port) << 16 | u64::from(self.remote_port);
        [
            half(&self.local, 0),
            half(&self.local, 8),
            half(&self.remote, 0),
            half(&self.remote, 8),
            ports,
        ]
    }
}

#[inline]
fn ip(octets: [u8; 16]) -> IpAddr {
    match octets {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => IpAddr::from([a, b, c, d]),
        octets => Ipv6Addr::from(octets).into(),
    }
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// A segment that came in, parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    pub(crate) seq: Seq,
    /// Counts only with [`TcpFlags::ACK`].
    pub(crate) ack: Seq,
    pub(crate) flags: TcpFlags,
    /// As it stands in the header, not scaled.
    pub(crate) window: u16,
    pub(crate) options: Options<'a>,
    pub(crate) payload: &'a [u8],
    /// The IP header said that congestion was met (RFC 3168).
    pub(crate) congestion_experienced: bool,
}

impl<'a> Segment<'a> {
    /// Takes a parsed header apart.
    ///
    /// # Errors
    /// [`DropReason::TcpOptions`].
    pub(crate) fn new(
        header: &TcpHeader,
        bytes: &'a [u8],
        payload: &'a [u8],
        traffic_class: u8,
    ) -> Result<Self, DropReason> {
        Ok(Self {
            seq: Seq(header.sequence),
            ack: Seq(header.acknowledgement),
            flags: header.flags,
            window: header.window,
            options: Options::parse(header.options(bytes))?,
            payload,
            congestion_experienced: traffic_class & 3 == 3,
        })
    }

    #[inline]
    pub(crate) fn is_syn(&self) -> bool {
        self.flags.contains(TcpFlags::SYN)
    }

    #[inline]
    pub(crate) fn is_fin(&self) -> bool {
        self.flags.contains(TcpFlags::FIN)
    }

    #[inline]
    pub(crate) fn is_rst(&self) -> bool {
        self.flags.contains(TcpFlags::RST)
    }

    #[inline]
    pub(crate) fn is_ack(&self) -> bool {
        self.flags.contains(TcpFlags::ACK)
    }

    /// Sequence numbers that it takes (SEG.LEN of RFC 9293 section 3.4).
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.payload.len() as u32 + u32::from(self.is_syn()) + u32::from(self.is_fin())
    }

    /// The number behind its last.
    #[inline]
    pub(crate) fn end(&self) -> Seq {
        self.seq + self.len()
    }

    /// The answer to a segment that is for no connection (RFC 9293 section
    /// 3.10.7.1); a reset is not answered.
    pub(crate) fn reset(&self, ends: Ends) -> Option<Out> {
        if self.is_rst() {
            return None;
        }
        let mut out = Out::bare(ends, TcpFlags::RST);
        if self.is_ack() {
            out.seq = self.ack;
        } else {
            out.flags = TcpFlags::RST | TcpFlags::ACK;
            out.ack = self.end();
        }
        Some(out)
    }
}

/// A segment that is to go out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out {
    pub(crate) ends: Ends,
    pub(crate) seq: Seq,
    pub(crate) ack: Seq,
    pub(crate) flags: TcpFlags,
    pub(crate) window: u16,
    pub(crate) options: OptionBytes,
    /// Where its payload is in the connection's queue, and how much.
    pub(crate) data_at: u32,
    pub(crate) data_bytes: u16,
    /// The IP header says that we understand congestion marks (RFC 3168).
    pub(crate) ecn_capable: bool,
}

impl Out {
    /// A segment without data, window or options.
    pub(crate) fn bare(ends: Ends, flags: TcpFlags) -> Self {
        Self {
            ends,
            seq: Seq(0),
            ack: Seq(0),
            flags,
            window: 0,
            options: OptionBytes::new(),
            data_at: 0,
            data_bytes: 0,
            ecn_capable: false,
        }
    }

    /// Writes the header in front of the data, with this in the place of the
    /// checksum.
    #[inline(always)]
    pub(crate) fn emit(&self, segment: &mut [u8], checksum: u16) {
        let options = self.options.as_bytes();
        let header_bytes = TcpHeader::BYTES + options.len();
        let header = TcpHeader {
            source_port: self.ends.local_port,
            destination_port: self.ends.remote_port,
            sequence: self.seq.0,
            acknowledgement: self.ack.0,
            header_bytes: header_bytes as u8,
            flags: self.flags,
            window: self.window,
            checksum,
            urgent_pointer: 0,
        };
        if let Some(place) = segment.get_mut(TcpHeader::BYTES..header_bytes) {
            place.copy_from_slice(options);
        }
        let written = header.emit(segment).is_some();
        debug_assert!(written, "a frame for sending has headroom");
    }
}
