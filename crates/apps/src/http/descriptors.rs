//! File descriptors of the process: each kernel socket and each file that is sent needs one.

use std::io;

use rustix::io::Errno;

use crate::kernel_listener::raise_descriptor_limit;
/// Descriptors that are not for connections and their files.
const RESERVED: u64 = 64;

/// Raises the soft limit of descriptors to the hard limit. Returns the number of connections
/// that the limit allows, with `per_connection` descriptors each.
///
/// # Errors
/// When the kernel does not permit the hard limit.
pub(super) fn raise_limit(per_connection: u64) -> io::Result<usize> {
    let connections = raise_descriptor_limit()?.saturating_sub(RESERVED) / per_connection;
    Ok(usize::try_from(connections).unwrap_or(usize::MAX).max(1))
}

/// True for the errors of a call that needs a descriptor when there is none.
pub(super) fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}
