//! Experiments at minimal length, two at a time, and one at a time where rates are asserted.

mod dpdk;
mod flood;
mod kernel;
mod peers;
mod program;
#[path = "../support/mod.rs"]
mod support;
