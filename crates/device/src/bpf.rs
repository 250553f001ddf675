//! Loading of BPF objects.

use aya::{Ebpf, EbpfError, EbpfLoader};

/// Creates the maps of an object and prepares its programs.
///
/// The types of the kernel, which aya would read and parse, are left out: no object of ours is
/// relocated by them.
pub(crate) fn load(object: &[u8]) -> Result<Ebpf, EbpfError> {
    EbpfLoader::new().btf(None).load(object)
}
