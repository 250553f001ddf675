//! The laboratory: experiments, the testbeds that they share, the report of the papers, and
//! the demonstration.

pub mod demo;
pub mod error;
pub mod experiments;
pub mod papers;
mod published;
pub mod report;
pub mod stats;
pub mod summary;
pub mod testbed;

pub use error::LabError;
pub use report::Experiment;
