//! Unmodified programs on the kernel and on Tidegate.
//!
//! Core 1 serves, with all receive work of the server's device; core 0 makes
//! the load.

pub mod asymmetric;
pub mod demo;
mod program;
mod site;
pub mod speed;
