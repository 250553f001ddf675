//! Farias (2023): TCP echo in three scenarios, a server written for mTCP, and DPDK.

pub mod dpdk;
pub mod echo;
pub mod mtcp_server;
