//! IP addresses with a prefix length.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

/// IP address with the length of its network prefix: `192.0.2.7/24`.
///
/// The host bits are kept, so one value holds both an interface's address and its network.
///
/// # Examples
/// ```
/// use tidegate_wire::IpCidr;
///
/// let cidr: IpCidr = "192.0.2.7/24".parse()?;
/// assert!(cidr.contains("192.0.2.255".parse().unwrap()));
/// assert_eq!(cidr.network(), "192.0.2.0/24".parse()?);
/// # Ok::<(), tidegate_wire::ParseIpCidrError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpCidr {
    address: IpAddr,
    prefix_bits: u8,
}

impl IpCidr {
    /// Creates an address with a prefix of `prefix_bits` bits.
    ///
    /// # Errors
    /// [`ParseIpCidrError::PrefixTooLong`] when the prefix is longer than the address.
    pub const fn new(address: IpAddr, prefix_bits: u8) -> Result<Self, ParseIpCidrError> {
        if prefix_bits > Self::address_bits(address) {
            return Err(ParseIpCidrError::PrefixTooLong);
        }
        Ok(Self { address, prefix_bits })
    }

    /// Creates a single-address network: /32 for IPv4, /128 for IPv6.
    pub const fn host(address: IpAddr) -> Self {
        Self { address, prefix_bits: Self::address_bits(address) }
    }

    const fn address_bits(address: IpAddr) -> u8 {
        match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        }
    }

    /// Returns the address with its host bits.
    #[inline]
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the prefix length in bits.
    #[inline]
    pub const fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// Returns true if `address` is in the network; always false for the other address family.
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

    /// Returns the network: the same prefix with the host bits cleared.
    pub const fn network(&self) -> IpCidr {
        let prefix_bits = self.prefix_bits;
        let address = match self.address {
            IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() & mask_v4(prefix_bits))),
            IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & mask_v6(prefix_bits))),
        };
        IpCidr { address, prefix_bits }
    }

    /// Returns the broadcast address of an IPv4 network. `None` for IPv6 and for IPv4 prefixes of
    /// 31 and 32 bits, which have no broadcast address (RFC 3021).
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

/// Error of parsing an address with a prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseIpCidrError {
    /// The part before the slash is not an IP address.
    Address,
    /// The part after the slash is not a number from 0 to 255.
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

    /// Parses `address/prefix`, or a bare address as a single-address network.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address = address.parse().map_err(|_| ParseIpCidrError::Address)?;
        let Some(prefix) = prefix else { return Ok(Self::host(address)) };
        // `u8::from_str` would accept a leading plus sign.
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
    fn parses_its_own_output() {
        for text in ["192.0.2.7/24", "0.0.0.0/0", "2001:db8::7/64", "::/0", "::1/128"] {
            assert_eq!(cidr(text).to_string(), text);
        }
        assert_eq!(cidr("192.0.2.7").to_string(), "192.0.2.7/32");
        assert_eq!(cidr("2001:db8::7").to_string(), "2001:db8::7/128");
    }

    #[test]
    fn error_names_the_invalid_part() {
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
    fn contains_only_addresses_of_its_network() {
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
    fn computes_network_and_broadcast_address() {
        assert_eq!(cidr("192.0.2.7/25").network(), cidr("192.0.2.0/25"));
        assert_eq!(cidr("2001:db8::7/48").network(), cidr("2001:db8::/48"));
        assert_eq!(cidr("192.0.2.7/25").broadcast(), Some(Ipv4Addr::new(192, 0, 2, 127)));
        assert_eq!(cidr("0.0.0.0/0").broadcast(), Some(Ipv4Addr::BROADCAST));
        for text in ["192.0.2.7/31", "192.0.2.7/32", "2001:db8::/64"] {
            assert_eq!(cidr(text).broadcast(), None);
        }
    }
}
