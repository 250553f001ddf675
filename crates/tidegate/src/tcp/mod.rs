//! TCP sockets.

mod listener;
mod poll;
mod stream;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use listener::TcpListener;
pub(crate) use stream::ClosingStream;
pub use stream::TcpStream;

use crate::wait::Deadline;

fn deadline(nonblocking: &AtomicBool, timeout: Option<Duration>) -> Deadline {
    match nonblocking.load(Ordering::Relaxed) {
        true => Deadline::Now,
        false => Deadline::after(timeout),
    }
}
