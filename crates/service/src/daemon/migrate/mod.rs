//! Migration of applications and sockets between network cores.
//!
//! Frames for their ports are parked meanwhile, so nothing is lost or reordered.

pub(super) mod balancer;
#[cfg(test)]
mod core_tests;
mod extract;
mod id_map;
mod insert;
mod port_query;
mod selection;
mod sets;
#[cfg(test)]
mod tests;
mod transfer_search;
