//! Remote procedure calls (RFC 5531): headers of calls and replies.

use nfs3_types::rpc::{
    accept_stat_data, accepted_reply, auth_stat, msg_body, opaque_auth, rejected_reply, reply_body,
    rpc_msg,
};
use nfs3_types::xdr_codec::Pack;

use super::arguments::{Arguments, Malformed};

const VERSION: u32 = 2;
const CALL: u32 = 0;

/// Maximum size of credentials and of a verifier.
const MAX_AUTH_BYTES: usize = 400;

/// Flavors of credentials that are accepted: none, and users by number. Everyone may read what the
/// server may read, so nothing depends on the user.
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;

/// Call of one procedure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'c> {
    pub(super) xid: u32,
    pub(super) program: u32,
    pub(super) version: u32,
    pub(super) procedure: u32,
    pub(super) arguments: Arguments<'c>,
}

/// Message that is no call that can be executed.
#[derive(Debug)]
pub(super) enum InvalidCall {
    /// The bytes are no call: the stream is of no further use.
    NotACall,
    /// Refused with this reply.
    Denied(u32, rejected_reply),
}

impl From<Malformed> for InvalidCall {
    fn from(_: Malformed) -> Self {
        Self::NotACall
    }
}

impl<'c> Call<'c> {
    pub(super) fn parse(message: &'c [u8]) -> Result<Self, InvalidCall> {
        let mut rest = Arguments::new(message);
        let (xid, kind) = (rest.u32()?, rest.u32()?);
        if kind != CALL {
            return Err(InvalidCall::NotACall);
        }
        if rest.u32()? != VERSION {
            let mismatch = rejected_reply::rpc_mismatch(VERSION, VERSION);
            return Err(InvalidCall::Denied(xid, mismatch));
        }
        let (program, version, procedure) = (rest.u32()?, rest.u32()?, rest.u32()?);
        let flavor = rest.u32()?;
        rest.opaque(MAX_AUTH_BYTES)?;
        rest.u32()?;
        rest.opaque(MAX_AUTH_BYTES)?;
        if flavor != AUTH_NONE && flavor != AUTH_SYS {
            let refused = rejected_reply::auth_error(auth_stat::AUTH_REJECTEDCRED);
            return Err(InvalidCall::Denied(xid, refused));
        }
        Ok(Self { xid, program, version, procedure, arguments: rest })
    }
}

/// Encodes a value. A vector takes whatever is written to it.
pub(super) fn pack(value: &impl Pack, reply: &mut Vec<u8>) {
    // Fails only for objects above 4 GiB, and replies are bounded.
    let _ = value.pack(reply);
}

/// Encodes the header of a reply to an accepted call.
pub(super) fn pack_accepted(xid: u32, reply_data: accept_stat_data, reply: &mut Vec<u8>) {
    let accepted = accepted_reply { verf: opaque_auth::default(), reply_data };
    pack(&rpc_msg { xid, body: msg_body::REPLY(reply_body::MSG_ACCEPTED(accepted)) }, reply);
}

/// Encodes the refusal of a call.
pub(super) fn pack_denied(xid: u32, refusal: rejected_reply, reply: &mut Vec<u8>) {
    pack(&rpc_msg { xid, body: msg_body::REPLY(reply_body::MSG_DENIED(refusal)) }, reply);
}
