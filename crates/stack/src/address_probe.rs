//! Settings and results of the probes of own addresses (RFC 5227, RFC 4862 section 5.4, RFC 4429).

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::str::FromStr;

use tidegate_wire::MacAddr;

/// Check of own addresses for uniqueness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressProbe {
    /// Not at all: addresses are announced and used at once.
    Off,
    /// By three probes within 140 ms. The address is used at once, and given up if another host
    /// claims it before 210 ms are over. IPv6 follows RFC 4429 meanwhile: what is sent overrides
    /// no entry in a neighbour's cache.
    #[default]
    Quick,
    /// As RFC 5227 and RFC 4862 say: IPv4 addresses are used after 4 to 7 s, IPv6 addresses after
    /// 1 to 2 s, if nobody claims them.
    Rfc,
}

impl AddressProbe {
    /// Name in configuration files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Quick => "quick",
            Self::Rfc => "rfc",
        }
    }
}

impl fmt::Display for AddressProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No way to check addresses has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAddressProbe(String);

impl fmt::Display for UnknownAddressProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no address probe: choose off, quick or rfc", self.0)
    }
}

impl std::error::Error for UnknownAddressProbe {}

impl FromStr for AddressProbe {
    type Err = UnknownAddressProbe;

    fn from_str(text: &str) -> Result<Self, UnknownAddressProbe> {
        let mut all = [Self::Off, Self::Quick, Self::Rfc].into_iter();
        all.find(|probe| probe.name() == text).ok_or_else(|| UnknownAddressProbe(text.to_owned()))
    }
}

/// Address of this interface that another host has claimed, and that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressConflict {
    /// The address.
    pub address: IpAddr,
    /// Hardware address of the other host.
    pub mac: MacAddr,
}

/// State of the own addresses of a stack on their link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnAddresses {
    /// Another host may still claim one, which is then given up.
    Probing,
    /// Nobody claimed any in time, or none was probed.
    Unique,
    /// Another host has claimed this one, which was given up.
    Taken(AddressConflict),
}

impl fmt::Display for AddressConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, mac } = self;
        write!(f, "the host with MAC address {mac} uses {address}, too: choose another address")
    }
}

impl From<AddressConflict> for io::Error {
    fn from(conflict: AddressConflict) -> Self {
        Self::new(io::ErrorKind::AddrInUse, conflict.to_string())
    }
}
