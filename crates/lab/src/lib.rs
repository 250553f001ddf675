//! Experiments, comparisons and load generators.

pub mod cpu;
pub mod demo;
pub mod dns;
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
pub mod router;
pub mod soak;
pub mod sweep;
mod sys;

pub use error::LabError;
pub use experiment::Experiment;
