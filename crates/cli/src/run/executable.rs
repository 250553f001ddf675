//! Checks of an executable: only dynamically linked executables that use the C library can run
//! on Tidegate, because the preload library interposes on the C library's calls.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::Failure;

/// Returns the path of the executable `name`, searched on the `PATH` as a shell does.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Ok(path.into());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program);
    found.ok_or_else(|| format!("{}: no such executable on the PATH", path.display()).into())
}

/// Reason for which an executable cannot run on Tidegate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obstacle {
    Go,
    Static,
    /// Set-user-ID.
    GainsUser,
    /// Set-group-ID.
    GainsGroup,
    /// File capabilities.
    GainsCapabilities,
}

/// Refuses an executable whose system calls do not go through a shared C library.
pub(super) fn check(path: &Path) -> Result<(), Failure> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let reason = match obstacle(&bytes).or_else(|| gained_privilege(path, &bytes)) {
        None => return Ok(()),
        Some(Obstacle::Go) => {
            "it is a Go program, which makes system calls without the C library, so its \
             sockets cannot be moved. Leave it on the kernel, behind `tidegate guard` if it needs \
             protection"
        }
        Some(Obstacle::Static) => {
            "it is linked statically: the preload library cannot be loaded into it. Install \
             or build it dynamically linked, or leave it on the kernel behind `tidegate guard`"
        }
        Some(Obstacle::GainsUser) => {
            "it is set-user-ID: the dynamic linker does not load the preload library into a \
             program that gains privileges, so its sockets cannot be moved. Start `tidegate run` \
             as the owner of the program"
        }
        Some(Obstacle::GainsGroup) => {
            "it is set-group-ID: the dynamic linker does not load the preload library into a \
             program that gains privileges, so its sockets cannot be moved. Start `tidegate run` \
             with the group of the program (`sg`)"
        }
        Some(Obstacle::GainsCapabilities) => {
            "it has file capabilities: the dynamic linker does not load the preload library into \
             a program that gains privileges, so its sockets cannot be moved. Start `tidegate \
             run` as root, or a copy of the program without capabilities (`setcap -r`)"
        }
    };
    Err(format!("{}: {reason}", path.display()).into())
}

/// Privilege that an ELF executable gains by being executed. The kernel ignores such rights of
/// scripts, of files on a `nosuid` mount, and in a process with `no_new_privs`.
fn gained_privilege(path: &Path, file: &[u8]) -> Option<Obstacle> {
    let ignores = |flags: StatVfsMountFlags| flags.contains(StatVfsMountFlags::NOSUID);
    let is_ignored = rustix::fs::statvfs(path).is_ok_and(|mount| ignores(mount.f_flag))
        || rustix::thread::no_new_privs().unwrap_or(false);
    if is_ignored || !file.starts_with(b"\x7fELF") {
        return None;
    }
    let user = rustix::process::getuid();
    let has_capabilities = || {
        let length = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 0][..]);
        !user.is_root() && length.is_ok_and(|length| length > 0)
    };
    let group = rustix::process::getgid();
    let by_mode = gained_by_mode(&path.metadata().ok()?, user.as_raw(), group.as_raw());
    by_mode.or_else(|| has_capabilities().then_some(Obstacle::GainsCapabilities))
}

/// Obstacle of a file whose mode gives its owner's or its group's privileges to `user` of `group`.
fn gained_by_mode(file: &Metadata, user: u32, group: u32) -> Option<Obstacle> {
    const SET_USER_ID: u32 = 0o4000;
    const SET_GROUP_ID: u32 = 0o2010;
    let has = |bits: u32| file.mode() & bits == bits;
    if has(SET_USER_ID) && file.uid() != user {
        return Some(Obstacle::GainsUser);
    }
    (has(SET_GROUP_ID) && file.gid() != group).then_some(Obstacle::GainsGroup)
}

/// Types of program headers (elf.h).
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;

/// Returns the obstacle of an ELF executable, if any. Other files, as scripts, have none here:
/// their interpreter decides.
fn obstacle(file: &[u8]) -> Option<Obstacle> {
    // Only 64-bit little-endian ELF files run on this machine.
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table_offset = usize::try_from(u64::from_le_bytes(array(file, 32)?)).ok()?;
    let size = usize::from(u16::from_le_bytes(array(file, 54)?));
    let count = usize::from(u16::from_le_bytes(array(file, 56)?));
    let (mut has_interpreter, mut is_go) = (false, false);
    for number in 0..count {
        let offset = table_offset.checked_add(number * size)?;
        match u32::from_le_bytes(array(file, offset)?) {
            PT_INTERP => has_interpreter = true,
            PT_NOTE => {
                let start = usize::try_from(u64::from_le_bytes(array(file, offset + 8)?)).ok()?;
                let len = usize::try_from(u64::from_le_bytes(array(file, offset + 32)?)).ok()?;
                let notes = file.get(start..start.checked_add(len)?)?;
                // Owner of the build id note of Go executables.
                is_go |= notes.windows(4).any(|owner| owner == b"Go\0\0");
            }
            _ => {}
        }
    }
    match (is_go, has_interpreter) {
        (true, _) => Some(Obstacle::Go),
        (false, false) => Some(Obstacle::Static),
        (false, true) => None,
    }
}

fn array<const N: usize>(file: &[u8], offset: usize) -> Option<[u8; N]> {
    file.get(offset..offset.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with one program header of each of `kinds`, and the note `note`.
    fn program(kinds: &[u32], note: &[u8]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        file[32] = 64;
        file[54] = 56;
        file[56] = kinds.len() as u8;
        let data = 64 + 56 * kinds.len();
        for kind in kinds {
            let mut header = vec![0; 56];
            header[..4].copy_from_slice(&kind.to_le_bytes());
            header[8..16].copy_from_slice(&(data as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(note.len() as u64).to_le_bytes());
            file.extend(header);
        }
        file.extend(note);
        file
    }

    #[test]
    fn recognizes_go_and_static_executables() {
        assert_eq!(obstacle(&program(&[PT_INTERP], b"")), None);
        assert_eq!(obstacle(&program(&[1], b"")), Some(Obstacle::Static));
        let go = b"\x04\0\0\0\x53\0\0\0\x04\0\0\0Go\0\0";
        assert_eq!(obstacle(&program(&[PT_INTERP, PT_NOTE], go)), Some(Obstacle::Go));
        assert_eq!(obstacle(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn damaged_file_does_not_panic() {
        let whole = program(&[PT_INTERP, PT_NOTE], b"note");
        for len in 0..whole.len() {
            let _ = obstacle(&whole[..len]);
        }
        let mut far = whole;
        far[32..40].fill(0xff);
        let _ = obstacle(&far);
    }

    #[test]
    fn accepts_this_test_executable() {
        assert!(check(&std::env::current_exe().unwrap()).is_ok());
    }
}
