//! Experiments at minimal length, as far as others can run beside them: two at a time.

mod dpdk;
mod flood;
mod kernel;
mod peers;
mod program;
#[path = "../support/mod.rs"]
mod support;
