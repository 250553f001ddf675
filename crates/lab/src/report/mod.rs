//! Results of experiments: figures, tables, charts, their provenance, and progress.

pub mod experiment;
pub mod plot;
pub mod progress;
pub mod provenance;

pub use experiment::Experiment;
pub use progress::Progress;
pub use provenance::Provenance;
