//! Load generators: DNS queries and UDP echoes in an open loop, at a rate or as
//! fast as it goes, over a port or over kernel sockets; UDP echoes in a closed
//! loop over a port in `closed`; TCP in `tcp`.
//!
//! One thread sends by the clock and reads what comes back, so that sending
//! and receiving are paid by one core. Latency is measured from the time a
//! request was *meant* to leave: a stall of the server or of the generator
//! itself counts for every request that it delays.

mod asker;
mod bpf;
mod closed;
mod drive;
pub mod flood;
mod kernel;
mod latency;
mod line;
pub(crate) mod neighbour;
mod open;
mod pace;
mod port_flood;
mod query_file;
mod raw;
pub mod responder;
pub(crate) mod segment;
mod slots;
mod tcp;
pub(crate) mod template;
mod workload;

pub use asker::{AskerConfig, load_tcp_at_device};
pub use closed::{ClosedReport, load_udp_closed};
pub use drive::{LoadResult, Progress, Schedule, drive};
pub use kernel::KernelLine;
pub use latency::{Latencies, LatencySummary};
pub use line::Line;
pub use open::{LinkKind, LoadConfig, LoadReport, OnProgress, load_dns, load_udp, over_port};
pub use pace::Pacer;
pub use port_flood::PortFlood;
pub use query_file::QuerySet;
pub use raw::RawLine;
pub use tcp::{
    Answer, Exchange, Question, TcpLoadConfig, TcpLoadReport, load_tcp, load_tcp_watched,
};
pub use template::Addressing;
pub use workload::{
    AnswerHook, DnsWorkload, EchoWorkload, Payload, Verdict, Workload, WorkloadSummary,
};
