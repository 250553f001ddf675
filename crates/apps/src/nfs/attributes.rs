//! Attributes of files.

use std::os::fd::AsFd;

use nfs3_types::nfs3::{fattr3, ftype3, nfstime3, specdata3};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, StatxTimestamp, statx};
use rustix::io::Errno;

/// Reads the attributes of an open file.
pub(super) fn attributes_of(file: impl AsFd) -> Result<Statx, Errno> {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

/// Reads the attributes of a file in a directory. A link is not followed.
pub(super) fn attributes_at(directory: impl AsFd, name: &[u8]) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

pub(super) fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Attributes as NFS has them.
pub(super) fn encode_attributes(stat: &Statx) -> fattr3 {
    let type_ = match file_type(stat) {
        FileType::Directory => ftype3::NF3DIR,
        FileType::Symlink => ftype3::NF3LNK,
        FileType::BlockDevice => ftype3::NF3BLK,
        FileType::CharacterDevice => ftype3::NF3CHR,
        FileType::Socket => ftype3::NF3SOCK,
        FileType::Fifo => ftype3::NF3FIFO,
        _ => ftype3::NF3REG,
    };
    fattr3 {
        type_,
        mode: u32::from(stat.stx_mode) & 0o7777,
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size: stat.stx_size,
        used: stat.stx_blocks.saturating_mul(512),
        rdev: specdata3 { specdata1: stat.stx_rdev_major, specdata2: stat.stx_rdev_minor },
        fsid: u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor),
        fileid: stat.stx_ino,
        atime: time(&stat.stx_atime),
        mtime: time(&stat.stx_mtime),
        ctime: time(&stat.stx_ctime),
    }
}

/// Times before 1970 become 1970, as NFS has no others.
fn time(timestamp: &StatxTimestamp) -> nfstime3 {
    let seconds = timestamp.tv_sec.clamp(0, u32::MAX.into()) as u32;
    nfstime3 { seconds, nseconds: timestamp.tv_nsec }
}
