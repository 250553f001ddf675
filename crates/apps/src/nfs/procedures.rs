//! Procedures of NFS version 3 (RFC 1813 section 3.3) on one file.

use std::os::fd::AsFd;

use nfs3_types::nfs3::{
    ACCESS3_EXECUTE, ACCESS3_LOOKUP, ACCESS3_READ, ACCESS3resok, FSF3_HOMOGENEOUS, FSF3_SYMLINK,
    FSINFO3resok, FSSTAT3resok, GETATTR3resok, LOOKUP3resok, PATHCONF3resok, READLINK3resok,
    nfsstat3, nfstime3, post_op_attr,
};
use nfs3_types::xdr_codec::{Opaque, Pack};
use rustix::fs::{FileType, Statx, fstatvfs, readlinkat};
use rustix::io::{Errno, pread};

use super::arguments::{Arguments, Malformed};
use super::attributes::{encode_attributes, file_type};
use super::export::{Export, Purpose};
use super::handle::FileHandle;
use super::rpc::pack;
use super::status::status_of;

/// Maximum size of one read and of one part of a directory, in bytes.
pub(super) const MAX_READ_BYTES: u32 = 64 << 10;

/// Size of a write that a client may try, before the reply tells that nothing can be written. libnfs
/// refuses servers with less.
const MAX_WRITE_BYTES: u32 = 8 << 10;

/// Longest name in a call. A longer name is malformed; a name above the file system's limit is not.
const MAX_NAME_BYTES: usize = 1 << 10;

/// Bits of the mode that permit to execute.
const EXECUTE_BITS: u16 = 0o111;

/// Result of a procedure: its reply, or its status for an error.
pub(super) type Outcome<R> = Result<Result<R, nfsstat3>, Malformed>;

pub(super) fn some_attributes(stat: &Statx) -> post_op_attr {
    post_op_attr::Some(encode_attributes(stat))
}

/// Decodes the handle that begins the arguments.
pub(super) fn parse_handle(
    arguments: &mut Arguments<'_>,
) -> Result<Result<FileHandle, nfsstat3>, Malformed> {
    Ok(FileHandle::parse(arguments)?.ok_or(nfsstat3::NFS3ERR_BADHANDLE))
}

pub(super) fn get_attributes(export: &Export, mut arguments: Arguments<'_>) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    let opened = handle.and_then(|handle| export.open_file(&handle, Purpose::Attributes));
    Ok(opened.map(|opened| GETATTR3resok { obj_attributes: encode_attributes(&opened.stat) }))
}

pub(super) fn lookup(export: &Export, mut arguments: Arguments<'_>) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    let name = arguments.opaque(MAX_NAME_BYTES)?;
    Ok(handle.and_then(|handle| {
        let directory = export.open_directory(&handle)?;
        let found = export.lookup(&handle, &directory, name)?;
        Ok(LOOKUP3resok {
            object: found.handle.encode(),
            obj_attributes: some_attributes(&found.stat),
            dir_attributes: some_attributes(&directory.stat),
        })
    }))
}

/// Every client may do what the server itself may.
pub(super) fn access(export: &Export, mut arguments: Arguments<'_>) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    let requested = arguments.u32()?;
    Ok(handle.and_then(|handle| {
        let opened = export.open_file(&handle, Purpose::Attributes)?;
        let is_readable = |purpose| export.open_file(&handle, purpose).is_ok();
        let mut granted = 0;
        match file_type(&opened.stat) {
            FileType::Directory => {
                if is_readable(Purpose::List) {
                    granted |= ACCESS3_READ;
                }
                if Export::may_look_up(&opened) {
                    granted |= ACCESS3_LOOKUP;
                }
            }
            FileType::RegularFile if is_readable(Purpose::Read) => {
                granted |= ACCESS3_READ;
                if opened.stat.stx_mode & EXECUTE_BITS != 0 {
                    granted |= ACCESS3_EXECUTE;
                }
            }
            FileType::Symlink => granted |= ACCESS3_READ,
            _ => {}
        }
        let obj_attributes = some_attributes(&opened.stat);
        Ok(ACCESS3resok { obj_attributes, access: granted & requested })
    }))
}

pub(super) fn read_link(export: &Export, mut arguments: Arguments<'_>) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    Ok(handle.and_then(|handle| {
        let opened = export.open_file(&handle, Purpose::Attributes)?;
        if file_type(&opened.stat) != FileType::Symlink {
            return Err(nfsstat3::NFS3ERR_INVAL);
        }
        let target = readlinkat(&opened.file, c"", Vec::new()).map_err(status_of)?;
        let symlink_attributes = some_attributes(&opened.stat);
        Ok(READLINK3resok { symlink_attributes, data: target.into_bytes().into() })
    }))
}

