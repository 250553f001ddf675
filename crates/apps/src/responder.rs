//! What a datagram server is, whatever sockets carry it.

use std::net::SocketAddr;

/// Answers one datagram at a time.
///
/// A responder is pure: it asks nobody for the time or for randomness and does
/// no input or output, so the same code runs on Tidegate, on kernel sockets
/// and in a test.
pub trait Responder {
    /// Answers `request`, which came from `from`. Writes the answer to the
    /// front of `reply` and returns its length in bytes, or `None` when there
    /// is nothing to say. Never writes more than `reply` holds.
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize>;

    /// As [`Responder::respond`], for a request that came over a stream: the
    /// answer may be as long as `reply`.
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
