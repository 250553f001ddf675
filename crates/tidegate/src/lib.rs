//! UDP and TCP sockets in the style of `std::net` on the Tidegate stack.
//!
//! A [`Net`] is a handle of a network stack. An embedded stack ([`Net::open`]) is a device, a
//! frame arena and a protocol stack inside this process. It starts no thread by default: a
//! thread that waits for a socket drives the stack for all threads. An attached stack
//! (`Net::attach`) runs in a `tidegate` daemon.
//!
//! There are three ways to wait: blocking calls, as in `std::net`; [`Poll`] for many sockets;
//! and, with feature `tokio`, futures (`tidegate::tokio`). [`Net::batch`] makes several calls
//! on TCP sockets under one lock; a [`ring`] carries out operations on many sockets and reports
//! their completion.
//!
//! # Features
//! None is on by default: without a feature there are TAP devices, in-memory links, and devices
//! of an application's own.
//!
//! * `xdp`: devices on AF_XDP.
//! * `packet`: devices on AF_PACKET.
//! * `attach`: attached stacks (`Net::attach`), forks, and sockets sent between processes.
//! * `tokio`: futures with the traits of tokio.
//! * `serde`: [`host::HostConfig`] as data, for another process.
//! * `dpdk`: devices of DPDK; needs libdpdk-dev.
//! * `rdma`: devices over RDMA NICs; needs libibverbs-dev.
//!
//! # Examples
//! ```
//! use tidegate::{Net, NetConfig, UdpSocket};
//!
//! // Two hosts in one process, joined by an in-memory link.
//! let (device_a, device_b) = tidegate::mem::wire(&Default::default())?;
//! let a = Net::open(NetConfig::new(device_a).address("192.0.2.1/24".parse().unwrap()))?;
//! let b = Net::open(NetConfig::new(device_b).address("192.0.2.2/24".parse().unwrap()))?;
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

mod backend;
mod batch;
pub mod device;
pub mod gate;
pub mod host;
mod net;
mod poll;
pub mod ring;
mod tcp;
#[cfg(feature = "tokio")]
pub mod tokio;
#[cfg(feature = "attach")]
mod transfer;
mod types;
mod udp;

#[cfg(feature = "attach")]
pub use backend::attached::fork::Fork;
pub use batch::Batch;
pub use device::mem;
pub use net::handle::{Net, NetCounters};
pub use net::socket_entry::{SocketEntry, SocketRole};
pub use net::source::Source;
pub use poll::Poll;
pub use tcp::{TcpListener, TcpStream};
pub use tidegate_engine::capture;
pub use tidegate_engine::{
    DeviceConfig, DeviceWrapper, EngineCounters, IdleConfig, NetConfig, OpenDevice, OpenError,
};
pub use tidegate_memory::lock_meter::LockStatistics;
pub use tidegate_memory::{Arena, FrameSize};
pub use tidegate_stack::{
    AddressConflict, AddressOwnership, AddressProbe, CongestionControl, Counters, InPlaceRequest,
    Keepalive, Limits, RecoveryPhase, Route, TcpInfo, TcpOptions, TcpState, TcpTraffic,
    UdpErrorReport, UdpOptions, UdpRequest, UdpSendOptions, UnreachableReason,
};
pub use tidegate_wire::{DropCounters, DropReason, IpCidr, MacAddr, Severity};
#[cfg(feature = "attach")]
pub use transfer::ReceivedSocket;
pub use types::datagram::DatagramMeta;
pub use types::readers::{Distribution, ReadersConfig};
pub use types::readiness::{Interest, Readiness, Ready, Token, Trigger};
pub use types::service_times::ServiceTimes;
pub use types::sleeper::Sleeper;
pub use udp::{UdpReader, UdpReaders, UdpSocket, wait_readable};
