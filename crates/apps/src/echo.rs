//! The echo service of RFC 862, over UDP.

use std::net::SocketAddr;

use crate::Responder;

/// Sends every datagram back as it came.
#[derive(Clone, Copy, Debug, Default)]
pub struct Echo;

impl Responder for Echo {
    /// Copies the request. A request longer than `reply` is not answered:
    /// half an echo would be a wrong one. A request from the port of a service
    /// that answers anything (echo, chargen, DNS, NTP and the like) is not
    /// answered either, or two servers would talk to each other for ever.
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        if is_answering_port(from.port()) {
            return None;
        }
        reply.get_mut(..request.len())?.copy_from_slice(request);
        Some(request.len())
    }
}

/// Ports where some server answers whatever arrives: a forged datagram from
/// one of them would start a loop that never ends.
fn is_answering_port(port: u16) -> bool {
    matches!(port, 0 | 7 | 13 | 17 | 19 | 37 | 53 | 123)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENTS: [&str; 2] = ["192.0.2.1:40000", "[2001:db8::1]:40000"];

    #[test]
    fn every_byte_comes_back() {
        for client in CLIENTS {
            let from = client.parse().unwrap();
            let mut reply = [0; 64];
            assert_eq!(Echo.respond(b"tide", from, &mut reply), Some(4));
            assert_eq!(&reply[..4], b"tide");
            assert_eq!(Echo.respond(b"", from, &mut reply), Some(0));
        }
    }

    #[test]
    fn a_request_that_does_not_fit_is_not_cut() {
        let from = CLIENTS[0].parse().unwrap();
        assert_eq!(Echo.respond(b"tide", from, &mut [0; 3]), None);
    }

    #[test]
    fn servers_are_not_answered() {
        for port in [0, 7, 19, 53] {
            let from = SocketAddr::new("192.0.2.1".parse().unwrap(), port);
            assert_eq!(Echo.respond(b"tide", from, &mut [0; 8]), None);
        }
    }
}
