//! Receive scheduling and admission.
//!
//! The gate says when to look for packets, how many to take, and which to
//! refuse. It does no I/O and has no clock: the engine and the simulator both
//! tell it the time, ask it what to do next, and tell it how that went.

#![forbid(unsafe_code)]

pub mod admission;
