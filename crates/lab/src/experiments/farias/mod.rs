//! Farias (2023): TCP echo in three scenarios, and DPDK.

pub mod dpdk;
pub mod echo;
