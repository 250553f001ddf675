//! Received and outgoing segments.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tidegate_wire::tcp::TcpFlags;
use tidegate_wire::{DropReason, TcpHeader};

use super::options::{OptionBytes, ParsedOptions, TIMESTAMPS_BYTES};
use super::seq::Seq;

/// Local and remote address and port of a connection. IPv4 addresses are stored as IPv4-mapped
/// IPv6 addresses, which never occur in packets, so that all addresses have one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct FourTuple {
    local: [u8; 16],
    remote: [u8; 16],
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
}

impl FourTuple {
    pub(crate) fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            local: octets(local.ip()),
            remote: octets(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
        }
    }

    /// Tuple of IPv4 addresses and ports. `ports` are the source and destination port bytes of a
    /// received header.
    #[inline(always)]
    pub(crate) fn v4(local: [u8; 4], remote: [u8; 4], ports: [u8; 4]) -> Self {
        let mapped = |[a, b, c, d]: [u8; 4]| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d];
        Self::v6(mapped(local), mapped(remote), ports)
    }

    /// As [`FourTuple::v4`], for IPv6.
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

    #[inline]
    pub(crate) fn is_v4(&self) -> bool {
        is_mapped(&self.remote)
    }

    /// Local and remote address.
    #[inline]
    pub(crate) fn addresses(&self) -> TupleAddresses {
        if self.is_v4() {
            let ([.., a, b, c, d], [.., e, f, g, h]) = (self.local, self.remote);
            return TupleAddresses::V4([a, b, c, d].into(), [e, f, g, h].into());
        }
        TupleAddresses::V6(self.local.into(), self.remote.into())
    }

    /// All fields as bytes, as input of a keyed hash.
    pub(crate) fn to_bytes(self) -> [u8; 36] {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&self.local);
        bytes[16..32].copy_from_slice(&self.remote);
        bytes[32..34].copy_from_slice(&self.local_port.to_be_bytes());
        bytes[34..].copy_from_slice(&self.remote_port.to_be_bytes());
        bytes
    }

    /// All fields as words, as input of the hash tables.
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

/// Local and remote address of a [`FourTuple`], which are of one family.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TupleAddresses {
    V4(Ipv4Addr, Ipv4Addr),
    V6(Ipv6Addr, Ipv6Addr),
}

/// True for an IPv4-mapped IPv6 address (RFC 4291 section 2.5.5.2). By words: this is asked several
/// times for each segment.
#[inline]
fn is_mapped(octets: &[u8; 16]) -> bool {
    let [prefix @ .., _, _, _, _, _, _, _, _] = *octets;
    let [.., a, b, c, d, _, _, _, _] = *octets;
    u64::from_ne_bytes(prefix) == 0
        && u32::from_ne_bytes([a, b, c, d]) == u32::from_ne_bytes([0, 0, 0xff, 0xff])
}

#[inline]
fn ip(octets: [u8; 16]) -> IpAddr {
    if is_mapped(&octets) {
        let [.., a, b, c, d] = octets;
        return IpAddr::from([a, b, c, d]);
    }
    Ipv6Addr::from(octets).into()
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Parsed received segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    pub(crate) seq: Seq,
    /// Acknowledgement number; valid only with [`TcpFlags::ACK`].
    pub(crate) ack: Seq,
    pub(crate) flags: TcpFlags,
    /// Window field of the header, not scaled.
    pub(crate) window: u16,
    pub(crate) options: ParsedOptions<'a>,
    pub(crate) payload: &'a [u8],
    /// True if the IP header carries a congestion mark (CE, RFC 3168).
    pub(crate) congestion_experienced: bool,
}

impl<'a> Segment<'a> {
    /// Creates a segment from a parsed header, the header bytes and the payload.
    ///
    /// # Errors
    /// [`DropReason::TcpOptions`] when the length of an option is impossible.
    #[inline(always)]
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
            options: ParsedOptions::parse(header.options(bytes))?,
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

