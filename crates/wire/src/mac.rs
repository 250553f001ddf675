//! Hardware addresses.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

/// Ethernet hardware address (EUI-48).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// All zeros: no address.
    pub const UNSPECIFIED: MacAddr = MacAddr([0; 6]);

    /// All ones: every station on the link.
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);

    /// Returns true for a group (multicast) address, including the broadcast address.
    #[inline]
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns true for the broadcast address.
    #[inline]
    pub const fn is_broadcast(self) -> bool {
        let [a, b, c, d, e, f] = self.0;
        a & b & c & d & e & f == 0xff
    }

    /// Returns true if a station may own this address: neither a group address nor zero.
    #[inline]
    pub const fn is_valid_unicast(self) -> bool {
        let [a, b, c, d, e, f] = self.0;
        !self.is_group() && a | b | c | d | e | f != 0
    }

    /// Returns the destination address of frames to an IPv4 multicast group (RFC 1112 section 6.4).
    pub const fn from_ipv4_group(group: Ipv4Addr) -> MacAddr {
        let [_, b, c, d] = group.octets();
        MacAddr([0x01, 0x00, 0x5e, b & 0x7f, c, d])
    }

    /// Returns the destination address of frames to an IPv6 multicast group (RFC 2464 section 7).
    pub const fn from_ipv6_group(group: Ipv6Addr) -> MacAddr {
        let [.., a, b, c, d] = group.octets();
        MacAddr([0x33, 0x33, a, b, c, d])
    }

    /// Returns the link-local IPv6 address derived from this hardware address (RFC 4291 appendix A,
    /// RFC 2464 section 5).
    pub const fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        let octets = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
        Ipv6Addr::from_bits(u128::from_be_bytes(octets))
    }
}

impl From<[u8; 6]> for MacAddr {
    fn from(octets: [u8; 6]) -> Self {
        MacAddr(octets)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error of parsing a hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseMacAddrError;

impl fmt::Display for ParseMacAddrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "not a hardware address: write six bytes in hexadecimal, like 02:00:5e:10:00:01",
        )
    }
}

impl core::error::Error for ParseMacAddrError {}

impl FromStr for MacAddr {
    type Err = ParseMacAddrError;

    /// Parses six bytes of two hexadecimal digits each, separated by `:` or by `-`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let separator = if text.contains('-') { '-' } else { ':' };
        let mut parts = text.split(separator);
        let mut octets = [0; 6];
        for octet in &mut octets {
            let part = parts.next().ok_or(ParseMacAddrError)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(ParseMacAddrError);
            }
            *octet = u8::from_str_radix(part, 16).map_err(|_| ParseMacAddrError)?;
        }
        if parts.next().is_some() {
            return Err(ParseMacAddrError);
        }
        Ok(MacAddr(octets))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString;

    use super::*;

    #[test]
    fn parses_its_own_output() {
        let mac = MacAddr([0x02, 0, 0x5e, 0x10, 0xab, 0xff]);
        assert_eq!(mac.to_string(), "02:00:5e:10:ab:ff");
        assert_eq!("02:00:5e:10:ab:ff".parse(), Ok(mac));
        assert_eq!("02-00-5E-10-AB-FF".parse(), Ok(mac));
    }

    #[test]
    fn rejects_invalid_text() {
        for text in [
            "",
            "02:00:5e:10:ab",
            "02:00:5e:10:ab:ff:00",
            "02:00:5e:10:ab:f",
            "+2:00:5e:10:ab:ff",
            "02:00:5e:10-ab:ff",
            "02005e10abff",
            "02:00:5e:10:ab:fg",
        ] {
            assert_eq!(text.parse::<MacAddr>(), Err(ParseMacAddrError), "{text}");
        }
    }

    #[test]
    fn distinguishes_unicast_from_group() {
        assert!(MacAddr([2, 0, 0, 0, 0, 1]).is_valid_unicast());
        for mac in [MacAddr::BROADCAST, MacAddr::UNSPECIFIED, MacAddr([1, 0, 0x5e, 0, 0, 1])] {
            assert!(!mac.is_valid_unicast(), "{mac}");
        }
        assert!(MacAddr::BROADCAST.is_broadcast() && MacAddr::BROADCAST.is_group());
        assert!(!MacAddr([0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]).is_broadcast());
    }

    #[test]
    fn maps_ip_groups_and_link_local_address() {
        // RFC 1112 section 6.4: the highest bit of the second byte is dropped.
        let group = MacAddr::from_ipv4_group(Ipv4Addr::new(224, 129, 2, 3));
        assert_eq!(group, MacAddr([0x01, 0x00, 0x5e, 0x01, 0x02, 0x03]));
        let group = MacAddr::from_ipv6_group("ff02::1:ff01:203".parse().unwrap());
        assert_eq!(group, MacAddr([0x33, 0x33, 0xff, 0x01, 0x02, 0x03]));
        // RFC 4291 appendix A.
        let mac = MacAddr([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
        assert_eq!(mac.link_local().to_string(), "fe80::3656:78ff:fe9a:bcde");
    }
}
