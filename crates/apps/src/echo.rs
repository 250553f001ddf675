//! The echo service of RFC 862, over UDP.

use std::net::SocketAddr;

use crate::Responder;

/// Responder that returns every datagram unchanged.
///
/// # Examples
/// ```
/// use tidegate_apps::{Responder, echo::Echo};
///
/// let mut reply = [0; 64];
/// let len = Echo.respond(b"tide", "192.0.2.1:40000".parse()?, &mut reply);
/// assert_eq!(len, Some(4));
/// assert_eq!(&reply[..4], b"tide");
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Echo;

impl Responder for Echo {
    /// Copies the request into `reply`. A request longer than `reply` gets no reply: half an
    /// echo would be wrong. A request from the port of a service that answers any datagram
    /// (echo, chargen, DNS, NTP and the like) gets none either, or two servers would exchange
    /// datagrams forever.
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        if is_answering_port(from.port()) {
            return None;
        }
        reply.get_mut(..request.len())?.copy_from_slice(request);
        Some(request.len())
    }
}

/// True for ports whose services answer any datagram: a forged datagram from such a port would
/// start an endless loop.
fn is_answering_port(port: u16) -> bool {
    matches!(port, 0 | 7 | 13 | 17 | 19 | 37 | 53 | 123)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENTS: [&str; 2] = ["192.0.2.1:40000", "[2001:db8::1]:40000"];

    #[test]
    fn echoes_every_byte() {
        for client in CLIENTS {
            let from = client.parse().unwrap();
            let mut reply = [0; 64];
            assert_eq!(Echo.respond(b"tide", from, &mut reply), Some(4));
            assert_eq!(&reply[..4], b"tide");
            assert_eq!(Echo.respond(b"", from, &mut reply), Some(0));
        }
    }

    #[test]
    fn drops_request_longer_than_reply_buffer() {
        let from = CLIENTS[0].parse().unwrap();
        assert_eq!(Echo.respond(b"tide", from, &mut [0; 3]), None);
    }

    #[test]
    fn ignores_requests_from_service_ports() {
        for port in [0, 7, 19, 53] {
            let from = SocketAddr::new("192.0.2.1".parse().unwrap(), port);
            assert_eq!(Echo.respond(b"tide", from, &mut [0; 8]), None);
        }
    }
}
