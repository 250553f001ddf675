//! Experiments: a folder for each paper, comparisons with other servers and with the kernel, faults
//! and attacks, and simulations.

pub mod compare;
pub mod diaz;
pub mod farias;
pub mod faults;
pub mod goodput_curve;
pub mod jonack;
pub(crate) mod kernel_best;
pub mod mogul;
pub(crate) mod packaged_program;
pub mod rivera;
pub mod simulated;
