//! Upgrade: another daemon takes over the state and the descriptors of this one.

pub(super) mod claims;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub(super) mod handover;
pub(super) mod protocol;
pub(super) mod request;
pub(super) mod save;
pub(super) mod snapshot;
