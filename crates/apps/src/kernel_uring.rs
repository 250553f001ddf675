//! The echo service over TCP on kernel sockets, with `io_uring`: a baseline that Tidegate is
//! compared with, besides [`crate::kernel_streams`].

mod sys;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::sys::{ConnectionRing, RingEvent};
use crate::ServeCounters;
use crate::kernel_listener::listen_with_max_descriptors;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Serves TCP echo on `addresses` until `stop` is set, which is noticed within 100 ms. Calls
/// `ready` once the server listens. One system call submits all replies and collects all
/// completions since the last.
///
/// # Errors
/// When an address cannot be listened on, or the kernel has no `io_uring` for this
/// process.
pub fn serve_uring_echo(
    addresses: &[SocketAddr],
    stop: &AtomicBool,
    counters: &ServeCounters,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let mut ring = ConnectionRing::new(listen_with_max_descriptors(addresses)?)?;
    ready()?;
    let mut events = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        ring.wait(STOP_CHECK_INTERVAL, &mut events)?;
        for event in events.drain(..) {
            match event {
                RingEvent::Accepted(stream) => {
                    // A connection that is already closed shows up at its first read.
                    let _ = stream.set_nodelay(true);
                    ring.add_connection(stream)?;
                }
                RingEvent::Received { slot, len } => {
                    ServeCounters::add(&counters.requests, 1);
                    ring.send_back(slot, len)?;
                    ServeCounters::add(&counters.replies, 1);
                }
            }
        }
    }
    Ok(())
}
