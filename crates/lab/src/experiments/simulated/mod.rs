//! Simulations: every receive mode, and the machines of the papers.

pub mod papers;
pub mod sweep;
