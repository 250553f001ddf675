//! Status codes of NFS for errors of the kernel.

use nfs3_types::nfs3::nfsstat3;
use rustix::io::Errno;

/// Returns the status for an error of a call on a file.
pub(super) fn status_of(error: Errno) -> nfsstat3 {
    match error {
        Errno::NOENT => nfsstat3::NFS3ERR_NOENT,
        // XDEV and LOOP: the path leads out of the export.
        Errno::ACCESS | Errno::PERM | Errno::XDEV | Errno::LOOP => nfsstat3::NFS3ERR_ACCES,
        Errno::NOTDIR => nfsstat3::NFS3ERR_NOTDIR,
        Errno::ISDIR => nfsstat3::NFS3ERR_ISDIR,
        Errno::INVAL => nfsstat3::NFS3ERR_INVAL,
        Errno::NAMETOOLONG => nfsstat3::NFS3ERR_NAMETOOLONG,
        Errno::STALE => nfsstat3::NFS3ERR_STALE,
        Errno::IO => nfsstat3::NFS3ERR_IO,
        // Out of descriptors or memory: the client tries again.
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN => nfsstat3::NFS3ERR_JUKEBOX,
        _ => nfsstat3::NFS3ERR_SERVERFAULT,
    }
}
