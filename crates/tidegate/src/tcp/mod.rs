//! TCP sockets.

mod listener;
mod poll;
mod stream;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use listener::TcpListener;
pub(crate) use stream::Ended;
pub use stream::TcpStream;

use crate::wait::Patience;

fn patience(nonblocking: &AtomicBool, timeout: Option<Duration>) -> Patience {
    match nonblocking.load(Ordering::Relaxed) {
        true => Patience::None,
        false => Patience::timeout(timeout),
    }
}
