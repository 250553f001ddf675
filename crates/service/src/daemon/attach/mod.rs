//! Admission of applications: the Unix socket on which applications attach.

mod heap_trim;
pub(super) mod listener;
