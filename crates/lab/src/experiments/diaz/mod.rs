//! Diaz and Zabaljauregui (2007): processors for the network only, shared memory instead of system
//! calls.

pub mod attach_latency;
pub mod context_switches;
pub mod cores;
pub mod elastic;
pub mod priorities;
pub mod profile;
pub mod ring;
