//! File handles.
//!
//! A handle stays valid when the server restarts, and the server stores nothing for it. A handle
//! has the file's number and birth time, and a byte of the number of each directory above: enough
//! to find the file again in few directories.

use nfs3_types::nfs3::{NFS3_FHSIZE, nfs_fh3};
use nfs3_types::xdr_codec::Opaque;
use rustix::fs::Statx;

use super::arguments::{Arguments, Malformed};

const VERSION: u8 = 1;

/// Bytes of a handle before those of the directories.
const FIXED_BYTES: usize = 20;

/// Directories that a handle has room for. The search for a file below more is longer.
const MAX_ANCESTORS: usize = NFS3_FHSIZE - FIXED_BYTES;

/// Handle of a file, directory or link in one export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileHandle {
    /// Number of the export, from its top directory.
    pub(super) export: u32,
    /// Number of the file in its file system.
    pub(super) file_id: u64,
    /// Number that differs for the next file with the same `file_id`.
    pub(super) generation: u32,
    /// Directories between the export's top directory and the file, by one byte each.
    ancestors: [u8; MAX_ANCESTORS],
    ancestor_count: u8,
}

impl FileHandle {
    /// Handle of the top directory.
    pub(super) fn root(stat: &Statx) -> Self {
        Self {
            export: (mix(stat.stx_ino) >> 32) as u32 ^ generation(stat),
            file_id: stat.stx_ino,
            generation: generation(stat),
            ancestors: [0; MAX_ANCESTORS],
            ancestor_count: 0,
        }
    }

    /// Handle of a file in the directory with this handle.
    pub(super) fn child(&self, root: &Self, stat: &Statx) -> Self {
        let mut child = self.clone();
        child.file_id = stat.stx_ino;
        child.generation = generation(stat);
        if self.file_id != root.file_id {
            child.push_ancestor(self.file_id);
        }
        child
    }

    /// Handle of the directory above the directory with this handle.
    pub(super) fn parent(&self, root: &Self, stat: &Statx) -> Self {
        let ancestor_count = match stat.stx_ino == root.file_id {
            true => 0,
            false => self.ancestor_count.saturating_sub(1),
        };
        let mut ancestors = self.ancestors;
        ancestors[usize::from(ancestor_count)..].fill(0);
        let (file_id, generation) = (stat.stx_ino, generation(stat));
        Self { export: self.export, file_id, generation, ancestors, ancestor_count }
    }

    fn push_ancestor(&mut self, directory_id: u64) {
        if let Some(ancestor) = self.ancestors.get_mut(usize::from(self.ancestor_count)) {
            *ancestor = ancestor_byte(directory_id);
            self.ancestor_count += 1;
        }
    }

    /// Returns true if the directory with this number, `depth` directories below the top one, can
    /// be above the file.
    pub(super) fn can_be_below(&self, directory_id: u64, depth: usize) -> bool {
        let ancestors = &self.ancestors[..usize::from(self.ancestor_count)];
        match ancestors.get(depth) {
            Some(&ancestor) => ancestor == ancestor_byte(directory_id),
            None => ancestors.len() == MAX_ANCESTORS,
        }
    }

    /// Returns true for the attributes of the file that this handle was made for.
    pub(super) fn is_of(&self, stat: &Statx) -> bool {
        self.file_id == stat.stx_ino && self.generation == generation(stat)
    }

    pub(super) fn parse(arguments: &mut Arguments<'_>) -> Result<Option<Self>, Malformed> {
        let bytes = arguments.opaque(NFS3_FHSIZE)?;
        Ok(Self::decode(bytes))
    }

    /// Decodes a handle; `None` for bytes that this server did not make.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (fixed, path) = bytes.split_first_chunk::<FIXED_BYTES>()?;
        let [version, ancestor_count, 0, 0, numbers @ ..] = fixed else { return None };
        if *version != VERSION || usize::from(*ancestor_count) != path.len() {
            return None;
        }
        let mut ancestors = [0; MAX_ANCESTORS];
        ancestors.get_mut(..path.len())?.copy_from_slice(path);
        let mut numbers = Arguments::new(numbers);
        Some(Self {
            export: numbers.u32().ok()?,
            file_id: numbers.u64().ok()?,
            generation: numbers.u32().ok()?,
            ancestors,
            ancestor_count: *ancestor_count,
        })
    }

    pub(super) fn encode(&self) -> nfs_fh3 {
        let mut bytes = vec![VERSION, self.ancestor_count, 0, 0];
        bytes.extend_from_slice(&self.export.to_be_bytes());
        bytes.extend_from_slice(&self.file_id.to_be_bytes());
        bytes.extend_from_slice(&self.generation.to_be_bytes());
        bytes.extend_from_slice(&self.ancestors[..usize::from(self.ancestor_count)]);
        nfs_fh3 { data: Opaque::owned(bytes) }
    }
}

/// Generation of a file, from its birth time. File systems without birth times have only one.
fn generation(stat: &Statx) -> u32 {
    let birth = &stat.stx_btime;
    (mix(birth.tv_sec as u64 ^ u64::from(birth.tv_nsec) << 32) >> 32) as u32
}

fn ancestor_byte(directory_id: u64) -> u8 {
    (mix(directory_id) >> 56) as u8
}

/// Spreads a number over the upper bits (Fibonacci hashing).
fn mix(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(ancestor_count: u8) -> FileHandle {
        let mut ancestors = [0; MAX_ANCESTORS];
        ancestors[..usize::from(ancestor_count)].fill(7);
        FileHandle { export: 1, file_id: 2, generation: 3, ancestors, ancestor_count }
    }

    #[test]
    fn handles_survive_encoding_and_nothing_else_is_a_handle() {
        for ancestor_count in 0..=MAX_ANCESTORS as u8 {
            let handle = handle(ancestor_count);
            let bytes = handle.encode().data.into_owned();
            assert!(bytes.len() <= NFS3_FHSIZE);
            assert_eq!(FileHandle::decode(&bytes), Some(handle));
            for len in 0..bytes.len() {
                assert_eq!(FileHandle::decode(&bytes[..len]), None, "cut to {len} bytes");
            }
        }
        assert_eq!(FileHandle::decode(&[0; NFS3_FHSIZE]), None);
    }

    #[test]
    fn directories_above_a_file_are_recognised() {
        let mut deep = handle(0);
        (0..MAX_ANCESTORS as u64 + 5).for_each(|directory| deep.push_ancestor(directory));
        for directory in 0..MAX_ANCESTORS as u64 {
            assert!(deep.can_be_below(directory, directory as usize));
            assert!(!deep.can_be_below(directory + 1, directory as usize), "{directory}");
        }
        assert!(deep.can_be_below(99, MAX_ANCESTORS), "any, below the last that has room");
        assert!(!handle(0).can_be_below(99, 0), "a file in the top directory");
    }
}
