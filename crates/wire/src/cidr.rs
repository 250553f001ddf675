//! Addresses with a prefix length.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

/// An address and the length of its network prefix: `192.0.2.7/24`.
///
/// The host bits are kept, so one value says both which address an interface
/// has and which network it is in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpCidr {
    address: IpAddr,
    prefix_bits: u8,
}

impl IpCidr {
    /// An address with a prefix of `prefix_bits` bits.
    ///
    /// # Errors
    /// When the prefix is longer than the address.
    pub const fn new(address: IpAddr, prefix_bits: u8) -> Result<Self, ParseIpCidrError> {
        if prefix_bits > Self::address_bits(address) {
            return Err(ParseIpCidrError::PrefixTooLong);
        }
        Ok(Self { address, prefix_bits })
    }

    /// One address alone: the prefix is all of it.
    pub const fn host(address: IpAddr) -> Self {
        Self { address, prefix_bits: Self::address_bits(address) }
    }

    const fn address_bits(address: IpAddr) -> u8 {
        match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        }
    }

    /// The address, host bits included.
    #[inline]
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// The length of the prefix in bits.
    #[inline]
    pub const fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// Whether `address` is in the network. An address of the other family
    /// never is.
    #[inline]
    pub const fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(other)) => {
                (ours.to_bits() ^ other.to_bits()) & mask_v4(self.prefix_bits) == 0
            }
            (IpAddr::V6(ours), IpAddr::V6(other)) => {
                (ours.to_bits() ^ other.to_bits()) & mask_v6(self.prefix_bits) == 0
            }
            _ => false,
        }
    }

    /// The network: the same prefix with the host bits cleared.
    pub const fn network(&self) -> IpCidr {
        let prefix_bits = self.prefix_bits;
        let address = match self.address {
            IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() & mask_v4(prefix_bits))),
            IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & mask_v6(prefix_bits))),
        };
        IpCidr { address, prefix_bits }
    }

    /// The broadcast address of an IPv4 network. `None` for IPv6 and for
    /// prefixes of 31 and 32 bits, which have none (RFC 3021).
    pub const fn broadcast(&self) -> Option<Ipv4Addr> {
        match self.address {
            IpAddr::V4(address) if self.prefix_bits < 31 => {
                Some(Ipv4Addr::from_bits(address.to_bits() | !mask_v4(self.prefix_bits)))
            }
            _ => None,
        }
    }
}

const fn mask_v4(prefix_bits: u8) -> u32 {
    match u32::MAX.checked_shl(32 - prefix_bits as u32) {
        Some(mask) => mask,
        None => 0,
    }
}

const fn mask_v6(prefix_bits: u8) -> u128 {
    match u128::MAX.checked_shl(128 - prefix_bits as u32) {
        Some(mask) => mask,
        None => 0,
    }
}

impl fmt::Display for IpCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

impl fmt::Debug for IpCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a text is no address with prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseIpCidrError {
    /// The part before the slash is no address.
    Address,
    /// The part after the slash is no number.
    Prefix,
    /// The prefix is longer than the address.
    PrefixTooLong,
}

impl fmt::Display for ParseIpCidrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "not an IP address: write one like 192.0.2.7/24 or 2001:db8::7/64",
            Self::Prefix => "not a prefix length: write a number after the slash, like /24",
            Self::PrefixTooLong => {
                "the prefix is longer than the address: at most /32 for IPv4 and /128 for IPv6"
            }
        })
    }
}

impl core::error::Error for ParseIpCidrError {}

impl FromStr for IpCidr {
    type Err = ParseIpCidrError;

    /// Reads `address/prefix`, or an address alone for the full prefix.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address = address.parse().map_err(|_| ParseIpCidrError::Address)?;
        let Some(prefix) = prefix else { return Ok(Self::host(address)) };
        // `u8::from_str` would take a leading plus.
        if !prefix.bytes().all(|b| b.is_ascii_digit()) {
            return Err(ParseIpCidrError::Prefix);
        }
        Self::new(address, prefix.parse().map_err(|_| ParseIpCidrError::Prefix)?)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString;

    use super::*;

    fn cidr(text: &str) -> IpCidr {
        text.parse().unwrap()
    }

    fn contains(network: &str, address: &str) -> bool {
        cidr(network).contains(address.parse().unwrap())
    }

    #[test]
    fn reads_what_it_writes() {
        for text in ["192.0.2.7/24", "0.0.0.0/0", "2001:db8::7/64", "::/0", "::1/128"] {
            assert_eq!(cidr(text).to_string(), text);
        }
        assert_eq!(cidr("192.0.2.7").to_string(), "192.0.2.7/32");
        assert_eq!(cidr("2001:db8::7").to_string(), "2001:db8::7/128");
    }

    #[test]
    fn says_which_part_of_the_text_is_wrong() {
        for (text, error) in [
            ("192.0.2/24", ParseIpCidrError::Address),
            ("/24", ParseIpCidrError::Address),
            ("192.0.2.1/", ParseIpCidrError::Prefix),
            ("192.0.2.1/+4", ParseIpCidrError::Prefix),
            ("192.0.2.1/256", ParseIpCidrError::Prefix),
            ("192.0.2.1/33", ParseIpCidrError::PrefixTooLong),
            ("2001:db8::/129", ParseIpCidrError::PrefixTooLong),
        ] {
            assert_eq!(text.parse::<IpCidr>(), Err(error), "{text}");
        }
    }

    #[test]
    fn contains_its_network_and_nothing_else() {
        assert!(contains("192.0.2.7/24", "192.0.2.255"));
        assert!(!contains("192.0.2.7/24", "192.0.3.0"));
        assert!(contains("0.0.0.0/0", "255.255.255.255"));
        assert!(contains("192.0.2.7/32", "192.0.2.7") && !contains("192.0.2.7/32", "192.0.2.6"));
        assert!(contains("2001:db8::7/64", "2001:db8::ffff:0:0:1"));
        assert!(!contains("2001:db8::7/64", "2001:db8:0:1::"));
        assert!(contains("::/0", "ffff::") && !contains("::/0", "192.0.2.1"));
        assert!(!contains("0.0.0.0/0", "::"));
        assert!(contains("::1/128", "::1") && !contains("::1/128", "::"));
    }

    #[test]
    fn knows_its_network_and_broadcast_address() {
        assert_eq!(cidr("192.0.2.7/25").network(), cidr("192.0.2.0/25"));
        assert_eq!(cidr("2001:db8::7/48").network(), cidr("2001:db8::/48"));
        assert_eq!(cidr("192.0.2.7/25").broadcast(), Some(Ipv4Addr::new(192, 0, 2, 127)));
        assert_eq!(cidr("0.0.0.0/0").broadcast(), Some(Ipv4Addr::BROADCAST));
        for text in ["192.0.2.7/31", "192.0.2.7/32", "2001:db8::/64"] {
            assert_eq!(cidr(text).broadcast(), None);
        }
    }
}
