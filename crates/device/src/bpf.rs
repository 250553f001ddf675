//! Loading of BPF objects, and its errors.

use aya::maps::MapError;
use aya::programs::ProgramError;
use aya::{Ebpf, EbpfError, EbpfLoader};

/// Creates the maps of an object and prepares its programs, with values for constants of the object.
///
/// Without the types of the kernel, since no object of ours is relocated by them: aya reads and
/// parses them once, for a new loader, and not a second time.
pub(crate) fn load(object: &[u8], constants: &[(&str, u32)]) -> Result<Ebpf, EbpfError> {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    for (name, value) in constants {
        loader.override_global(name, value, true);
    }
    loader.load(object)
}

/// Error number of the system call that failed, if one did.
pub(crate) fn system_error(error: &EbpfError) -> Option<i32> {
    match error {
        EbpfError::ProgramError(ProgramError::LoadError { io_error, .. })
        | EbpfError::MapError(MapError::CreateError { io_error, .. }) => io_error.raw_os_error(),
        EbpfError::ProgramError(ProgramError::SyscallError(error))
        | EbpfError::MapError(MapError::SyscallError(error)) => error.io_error.raw_os_error(),
        _ => None,
    }
}
