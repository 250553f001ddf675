//! READDIR and READDIRPLUS (RFC 1813 sections 3.3.16 and 3.3.17).
//!
//! A cookie is the file system's own position in the directory. The position stays valid when the
//! directory changes and when the server restarts, and the server stores nothing for a listing.

use std::mem::MaybeUninit;

use nfs3_types::nfs3::{
    READDIR3resok, READDIRPLUS3resok, cookieverf3, dirlist3, dirlistplus3, entry3, entryplus3,
    nfsstat3, post_op_attr, post_op_fh3,
};
use nfs3_types::xdr_codec::{List, Pack};
use rustix::fs::{RawDir, RawDirEntry, SeekFrom, seek};

use super::arguments::Arguments;
use super::attributes::{attributes_at, encode_attributes};
use super::export::{Export, OpenFile, Purpose};
use super::handle::FileHandle;
use super::procedures::{MAX_READ_BYTES, Outcome, parse_handle, some_attributes};
use super::status::status_of;

/// Bytes of directory entries read at a time.
const BUFFER_BYTES: usize = 16 << 10;

/// Bytes of a reply around the entries, with the directory's attributes.
const FRAME_BYTES: usize = 128;

/// Bytes in a list before each entry.
const ENTRY_FLAG_BYTES: usize = 4;

/// Lists names.
pub(super) fn read_directory(
    export: &Export,
    mut arguments: Arguments<'_>,
) -> Outcome<impl Pack + use<>> {
    let handle = parse_handle(&mut arguments)?;
    let (cookie, _verifier, max_bytes) = (arguments.u64()?, arguments.u64()?, arguments.u32()?);
    Ok(handle.and_then(|handle| {
        let directory = export.open_file(&handle, Purpose::List)?;
        let mut entries = Entries::new(max_bytes);
        let eof = read_entries(&directory, cookie, |entry| {
            entries.push(entry3 {
                fileid: file_id(export, &handle, entry),
                name: entry.file_name().to_bytes().to_vec().into(),
                cookie: entry.next_entry_cookie(),
            })
        })?;
        Ok(READDIR3resok {
            dir_attributes: some_attributes(&directory.stat),
            cookieverf: cookieverf3::default(),
            reply: dirlist3 { entries: entries.finish(eof)?, eof },
        })
    }))
}

/// Lists names with attributes and handles.
pub(super) fn read_directory_plus(
    export: &Export,
    mut arguments: Arguments<'_>,
) -> Outcome<impl Pack + use<>> {
    let handle = parse_handle(&mut arguments)?;
    let (cookie, _verifier) = (arguments.u64()?, arguments.u64()?);
    let (max_name_bytes, max_bytes) = (arguments.u32()?, arguments.u32()?);
    Ok(handle.and_then(|handle| {
        let directory = export.open_file(&handle, Purpose::List)?;
        let mut entries = Entries::new(max_bytes);
        let mut name_bytes = 0;
        let eof = read_entries(&directory, cookie, |entry| {
            let name = entry.file_name().to_bytes();
            name_bytes += 24 + name.len().next_multiple_of(4);
            if name_bytes > max_name_bytes as usize {
                return false;
            }
            let (name_attributes, name_handle) = describe(export, &handle, &directory, name);
            entries.push(entryplus3 {
                fileid: file_id(export, &handle, entry),
                name: name.to_vec().into(),
                cookie: entry.next_entry_cookie(),
                name_attributes,
                name_handle,
            })
        })?;
        Ok(READDIRPLUS3resok {
            dir_attributes: some_attributes(&directory.stat),
            cookieverf: cookieverf3::default(),
            reply: dirlistplus3 { entries: entries.finish(eof)?, eof },
        })
    }))
}

/// Number of an entry. Above the top directory is the top directory.
fn file_id(export: &Export, directory: &FileHandle, entry: &RawDirEntry<'_>) -> u64 {
    match entry.file_name().to_bytes() {
        b".." if directory.file_id == export.root().file_id => directory.file_id,
        _ => entry.ino(),
    }
}

/// Attributes and handle of an entry. A client looks up `.` and `..` when it needs them, and
/// whatever was removed meanwhile.
fn describe(
    export: &Export,
    handle: &FileHandle,
    directory: &OpenFile,
    name: &[u8],
) -> (post_op_attr, post_op_fh3) {
    let found = match name {
        b"." | b".." => None,
        name => attributes_at(&directory.file, name)
            .ok()
            .and_then(|stat| Some((export.enter(handle, name, &stat)?, stat))),
    };
    match found {
        Some((handle, stat)) => {
            (post_op_attr::Some(encode_attributes(&stat)), post_op_fh3::Some(handle.encode()))
        }
        None => (post_op_attr::None, post_op_fh3::None),
    }
}

/// Passes the entries from `cookie` on until `push` refuses one. Returns true at the end of the
/// directory.
fn read_entries(
    directory: &OpenFile,
    cookie: u64,
    mut push: impl FnMut(&RawDirEntry<'_>) -> bool,
) -> Result<bool, nfsstat3> {
    if cookie != 0 {
        seek(&directory.file, SeekFrom::Start(cookie)).map_err(|_| nfsstat3::NFS3ERR_BAD_COOKIE)?;
    }
    let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
    let mut entries = RawDir::new(&directory.file, &mut buffer);
    while let Some(entry) = entries.next() {
        if !push(&entry.map_err(status_of)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Entries of one reply, as many as its size permits.
struct Entries<E> {
    entries: Vec<E>,
    bytes_left: usize,
}

impl<E: Pack> Entries<E> {
    fn new(max_bytes: u32) -> Self {
        let max_bytes = max_bytes.min(MAX_READ_BYTES) as usize;
        Self { entries: Vec::new(), bytes_left: max_bytes.saturating_sub(FRAME_BYTES) }
    }

    /// Adds an entry; returns false if the reply has no space for it.
    fn push(&mut self, entry: E) -> bool {
        let bytes = ENTRY_FLAG_BYTES + entry.packed_size();
        match self.bytes_left.checked_sub(bytes) {
            Some(bytes_left) => {
                self.bytes_left = bytes_left;
                self.entries.push(entry);
                true
            }
            None => false,
        }
    }

    /// A reply without entries that is not the last would never end.
    fn finish(self, is_last: bool) -> Result<List<E>, nfsstat3> {
        if self.entries.is_empty() && !is_last {
            return Err(nfsstat3::NFS3ERR_TOOSMALL);
        }
        Ok(List(self.entries))
    }
}
