//! Interface of a datagram server, independent of its sockets.

use std::net::SocketAddr;

/// Answers one datagram at a time.
///
/// A responder is pure: it does no input or output and reads neither a clock nor a random source.
/// The same code therefore runs on Tidegate, on kernel sockets and in a test.
pub trait Responder {
    /// Answers `request`, received from `from`. Writes the reply to the front of `reply` and
    /// returns its length in bytes, or `None` for no reply. Never writes more than `reply` holds.
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize>;

    /// As [`Responder::respond`], for a request received over a stream: the response may fill
    /// `reply` entirely.
    fn respond_to_stream(
        &mut self,
        request: &[u8],
        from: SocketAddr,
        reply: &mut [u8],
    ) -> Option<usize> {
        self.respond(request, from, reply)
    }
}

impl<R: Responder + ?Sized> Responder for &mut R {
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        (**self).respond(request, from, reply)
    }

    fn respond_to_stream(
        &mut self,
        request: &[u8],
        from: SocketAddr,
        reply: &mut [u8],
    ) -> Option<usize> {
        (**self).respond_to_stream(request, from, reply)
    }
}

impl<R: Responder + ?Sized> Responder for Box<R> {
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        (**self).respond(request, from, reply)
    }

    fn respond_to_stream(
        &mut self,
        request: &[u8],
        from: SocketAddr,
        reply: &mut [u8],
    ) -> Option<usize> {
        (**self).respond_to_stream(request, from, reply)
    }
}
