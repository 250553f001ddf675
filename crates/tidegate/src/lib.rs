//! UDP and TCP sockets in the style of `std::net` on the Tidegate stack.
//!
//! A [`Net`] is a network stack of its own, embedded in this program: a port,
//! an arena and a stack, run by the calls that the program's own threads make.
//! No thread is started. A thread that waits runs the stack for everybody.
//!
//! There are three ways to wait: calls that block, as in `std::net`; [`Poll`],
//! for many sockets; and with the feature `tokio` futures (`tidegate::tokio`).
//! [`Net::batch`] does many calls on TCP sockets at once.
//!
//! ```
//! use tidegate::{Net, NetConfig, UdpSocket};
//!
//! // Two hosts in one process, joined by a wire in memory.
//! let (port_a, port_b) = tidegate::mem::wire(&Default::default())?;
//! let a = Net::open(NetConfig::new(port_a).address("192.0.2.1/24".parse().unwrap()))?;
//! let b = Net::open(NetConfig::new(port_b).address("192.0.2.2/24".parse().unwrap()))?;
//!
//! let server = UdpSocket::bind(&a, "192.0.2.1:7")?;
//! let client = UdpSocket::bind(&b, "192.0.2.2:0")?;
//! # let thread = std::thread::spawn(move || -> std::io::Result<()> {
//! # let mut buf = [0; 64];
//! # let (len, from) = server.recv_from(&mut buf)?;
//! # server.send_to(&buf[..len], from)?;
//! # Ok(()) });
//! client.send_to(b"hello", "192.0.2.1:7")?;
//! // ... the server echoes ...
//! let mut buf = [0; 64];
//! let (len, from) = client.recv_from(&mut buf)?;
//! assert_eq!((&buf[..len], from.port()), (&b"hello"[..], 7));
//! # thread.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attached;
mod batch;
mod calls;
mod embedded;
pub mod host;
mod net;
mod passing;
mod poll;
mod readers;
mod readiness;
mod tasks;
mod tcp;
mod threads;
#[cfg(feature = "tokio")]
pub mod tokio;
mod udp;
mod wait;

pub use attached::Fork;
pub use batch::Batch;
pub use net::{Net, NetCounters};
pub use passing::Arrived;
pub use poll::{Interest, Poll, Ready, Source, Token, Trigger};
pub use readers::{Distribution, ReadersConfig, UdpReader, UdpReaders, wait_readable};
pub use readiness::{Readiness, Sleeper};
pub use tcp::{TcpListener, TcpStream};
pub use tidegate_engine::{
    EngineCounters, IdleConfig, NetConfig, OpenError, OpenPort, PortConfig, Wrap,
};
pub use tidegate_gate::{self as gate};
pub use tidegate_memory::queues::lock::LockStatistics;
pub use tidegate_memory::{Arena, FrameSize};
pub use tidegate_port::{self as port, mem};
pub use tidegate_stack::{
    CongestionControl, InPlace, Keepalive, Limits, Ownership, Request, Route, TcpInfo, TcpOptions,
    TcpState, UdpOptions,
};
pub use tidegate_wire::{DropCounters, DropReason, IpCidr, MacAddr, Severity};
pub use udp::{Received, UdpSocket};
