//! Address families that a socket reaches.

use std::io;
use std::net::IpAddr;

/// Checks that an IPv6 or IPv4 socket, which may be bound to `local`, can send to `peer`.
///
/// # Errors
/// The kernel's: `EAFNOSUPPORT` for IPv6 on an IPv4 socket and on one that is bound to an IPv4
/// address; `ENETUNREACH` for IPv4 on a socket of IPv6 only (`IPV6_V6ONLY`) and on one that is
/// bound to an IPv6 address.
pub fn check_families(
    is_v6_socket: bool,
    is_v6_only: bool,
    local: IpAddr,
    peer: IpAddr,
) -> io::Result<()> {
    let (local, is_v6_peer) = (local.to_canonical(), peer.to_canonical().is_ipv6());
    let is_bound_to_v6 = local.is_ipv6() && !local.is_unspecified();
    let code = match is_v6_peer {
        true if !is_v6_socket || local.is_ipv4() => libc::EAFNOSUPPORT,
        false if is_v6_only || is_bound_to_v6 => libc::ENETUNREACH,
        _ => return Ok(()),
    };
    Err(io::Error::from_raw_os_error(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_reach_the_families_that_they_reach_at_the_kernel() {
        let check = |is_v6, is_v6_only, local: &str, peer: &str| {
            let (local, peer) = (local.parse().unwrap(), peer.parse().unwrap());
            check_families(is_v6, is_v6_only, local, peer).map_err(|error| error.raw_os_error())
        };
        for (is_v6, is_v6_only, local, peer, expected) in [
            (false, false, "0.0.0.0", "192.0.2.1", None),
            (false, false, "0.0.0.0", "2001:db8::1", Some(libc::EAFNOSUPPORT)),
            (true, false, "::", "2001:db8::1", None),
            (true, false, "::", "::ffff:192.0.2.1", None),
            (true, true, "::", "::ffff:192.0.2.1", Some(libc::ENETUNREACH)),
            (true, true, "::", "192.0.2.1", Some(libc::ENETUNREACH)),
            (true, false, "2001:db8::2", "192.0.2.1", Some(libc::ENETUNREACH)),
            (true, false, "::ffff:192.0.2.2", "192.0.2.1", None),
            (true, false, "::ffff:192.0.2.2", "2001:db8::1", Some(libc::EAFNOSUPPORT)),
        ] {
            let got = check(is_v6, is_v6_only, local, peer);
            assert_eq!(got, expected.map_or(Ok(()), |code| Err(Some(code))), "{local} {peer}");
        }
    }
}
