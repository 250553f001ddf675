//! Service: answers one remote procedure call.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::{io, mem};

use nfs3_types::nfs3::NFS_PROGRAM;
use nfs3_types::rpc::accept_stat_data;
use nfs3_types::{mount as mount_protocol, nfs3};

use super::arguments::{Arguments, Malformed};
use super::export::Export;
use super::limits::NfsLimits;
use super::records::append_record;
use super::rpc::{Call, InvalidCall, pack, pack_accepted, pack_denied};
use super::{listing, mount, procedures};
use crate::ServeCounters;

/// Version of both protocols.
const VERSION: u32 = 3;

/// Procedures of the mount protocol.
const MOUNT_NULL: u32 = 0;
const MOUNT_MOUNT: u32 = 1;
const MOUNT_DUMP: u32 = 2;
const MOUNT_UNMOUNT: u32 = 3;
const MOUNT_UNMOUNT_ALL: u32 = 4;
const MOUNT_EXPORTS: u32 = 5;

/// NFS service of one directory, independent of sockets.
#[derive(Debug)]
pub struct NfsService {
    settings: RwLock<Settings>,
    counters: ServeCounters,
}

#[derive(Debug)]
struct Settings {
    export: Arc<Export>,
    limits: NfsLimits,
}

/// Call that was refused before its procedure ran.
enum Refused {
    Arguments,
    Procedure,
}

impl From<Malformed> for Refused {
    fn from(_: Malformed) -> Self {
        Self::Arguments
    }
}

impl NfsService {
    /// Serves a directory.
    ///
    /// # Errors
    /// When there is no such directory, or the process may not open it.
    pub fn new(directory: &Path, limits: NfsLimits) -> io::Result<Self> {
        let export = Arc::new(Export::open(directory)?);
        let settings = RwLock::new(Settings { export, limits });
        Ok(Self { settings, counters: ServeCounters::new() })
    }

    /// Serves another directory, with other limits, from the next call on. Handles of the directory
    /// before are stale then.
    pub fn replace_settings(&self, export: Export, limits: NfsLimits) {
        let settings = Settings { export: Arc::new(export), limits };
        let mut current = self.settings.write().unwrap_or_else(PoisonError::into_inner);
        drop(mem::replace(&mut *current, settings));
    }

    /// Calls and replies.
    pub fn counters(&self) -> &ServeCounters {
        &self.counters
    }

    pub(super) fn limits(&self) -> NfsLimits {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).limits
    }

    fn export(&self) -> Arc<Export> {
        Arc::clone(&self.settings.read().unwrap_or_else(PoisonError::into_inner).export)
    }

    /// Answers a call. Appends the reply to `replies`, as a record.
    ///
    /// # Errors
    /// When the message is no call: its stream is of no further use.
    pub(super) fn respond(&self, message: &[u8], replies: &mut Vec<u8>) -> Result<(), Malformed> {
        ServeCounters::add(&self.counters.requests, 1);
        match Call::parse(message) {
            Ok(call) => append_record(replies, |reply| self.execute(&call, reply)),
            Err(InvalidCall::Denied(xid, refusal)) => {
                append_record(replies, |reply| pack_denied(xid, refusal, reply));
            }
            Err(InvalidCall::NotACall) => return Err(Malformed),
        }
        ServeCounters::add(&self.counters.replies, 1);
        Ok(())
    }

    fn execute(&self, call: &Call<'_>, reply: &mut Vec<u8>) {
        let start = reply.len();
        if call.program != nfs3::PROGRAM && call.program != mount_protocol::PROGRAM {
            return pack_accepted(call.xid, accept_stat_data::PROG_UNAVAIL, reply);
        }
        if call.version != VERSION {
            let mismatch = accept_stat_data::PROG_MISMATCH { low: VERSION, high: VERSION };
            return pack_accepted(call.xid, mismatch, reply);
        }
        pack_accepted(call.xid, accept_stat_data::SUCCESS, reply);
        let export = self.export();
        let result = match call.program {
            nfs3::PROGRAM => execute_nfs(&export, call.procedure, call.arguments, reply),
            _ => execute_mount(&export, call.procedure, call.arguments, reply),
        };
        let refused = match result {
            Ok(()) => return,
            Err(Refused::Arguments) => accept_stat_data::GARBAGE_ARGS,
            Err(Refused::Procedure) => accept_stat_data::PROC_UNAVAIL,
        };
        reply.truncate(start);
        pack_accepted(call.xid, refused, reply);
    }
}

fn execute_nfs(
    export: &Export,
    procedure: u32,
    arguments: Arguments<'_>,
    reply: &mut Vec<u8>,
) -> Result<(), Refused> {
    use NFS_PROGRAM::*;
    use procedures::pack_outcome;

    match NFS_PROGRAM::try_from(procedure).map_err(|_| Refused::Procedure)? {
        NFSPROC3_NULL => {}
        NFSPROC3_GETATTR => {
            pack_outcome(&procedures::get_attributes(export, arguments)?, 0, reply);
        }
        NFSPROC3_LOOKUP => pack_outcome(&procedures::lookup(export, arguments)?, 1, reply),
        NFSPROC3_ACCESS => pack_outcome(&procedures::access(export, arguments)?, 1, reply),
        NFSPROC3_READLINK => pack_outcome(&procedures::read_link(export, arguments)?, 1, reply),
        NFSPROC3_READ => pack_outcome(&procedures::read(export, arguments)?, 1, reply),
        NFSPROC3_READDIR => pack_outcome(&listing::read_directory(export, arguments)?, 1, reply),
        NFSPROC3_READDIRPLUS => {
            pack_outcome(&listing::read_directory_plus(export, arguments)?, 1, reply);
        }
        NFSPROC3_FSSTAT => {
            pack_outcome(&procedures::file_system_usage(export, arguments)?, 1, reply);
        }
        NFSPROC3_FSINFO => {
            pack_outcome(&procedures::file_system_limits(export, arguments)?, 1, reply);
        }
        NFSPROC3_PATHCONF => pack_outcome(&procedures::path_limits(export, arguments)?, 1, reply),
        // Attributes before and after, of two directories for RENAME.
        NFSPROC3_RENAME => refuse_write(4, reply),
        // Attributes of the file, and before and after of the directory.
        NFSPROC3_LINK => refuse_write(3, reply),
        NFSPROC3_SETATTR | NFSPROC3_WRITE | NFSPROC3_CREATE | NFSPROC3_MKDIR | NFSPROC3_SYMLINK
        | NFSPROC3_MKNOD | NFSPROC3_REMOVE | NFSPROC3_RMDIR | NFSPROC3_COMMIT => {
            refuse_write(2, reply);
        }
    }
    Ok(())
}

fn refuse_write(absent_attributes: usize, reply: &mut Vec<u8>) {
    let refused: Result<u32, _> = Err(nfs3::nfsstat3::NFS3ERR_ROFS);
    procedures::pack_outcome(&refused, absent_attributes, reply);
}

fn execute_mount(
    export: &Export,
    procedure: u32,
    arguments: Arguments<'_>,
    reply: &mut Vec<u8>,
) -> Result<(), Refused> {
    match procedure {
        // Clients are not recorded, so there are none to list or to forget.
        MOUNT_NULL | MOUNT_UNMOUNT | MOUNT_UNMOUNT_ALL => {}
        MOUNT_MOUNT => mount::mount(export, arguments, reply)?,
        MOUNT_DUMP => pack(&false, reply),
        MOUNT_EXPORTS => mount::list_exports(reply),
        _ => return Err(Refused::Procedure),
    }
    Ok(())
}
