//! Socket addresses as bytes of C structures.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::errno::Errno;

/// Parses a `sockaddr_in` or `sockaddr_in6`.
pub fn parse(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    let (&[a, b], rest) = bytes.split_first_chunk().ok_or(libc::EINVAL)?;
    let (&[high, low], rest) = rest.split_first_chunk().ok_or(libc::EINVAL)?;
    let port = u16::from_be_bytes([high, low]);
    let ip = match i32::from(u16::from_ne_bytes([a, b])) {
        libc::AF_INET => IpAddr::from(*rest.first_chunk::<4>().ok_or(libc::EINVAL)?),
        libc::AF_INET6 => {
            let address = rest.get(4..20).and_then(|bytes| bytes.first_chunk::<16>());
            IpAddr::from(Ipv6Addr::from(*address.ok_or(libc::EINVAL)?))
        }
        _ => return Err(libc::EAFNOSUPPORT),
    };
    Ok(SocketAddr::new(ip, port))
}

/// Bytes of the `sockaddr_in` or `sockaddr_in6` for `address`.
pub fn to_bytes(address: SocketAddr) -> Vec<u8> {
    let (family, length) = match address {
        SocketAddr::V4(_) => (libc::AF_INET, 16),
        SocketAddr::V6(_) => (libc::AF_INET6, 28),
    };
    let mut bytes = (family as u16).to_ne_bytes().to_vec();
    bytes.extend(address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => bytes.extend(ip.octets()),
        IpAddr::V6(ip) => {
            bytes.extend([0; 4]);
            bytes.extend(ip.octets());
        }
    }
    bytes.resize(length, 0);
    bytes
}
