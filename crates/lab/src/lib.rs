//! Experiments, comparisons and load generators.

pub mod apps;
pub mod attach;
mod btf;
pub mod chaos;
mod client;
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
pub mod locks;
pub mod mlfrr;
pub mod netns;
pub mod papers;
pub mod plot;
pub mod process;
pub mod protect;
pub mod queues;
pub mod readers;
pub mod reads;
pub mod router;
pub mod soak;
mod stop;
pub mod sweep;
mod sys;
pub mod tcp;
pub mod trace;
mod tracefs;

pub use error::LabError;
pub use experiment::Experiment;
