//! Experiments, comparisons and load generators.

pub mod cpu;
pub mod dns;
pub mod error;
pub mod experiment;
pub mod load;
pub mod netns;
mod sys;

pub use error::LabError;
pub use experiment::Experiment;
