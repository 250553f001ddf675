//! Interface of a datagram server, independent of its sockets.

use std::net::SocketAddr;
use std::time::SystemTime;

/// Answers one datagram at a time.
///
/// A responder is pure: it does no input or output and reads neither a clock nor a random source.
/// The same code therefore runs on Tidegate, on kernel sockets and in a test.
pub trait Responder {
    /// Called before each batch of requests, and at least every 100 ms while no request arrives.
    /// `clock` returns the time since the Unix epoch in nanoseconds, for responders that depend on
    /// the time.
    #[inline]
    fn start_batch(&mut self, clock: &dyn Fn() -> u64) {
        let _ = clock;
    }

    /// Called before the server waits: no request is left.
    #[inline]
    fn on_idle(&mut self) {}

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
    #[inline]
    fn start_batch(&mut self, clock: &dyn Fn() -> u64) {
        (**self).start_batch(clock);
    }

    #[inline]
    fn on_idle(&mut self) {
        (**self).on_idle();
    }

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
    #[inline]
    fn start_batch(&mut self, clock: &dyn Fn() -> u64) {
        (**self).start_batch(clock);
    }

    #[inline]
    fn on_idle(&mut self) {
        (**self).on_idle();
    }

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

/// Time since the Unix epoch, in nanoseconds: the clock of servers that run.
pub(crate) fn unix_time_ns() -> u64 {
    let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_nanos() as u64)
}
