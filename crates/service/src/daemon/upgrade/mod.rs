//! Upgrade: another daemon takes over the state and the descriptors of this one.
//!
//! The old daemon saves a snapshot and offers it, over the connection of the new daemon to the
//! attach socket. The new daemon restores everything. Only then the old daemon ends.

pub(super) mod check;
mod claims;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub(super) mod handover;
pub(super) mod offer;
#[cfg(test)]
mod older_versions;
pub(super) mod protocol;
pub(super) mod restore;
mod save;
pub(super) mod snapshot;
#[cfg(test)]
mod tests;
