//! The echo service over TCP on the kernel's sockets, with `io_uring`: what
//! Tidegate is compared with, besides [`crate::kernel_streams`].

mod sys;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::sys::{Ring, Step};
use crate::ServeCounters;
use crate::kernel_listener::listen_for_many;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Sends back what comes on these addresses until `stop` is set, which is noticed
/// within a tenth of a second. Calls `ready` when it listens. One call to the
/// kernel hands over all answers and takes all that came since.
///
/// # Errors
/// When an address cannot be listened on, or the kernel has no `io_uring` for this
/// process.
pub fn echo_by_uring(
    addresses: &[SocketAddr],
    stop: &AtomicBool,
    counters: &ServeCounters,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let mut ring = Ring::new(listen_for_many(addresses)?)?;
    ready()?;
    let mut steps = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        ring.wait(STOP_CHECK, &mut steps)?;
        for step in steps.drain(..) {
            match step {
                Step::Accepted(stream) => {
                    // One that has ended already is found out by the first read.
                    let _ = stream.set_nodelay(true);
                    ring.add(stream)?;
                }
                Step::Received { slot, len } => {
                    ServeCounters::add(&counters.requests, 1);
                    ring.send_back(slot, len)?;
                    ServeCounters::add(&counters.answers, 1);
                }
            }
        }
    }
    Ok(())
}
