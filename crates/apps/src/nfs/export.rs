//! Directory that is served: finds files by handles and names.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nfs3_types::nfs3::nfsstat3;
use rustix::fs::{FileType, Mode, OFlags, Statx, open, openat, openat2};
use rustix::io::Errno;

use super::attributes::{attributes_at, attributes_of, file_type};
use super::handle::FileHandle;
use super::names::{Location, Names};
use super::search::{MAX_DEPTH, RESOLVE, Search, find};
use super::status::status_of;

/// Longest name of a file.
const MAX_NAME_BYTES: usize = 255;

/// Directory that is served.
#[derive(Debug)]
pub struct Export {
    directory: OwnedFd,
    root: FileHandle,
    device: (u32, u32),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    names: Names,
    search: Search,
}

/// Use that a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Attributes only: needs no permission to read.
    Attributes,
    Read,
    List,
}

/// Open file and its attributes.
pub(super) struct OpenFile {
    pub(super) file: OwnedFd,
    pub(super) stat: Statx,
}

/// File that a name leads to.
pub(super) struct Found {
    pub(super) handle: FileHandle,
    pub(super) stat: Statx,
}

impl Purpose {
    fn flags(self) -> OFlags {
        let flags = match self {
            Self::Attributes => OFlags::PATH,
            Self::Read => OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
            Self::List => OFlags::RDONLY | OFlags::DIRECTORY,
        };
        flags | OFlags::CLOEXEC | OFlags::NOFOLLOW
    }
}

impl Export {
    /// Opens a directory.
    ///
    /// # Errors
    /// When there is no such directory, or the process may not open it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(path, flags, Mode::empty())?;
        let stat = attributes_of(&directory)?;
        let root = FileHandle::root(&stat);
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        Ok(Self { directory, root, device, state: Mutex::default() })
    }

    pub(super) fn root(&self) -> &FileHandle {
        &self.root
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file of a handle.
    pub(super) fn open_file(
        &self,
        handle: &FileHandle,
        purpose: Purpose,
    ) -> Result<OpenFile, nfsstat3> {
        if handle.export != self.root.export {
            return Err(nfsstat3::NFS3ERR_STALE);
        }
        let mut state = self.lock();
        if let Some(path) = self.known_path(&mut state.names, handle.file_id) {
            match self.open_path(&path, handle, purpose) {
                Err(nfsstat3::NFS3ERR_STALE) => {}
                opened => return opened,
            }
        }
        // The file was moved, or this server has not seen it yet.
        if !state.search.may_begin() {
            return Err(nfsstat3::NFS3ERR_JUKEBOX);
        }
        let names = find(&self.directory, self.root.file_id, handle);
        state.search.on_end(names.is_some());
        let Some(names) = names else { return Err(nfsstat3::NFS3ERR_STALE) };
        for (file_id, location) in names {
            state.names.insert(file_id, location);
        }
        let path = self.known_path(&mut state.names, handle.file_id);
        self.open_path(&path.ok_or(nfsstat3::NFS3ERR_STALE)?, handle, purpose)
    }

    /// Path of a file below the directory, as far as names are known.
    fn known_path(&self, names: &mut Names, file_id: u64) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        let mut current = file_id;
        while current != self.root.file_id {
            let location = names.get(current)?;
            current = location.directory_id;
            parts.push(location.name.clone());
            if parts.len() > MAX_DEPTH {
                return None;
            }
        }
        let mut path = b".".to_vec();
        for part in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        Some(path)
    }

    /// Opens a path, if it leads to the file of the handle.
    fn open_path(
        &self,
        path: &[u8],
        handle: &FileHandle,
        purpose: Purpose,
    ) -> Result<OpenFile, nfsstat3> {
        let file = match openat2(&self.directory, path, purpose.flags(), Mode::empty(), RESOLVE) {
            Ok(file) => file,
            // A link is not opened for reading, a file not as a directory.
            Err(error @ (Errno::LOOP | Errno::NOTDIR | Errno::NOENT | Errno::XDEV)) => {
                return match purpose {
                    Purpose::Attributes => Err(nfsstat3::NFS3ERR_STALE),
                    // Tells a file of the wrong type from one that is gone.
                    _ => match self.open_path(path, handle, Purpose::Attributes) {
                        Ok(_) if error == Errno::LOOP => Err(nfsstat3::NFS3ERR_INVAL),
                        Ok(_) => Err(nfsstat3::NFS3ERR_NOTDIR),
                        Err(error) => Err(error),
                    },
                };
            }
            Err(error) => return Err(status_of(error)),
        };
        let stat = attributes_of(&file).map_err(status_of)?;
        match handle.is_of(&stat) && self.is_inside(&stat) {
            true => Ok(OpenFile { file, stat }),
            false => Err(nfsstat3::NFS3ERR_STALE),
        }
    }

    fn is_inside(&self, stat: &Statx) -> bool {
        self.device == (stat.stx_dev_major, stat.stx_dev_minor)
    }

    /// Opens a directory for the lookup of names in it.
    pub(super) fn open_directory(&self, handle: &FileHandle) -> Result<OpenFile, nfsstat3> {
        let opened = self.open_file(handle, Purpose::Attributes)?;
        match file_type(&opened.stat) {
            FileType::Directory => Ok(opened),
            _ => Err(nfsstat3::NFS3ERR_NOTDIR),
        }
    }

    /// Looks up a name in an open directory.
    pub(super) fn lookup(
        &self,
        handle: &FileHandle,
        directory: &OpenFile,
        name: &[u8],
    ) -> Result<Found, nfsstat3> {
        match name {
            b"" => return Err(nfsstat3::NFS3ERR_INVAL),
            b"." => return Ok(Found { handle: handle.clone(), stat: directory.stat }),
            b".." => return self.lookup_parent(handle, directory),
            _ if name.len() > MAX_NAME_BYTES => return Err(nfsstat3::NFS3ERR_NAMETOOLONG),
            _ if name.contains(&b'/') || name.contains(&0) => {
                return Err(nfsstat3::NFS3ERR_INVAL);
            }
            _ => {}
        }
        let stat = attributes_at(&directory.file, name).map_err(status_of)?;
        self.enter(handle, name, &stat)
            .map(|handle| Found { handle, stat })
            .ok_or(nfsstat3::NFS3ERR_ACCES)
    }

    fn lookup_parent(&self, handle: &FileHandle, directory: &OpenFile) -> Result<Found, nfsstat3> {
        if handle.file_id == self.root.file_id {
            return Ok(Found { handle: handle.clone(), stat: directory.stat });
        }
        let stat = attributes_at(&directory.file, b"..").map_err(status_of)?;
        Ok(Found { handle: handle.parent(&self.root, &stat), stat })
    }

    /// Makes the handle of a file in a directory, and notes where the file is. `None` for a file of
    /// another file system.
    pub(super) fn enter(
        &self,
        directory: &FileHandle,
        name: &[u8],
        stat: &Statx,
    ) -> Option<FileHandle> {
        if !self.is_inside(stat) {
            return None;
        }
        let location = Location { directory_id: directory.file_id, name: name.into() };
        self.lock().names.insert(stat.stx_ino, location);
        Some(directory.child(&self.root, stat))
    }

    /// Returns true if names can be looked up in a directory.
    pub(super) fn may_look_up(directory: &OpenFile) -> bool {
        openat(&directory.file, c".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).is_ok()
    }
}
