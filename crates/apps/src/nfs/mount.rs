//! Procedures of the mount protocol, version 3 (RFC 1813 appendix I).

use nfs3_types::mount::{MNTPATHLEN, fhandle3, mountres3_ok, mountstat3};
use nfs3_types::nfs3::nfsstat3;
use nfs3_types::xdr_codec::Opaque;

use super::arguments::{Arguments, Malformed};
use super::export::Export;
use super::handle::FileHandle;
use super::rpc::pack;

/// Flavor of credentials that clients should use: users by number.
const AUTH_SYS: u32 = 1;

/// Name of the export. Clients may mount its directories too.
const EXPORT_NAME: &[u8] = b"/";

/// Gives the handle of a directory, by its path in the export.
pub(super) fn mount(
    export: &Export,
    mut arguments: Arguments<'_>,
    reply: &mut Vec<u8>,
) -> Result<(), Malformed> {
    let path = arguments.opaque(MNTPATHLEN)?;
    match find_directory(export, path) {
        Ok(handle) => {
            pack(&mountstat3::MNT3_OK, reply);
            let fhandle = fhandle3(handle.encode().data);
            pack(&mountres3_ok { fhandle, auth_flavors: vec![AUTH_SYS] }, reply);
        }
        Err(status) => pack(&mount_status(status), reply),
    }
    Ok(())
}

fn find_directory(export: &Export, path: &[u8]) -> Result<FileHandle, nfsstat3> {
    let mut handle = export.root().clone();
    for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
        let directory = export.open_directory(&handle)?;
        handle = export.lookup(&handle, &directory, name)?.handle;
    }
    export.open_directory(&handle)?;
    Ok(handle)
}

fn mount_status(status: nfsstat3) -> mountstat3 {
    match status {
        nfsstat3::NFS3ERR_NOENT => mountstat3::MNT3ERR_NOENT,
        nfsstat3::NFS3ERR_ACCES => mountstat3::MNT3ERR_ACCES,
        nfsstat3::NFS3ERR_NOTDIR => mountstat3::MNT3ERR_NOTDIR,
        nfsstat3::NFS3ERR_INVAL => mountstat3::MNT3ERR_INVAL,
        nfsstat3::NFS3ERR_NAMETOOLONG => mountstat3::MNT3ERR_NAMETOOLONG,
        _ => mountstat3::MNT3ERR_SERVERFAULT,
    }
}

/// Lists the one export, for all clients.
pub(super) fn list_exports(reply: &mut Vec<u8>) {
    pack(&true, reply);
    pack(&Opaque::borrowed(EXPORT_NAME), reply);
    pack(&false, reply);
    pack(&false, reply);
}
