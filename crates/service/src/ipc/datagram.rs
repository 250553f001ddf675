//! Encoding of datagrams in a byte stream: header, payload, padding to 8 bytes.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{UdpErrorReport, UdpSendOptions};

use super::encoding::{ADDRESS_WORDS, address_from_words, address_to_words, ip_to_words};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 8 * WORDS;
const WORDS: usize = 2 + 2 * ADDRESS_WORDS;

/// Maximum payload in bytes: the limit of IPv6's payload length field.
pub const MAX_PAYLOAD_BYTES: usize = 65_535;

/// Header in front of a datagram's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramHeader {
    /// Bytes of payload that follow.
    pub len: usize,
    /// Sender or receiver of the datagram. `None` sends to the peer of a connected socket.
    pub remote: Option<SocketAddr>,
    /// Local address: the destination of a received datagram, the source of a sent datagram.
    pub local: Option<IpAddr>,
    /// Remaining hop limit or time to live of a received datagram, or that of a datagram to be sent.
    /// `None` selects that of the socket.
    pub hop_limit: Option<u8>,
    /// Traffic class byte. `None` selects that of the socket.
    pub traffic_class: Option<u8>,
    /// Time at which a received datagram was passed on, in nanoseconds of the system's monotonic
    /// clock.
    pub received_ns: u64,
    /// The record is a [`UdpErrorReport`].
    pub is_error_report: bool,
}

/// Bytes of a datagram in the stream: header, payload and padding.
pub fn record_bytes(len: usize) -> usize {
    HEADER_BYTES + len.next_multiple_of(8)
}

/// Offsets of the small fields in the first word, in bits.
const HOP_LIMIT_SHIFT: u32 = 32;
const TRAFFIC_CLASS_SHIFT: u32 = 40;
/// Bit of the first word that marks an error report.
const ERROR_REPORT: u64 = 1 << 57;
/// Distance of a small field from the bit that says whether it has a value.
const HAS_VALUE_SHIFT: u32 = 16;

/// Encodes a small field.
fn small_field(value: Option<u8>, shift: u32) -> u64 {
    value.map_or(0, |value| (1 << HAS_VALUE_SHIFT | u64::from(value)) << shift)
}

/// Decodes a small field.
fn small_value(word: u64, shift: u32) -> Option<u8> {
    let field = word >> shift;
    (field >> HAS_VALUE_SHIFT & 1 != 0).then_some(field as u8)
}

impl DatagramHeader {
    /// Header of a datagram to be sent.
    pub fn to_send(
        len: usize,
        remote: Option<SocketAddr>,
        options: impl Into<UdpSendOptions>,
    ) -> Self {
        let UdpSendOptions { from, hop_limit, traffic_class, .. } = options.into();
        Self { remote, local: from, hop_limit, traffic_class, ..Self::of_len(len) }
    }

    /// Header without fields.
    fn of_len(len: usize) -> Self {
        Self {
            len,
            remote: None,
            local: None,
            hop_limit: None,
            traffic_class: None,
            received_ns: 0,
            is_error_report: false,
        }
    }

    /// Header of an error report, whose payload follows. Type and code of the ICMP message have the
    /// fields of the hop limit and of the traffic class, the MTU that of the time.
    pub fn of_error_report(report: &UdpErrorReport) -> Self {
        Self {
            remote: Some(report.remote),
            local: Some(report.reporter),
            hop_limit: Some(report.icmp_type),
            traffic_class: Some(report.icmp_code),
            received_ns: report.mtu.into(),
            is_error_report: true,
            ..Self::of_len(report.payload.len())
        }
    }

    /// Error report with this header. `None` if fields are missing.
    pub fn to_error_report(self, payload: Box<[u8]>) -> Option<UdpErrorReport> {
        Some(UdpErrorReport {
            remote: self.remote?,
            reporter: self.local?,
            icmp_type: self.hop_limit?,
            icmp_code: self.traffic_class?,
            mtu: u32::try_from(self.received_ns).ok()?,
            payload,
        })
    }

    /// Options of a datagram to be sent.
    pub fn send_options(&self) -> UdpSendOptions {
        let options = UdpSendOptions::from(self.local);
        options.hop_limit(self.hop_limit).traffic_class(self.traffic_class)
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let local = self.local.map_or([0; ADDRESS_WORDS], ip_to_words);
        let first = self.len as u64
            | small_field(self.hop_limit, HOP_LIMIT_SHIFT)
            | small_field(self.traffic_class, TRAFFIC_CLASS_SHIFT)
            | if self.is_error_report { ERROR_REPORT } else { 0 };
        let words =
            [first, self.received_ns].into_iter().chain(address_to_words(self.remote)).chain(local);
        let mut bytes = [0; HEADER_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes a header. `None` if the bytes are not a valid header.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*from);
        }
        let [first, received_ns, a, b, c, d, e, f] = words;
        let len = Some(first as u32 as usize).filter(|&len| len <= MAX_PAYLOAD_BYTES)?;
        let remote = address_from_words([a, b, c])?;
        let local = address_from_words([d, e, f])?.map(|address| address.ip());
        let hop_limit = small_value(first, HOP_LIMIT_SHIFT);
        let traffic_class = small_value(first, TRAFFIC_CLASS_SHIFT);
        let is_error_report = first & ERROR_REPORT != 0;
        Some(Self { len, remote, local, hop_limit, traffic_class, received_ns, is_error_report })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips() {
        let remote = Some("192.0.2.1:53".parse().unwrap());
        let local = Some("2001:db8::1".parse().unwrap());
        for header in [
            DatagramHeader::to_send(0, None, None),
            DatagramHeader {
                hop_limit: Some(0),
                traffic_class: Some(0xff),
                received_ns: 5,
                ..DatagramHeader::to_send(MAX_PAYLOAD_BYTES, remote, local)
            },
        ] {
            assert_eq!(DatagramHeader::from_bytes(&header.to_bytes()), Some(header));
        }
        let report = UdpErrorReport {
            remote: "192.0.2.1:53".parse().unwrap(),
            reporter: "2001:db8::1".parse().unwrap(),
            icmp_type: 3,
            icmp_code: 255,
            mtu: u32::MAX,
            payload: vec![7; 9].into(),
        };
        let header = DatagramHeader::of_error_report(&report);
        assert_eq!(DatagramHeader::from_bytes(&header.to_bytes()), Some(header));
        assert_eq!(header.to_error_report(report.payload.clone()), Some(report));
        assert_eq!(DatagramHeader::of_len(0).to_error_report(Box::default()), None);
        let too_long = DatagramHeader::to_send(MAX_PAYLOAD_BYTES + 1, None, None);
        assert_eq!(DatagramHeader::from_bytes(&too_long.to_bytes()), None);
        assert_eq!(record_bytes(0), HEADER_BYTES);
        assert_eq!(record_bytes(9), HEADER_BYTES + 16);
    }
}
