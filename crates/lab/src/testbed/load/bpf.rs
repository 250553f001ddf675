//! Access to programs and maps of a loaded BPF object.

use aya::maps::{Array, MapData};
use aya::programs::Xdp;
use aya::{Ebpf, Pod};

use crate::error::LabError;

/// Returns the XDP program `name`.
///
/// # Errors
/// When the object has no XDP program of this name.
pub(super) fn xdp_program<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut Xdp, LabError> {
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| LabError::Config(format!("the BPF object has no XDP program `{name}`")))
}

/// Takes the array map `name` out of the object, whose programs must be loaded already.
///
/// # Errors
/// When the object has no array map of this name with values of type `V`.
pub(crate) fn take_array<V: Pod>(
    ebpf: &mut Ebpf,
    name: &str,
) -> Result<Array<MapData, V>, LabError> {
    ebpf.take_map(name)
        .and_then(|map| map.try_into().ok())
        .ok_or_else(|| LabError::Config(format!("the BPF object has no map `{name}`")))
}
