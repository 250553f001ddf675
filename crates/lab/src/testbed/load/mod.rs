//! Load that the kernel sends: floods and TCP requests by BPF programs on a device of the testbed.

pub mod arp_responder;
mod bpf;
mod bpf_client;
pub mod flood;
pub(crate) mod segment;
pub(crate) mod syn_flood;

pub(crate) use bpf::take_array;
pub use bpf_client::{BpfClientConfig, load_tcp_with_bpf};
