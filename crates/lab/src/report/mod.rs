//! Results of experiments: figures, tables and charts.

pub mod experiment;
pub mod plot;

pub use experiment::Experiment;
