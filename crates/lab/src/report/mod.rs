//! Results of experiments: figures, tables, charts, their provenance, and progress.

pub mod experiment;
pub(crate) mod expressions;
pub mod plot;
pub mod progress;
pub mod provenance;

pub use experiment::Experiment;
pub(crate) use plot::{Axis, Panel, Picture, Scale, Series, Stroke};
pub use progress::Progress;
pub use provenance::Provenance;
