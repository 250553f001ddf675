//! UDP sockets.

mod exchange;
mod readers;
mod socket;

pub use readers::{UdpReader, UdpReaders, wait_readable};
pub use socket::UdpSocket;