/// ReadReply of a file.
pub(super) struct ReadReply {
    attributes: post_op_attr,
    is_last: bool,
    data: Vec<u8>,
}

impl Pack for ReadReply {
    fn packed_size(&self) -> usize {
        self.attributes.packed_size() + 8 + Opaque::borrowed(&self.data).packed_size()
    }

    fn pack(&self, out: &mut impl std::io::Write) -> nfs3_types::xdr_codec::Result<usize> {
        let count = self.data.len() as u32;
        let head = self.attributes.pack(out)? + count.pack(out)? + self.is_last.pack(out)?;
        Ok(head + Opaque::borrowed(&self.data).pack(out)?)
    }
}

pub(super) fn read(export: &Export, mut arguments: Arguments<'_>) -> Outcome<ReadReply> {
    let handle = parse_handle(&mut arguments)?;
    let (offset, count) = (arguments.u64()?, arguments.u32()?);
    Ok(handle.and_then(|handle| {
        let opened = export.open_file(&handle, Purpose::Read)?;
        match file_type(&opened.stat) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(nfsstat3::NFS3ERR_ISDIR),
            _ => return Err(nfsstat3::NFS3ERR_INVAL),
        }
        let len = opened.stat.stx_size.saturating_sub(offset).min(MAX_READ_BYTES.into());
        let mut data = vec![0; len.min(count.into()) as usize];
        let read = read_at(&opened.file, &mut data, offset).map_err(status_of)?;
        let is_last = read < data.len() || offset + read as u64 >= opened.stat.stx_size;
        data.truncate(read);
        Ok(ReadReply { attributes: some_attributes(&opened.stat), is_last, data })
    }))
}

/// Fills `data` from a file. Returns less than its length at the end of the file.
fn read_at(file: impl AsFd, data: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut filled = 0;
    while filled < data.len() {
        match pread(&file, &mut data[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

pub(super) fn file_system_usage(
    export: &Export,
    mut arguments: Arguments<'_>,
) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    Ok(handle.and_then(|handle| {
        let opened = export.open_file(&handle, Purpose::Attributes)?;
        let usage = fstatvfs(&opened.file).map_err(status_of)?;
        Ok(FSSTAT3resok {
            obj_attributes: some_attributes(&opened.stat),
            tbytes: usage.f_blocks.saturating_mul(usage.f_frsize),
            fbytes: usage.f_bfree.saturating_mul(usage.f_frsize),
            abytes: usage.f_bavail.saturating_mul(usage.f_frsize),
            tfiles: usage.f_files,
            ffiles: usage.f_ffree,
            afiles: usage.f_favail,
            invarsec: 0,
        })
    }))
}

pub(super) fn file_system_limits(
    export: &Export,
    mut arguments: Arguments<'_>,
) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    let opened = handle.and_then(|handle| export.open_file(&handle, Purpose::Attributes));
    Ok(opened.map(|opened| FSINFO3resok {
        obj_attributes: some_attributes(&opened.stat),
        rtmax: MAX_READ_BYTES,
        rtpref: MAX_READ_BYTES,
        rtmult: 4096,
        wtmax: MAX_WRITE_BYTES,
        wtpref: MAX_WRITE_BYTES,
        wtmult: 4096,
        dtpref: MAX_READ_BYTES,
        maxfilesize: i64::MAX as u64,
        time_delta: nfstime3 { seconds: 0, nseconds: 1 },
        properties: FSF3_SYMLINK | FSF3_HOMOGENEOUS,
    }))
}

pub(super) fn path_limits(export: &Export, mut arguments: Arguments<'_>) -> Outcome<impl Pack> {
    let handle = parse_handle(&mut arguments)?;
    let opened = handle.and_then(|handle| export.open_file(&handle, Purpose::Attributes));
    Ok(opened.map(|opened| PATHCONF3resok {
        obj_attributes: some_attributes(&opened.stat),
        linkmax: u32::MAX,
        name_max: 255,
        no_trunc: true,
        chown_restricted: true,
        case_insensitive: false,
        case_preserving: true,
    }))
}

/// Encodes the outcome of a procedure. An error has its status and `absent_attributes` optional
/// parts, all of them absent.
pub(super) fn pack_outcome(
    outcome: &Result<impl Pack, nfsstat3>,
    absent_attributes: usize,
    reply: &mut Vec<u8>,
) {
    match outcome {
        Ok(value) => {
            pack(&nfsstat3::NFS3_OK, reply);
            pack(value, reply);
        }
        Err(status) => {
            pack(status, reply);
            (0..absent_attributes).for_each(|_| pack(&false, reply));
        }
    }
}
