//! What is taken out of a loaded BPF object.

use aya::maps::{Array, MapData};
use aya::programs::Xdp;
use aya::{Ebpf, Pod};

use crate::error::LabError;

/// An XDP program.
///
/// # Errors
/// When the object has none of this name.
pub(super) fn xdp<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut Xdp, LabError> {
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| LabError::Config(format!("the load has no program `{name}`")))
}

/// An array, which is no more in the object then: its programs must be loaded.
///
/// # Errors
/// When the object has none of this name and of these values.
pub(super) fn array<V: Pod>(ebpf: &mut Ebpf, name: &str) -> Result<Array<MapData, V>, LabError> {
    ebpf.take_map(name)
        .and_then(|map| map.try_into().ok())
        .ok_or_else(|| LabError::Config(format!("the load has no map `{name}`")))
}
