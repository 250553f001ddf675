//! Loading of BPF objects.

use aya::{Ebpf, EbpfError, EbpfLoader};

/// Creates the maps of an object and prepares its programs.
///
/// Without the types of the kernel, since no object of ours is relocated by them: aya reads and
/// parses them once, for a new loader, and not a second time.
pub(crate) fn load(object: &[u8]) -> Result<Ebpf, EbpfError> {
    EbpfLoader::new().btf(None).load(object)
}
