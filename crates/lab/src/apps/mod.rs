//! Unmodified applications on the kernel's stack and on Tidegate.
//!
//! Core 1 runs the server and all receive work of the server's device; core 0 generates the
//! load.

mod application;
pub mod context_switches;
pub mod demo;
pub mod echo_server;
pub mod noisy;
mod packaged_load;
mod testbed;
pub mod throughput;