    /// Length in sequence numbers, with SYN and FIN (SEG.LEN of RFC 9293 section 3.4).
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.payload.len() as u32 + u32::from(self.is_syn()) + u32::from(self.is_fin())
    }

    /// Sequence number after the last of the segment.
    #[inline]
    pub(crate) fn end(&self) -> Seq {
        self.seq + self.len()
    }

    /// Reset that answers a segment without a connection (RFC 9293 section 3.10.7.1); `None` if
    /// the segment is itself a reset.
    pub(crate) fn reset(&self, tuple: FourTuple) -> Option<OutSegment> {
        if self.is_rst() {
            return None;
        }
        let mut out = OutSegment::bare(tuple, TcpFlags::RST);
        if self.is_ack() {
            out.seq = self.ack;
        } else {
            out.flags = TcpFlags::RST | TcpFlags::ACK;
            out.ack = self.end();
        }
        Some(out)
    }
}

/// Segment to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutSegment {
    pub(crate) tuple: FourTuple,
    pub(crate) seq: Seq,
    pub(crate) ack: Seq,
    pub(crate) flags: TcpFlags,
    pub(crate) window: u16,
    pub(crate) options: OptionBytes,
    /// Offset of the payload in the send queue of the connection, and its length below.
    pub(crate) data_at: u32,
    pub(crate) data_bytes: u16,
    /// True if the IP header is to carry ECT(0) (RFC 3168).
    pub(crate) ecn_capable: bool,
}

impl OutSegment {
    /// Creates a segment without payload, window or options.
    pub(crate) fn bare(tuple: FourTuple, flags: TcpFlags) -> Self {
        Self {
            tuple,
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

    /// Writes the header in front of the payload. `checksum` goes into the checksum field.
    #[inline(always)]
    pub(crate) fn emit(&self, segment: &mut [u8], checksum: u16) {
        let options = self.options.as_bytes();
        let header_bytes = TcpHeader::BYTES + options.len();
        let header = TcpHeader {
            source_port: self.tuple.local_port,
            destination_port: self.tuple.remote_port,
            sequence: self.seq.0,
            acknowledgement: self.ack.0,
            header_bytes: header_bytes as u8,
            flags: self.flags,
            window: self.window,
            checksum,
            urgent_pointer: 0,
        };
        if let Some(space) = segment.get_mut(TcpHeader::BYTES..header_bytes) {
            space.copy_from_slice(options);
        }
        let written = header.emit(segment).is_some();
        debug_assert!(written, "a frame for sending has headroom");
    }
}

/// Header of a segment that ends with the last byte to be sent and carries time stamps as its only
/// option: of most messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataHeader {
    pub(crate) sequence: Seq,
    pub(crate) acknowledgement: Seq,
    pub(crate) window: u16,
    /// TSval and TSecr (RFC 7323 section 3).
    pub(crate) timestamps: (u32, u32),
}

impl DataHeader {
    /// Length in bytes, with the option.
    pub(crate) const BYTES: usize = TcpHeader::BYTES + TIMESTAMPS_BYTES;

    /// Writes the header, with a checksum field of zero.
    #[inline(always)]
    pub(crate) fn emit(&self, tuple: &FourTuple, header: &mut [u8; Self::BYTES]) {
        let ports = u32::from(tuple.local_port) << 16 | u32::from(tuple.remote_port);
        let flags = (TcpFlags::ACK | TcpFlags::PSH).0;
        let header_words = (Self::BYTES / 4) as u32;
        let lengths = header_words << 28 | u32::from(flags) << 16 | u32::from(self.window);
        let (value, echo) = self.timestamps;
        let option = u32::from_be_bytes([1, 1, 8, 10]);
        let (sequence, acknowledgement) = (self.sequence.0, self.acknowledgement.0);
        let words = [ports, sequence, acknowledgement, lengths, 0, option, value, echo];
        for (space, word) in header.as_chunks_mut().0.iter_mut().zip(words) {
            *space = word.to_be_bytes();
        }
    }

    /// Sets the checksum field of a written header.
    #[inline(always)]
    pub(crate) fn put_checksum(header: &mut [u8; Self::BYTES], checksum: u16) {
        [header[16], header[17]] = checksum.to_be_bytes();
    }
}
