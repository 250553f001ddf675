//! Load generators.
//!
//! DNS queries and UDP echoes run in an open loop, at a fixed rate or the maximum rate, over a
//! device or kernel sockets. UDP echoes also run in a closed loop over a device (module
//! `closed_loop`). TCP load is in module `tcp`.
//!
//! One thread sends by the clock and receives the responses, so one core pays for sending and
//! receiving. Latency counts from the *intended* send time of a request: a stall of the server
//! or of the generator counts for every request that it delays (no coordinated omission).

mod closed_loop;
mod core;
mod device_flood;
mod device_link;
mod error;
mod kernel_link;
mod latency;
mod link;
pub mod neighbour;
mod number;
mod open_loop;
mod pacer;
mod pending;
mod query_file;
mod spinning;
mod sys;
mod tcp;
pub mod template;
mod udp_load;
mod workload;

pub use self::core::pin_thread;
pub use closed_loop::{ClosedLoopReport, load_udp_closed_loop};
pub use device_flood::DeviceFlood;
pub use device_link::DeviceLink;
pub use error::LoadError;
pub use kernel_link::KernelLink;
pub use latency::{LatencyHistogram, LatencySummary};
pub use link::Link;
pub use number::format_number;
pub use open_loop::{LoadProgress, LoadResult, Schedule, run_open_loop};
pub use pacer::Pacer;
pub use query_file::QuerySet;
pub use spinning::{SpinningConfig, SpinningReport, load_udp_spinning};
pub use tcp::{
    Exchange, ExpectedResponse, TcpLoadConfig, TcpLoadReport, Transaction, load_tcp,
    load_tcp_with_hook,
};
pub use template::Addressing;
pub use udp_load::{
    LinkKind, LoadConfig, LoadReport, ProgressCallback, load_dns, load_over_device, load_udp,
};
pub use workload::{
    DnsWorkload, EchoWorkload, MatchResult, ResponseHook, Workload, WorkloadSummary, WrittenPayload,
};
