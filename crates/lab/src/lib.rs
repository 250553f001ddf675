//! Experiments, comparisons and load generators.

pub mod apps;
pub mod attach_latency;
mod btf;
pub mod chaos;
mod client;
pub mod concurrent_reads;
pub mod contention;
pub mod cpu;
pub mod demo;
pub mod dns;
pub mod dpdk;
pub mod echo_cost;
pub mod error;
pub mod experiment;
pub mod guard;
pub mod livelock;
pub mod load;
pub mod lock_contention;
pub mod mlfrr;
pub mod netns;
pub mod papers;
pub mod plot;
pub mod process;
pub mod protect;
pub mod reader_scaling;
pub mod receive_queues;
pub mod receive_trace;
pub mod router;
pub mod soak;
mod stop;
pub mod sweep;
mod sys;
pub mod tcp;
mod tracefs;

pub use error::LabError;
pub use experiment::Experiment;
