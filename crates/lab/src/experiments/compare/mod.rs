//! Comparisons with other servers and with the kernel, beyond those of the papers.

pub mod apps;
pub mod bulk;
pub mod connections;
pub mod dns;
pub mod echo_cost;
pub mod fleet;
pub mod growth;
pub mod kafka;
pub mod noisy;
pub mod observe;
pub mod ordinary;
pub mod peers;
pub mod programs;
mod spinning_client;
pub mod syn_flood;
