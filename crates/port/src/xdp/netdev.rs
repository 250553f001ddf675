//! Settings of single NAPI instances, by the kernel's generic netlink family
//! `netdev` (Linux 6.13 and newer; `Documentation/netlink/specs/netdev.yaml`).
//!
//! Unlike `/sys`, netlink always speaks about the network namespace of the
//! thread that asks.

use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// `NLM_F_REQUEST`, `NLM_F_ACK` and `NLM_F_DUMP` of `linux/netlink.h`.
const REQUEST: u16 = 0x001;
const ACK: u16 = 0x004;
const DUMP: u16 = 0x300;

/// Types of netlink messages that are not a family's.
const TYPE_ERROR: u16 = 2;
const TYPE_DONE: u16 = 3;
const TYPE_CONTROL: u16 = 0x10;

/// `CTRL_CMD_GETFAMILY` and its attributes, of `linux/genetlink.h`.
const COMMAND_GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// `NETDEV_CMD_NAPI_GET` and `_SET` and their attributes, of `linux/netdev.h`.
const COMMAND_NAPI_GET: u8 = 11;
const COMMAND_NAPI_SET: u8 = 14;
const NAPI_INTERFACE: u16 = 1;
const NAPI_ID: u16 = 2;
const NAPI_DEFER_HARD_IRQS: u16 = 5;
const NAPI_GRO_FLUSH_TIMEOUT: u16 = 6;

/// `struct nlmsghdr` and `struct genlmsghdr`, in bytes.
const NETLINK_HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;

/// More messages than this are no answer.
const MESSAGE_LIMIT: usize = 4096;

/// One NAPI instance and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Napi {
    pub id: u32,
    pub defer_hard_irqs: u32,
    pub gro_flush_timeout_ns: u64,
}

/// A socket of the family.
pub(super) struct Netdev {
    socket: OwnedFd,
    family: u16,
}

impl Netdev {
    /// Opens a socket and finds the family's number.
    pub(super) fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(rustix::net::netlink::GENERIC),
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(1)))?;
        let mut netdev = Self { socket, family: TYPE_CONTROL };
        let mut request = netdev.request(COMMAND_GET_FAMILY, ACK);
        request.attribute(FAMILY_NAME, b"netdev\0");
        let mut family = None;
        netdev.ask(request, |body| {
            family = attribute(body, FAMILY_ID)
                .and_then(|v| Some(u16::from_ne_bytes(v.try_into().ok()?)));
        })?;
        netdev.family = family.ok_or(io::ErrorKind::Unsupported)?;
        Ok(netdev)
    }

    /// The instances of an interface.
    pub(super) fn napis(&self, interface_index: u32) -> io::Result<Vec<Napi>> {
        let mut request = self.request(COMMAND_NAPI_GET, DUMP);
        request.attribute(NAPI_INTERFACE, &interface_index.to_ne_bytes());
        let mut napis = Vec::new();
        self.ask(request, |body| {
            let number = |kind| attribute(body, kind).and_then(unsigned);
            // Older kernels list instances without settings.
            if let (Some(id), Some(irqs), Some(timeout)) =
                (number(NAPI_ID), number(NAPI_DEFER_HARD_IRQS), number(NAPI_GRO_FLUSH_TIMEOUT))
            {
                napis.push(Napi {
                    id: id as u32,
                    defer_hard_irqs: irqs as u32,
                    gro_flush_timeout_ns: timeout,
                });
            }
        })?;
        Ok(napis)
    }

    /// Changes the settings of an instance.
    pub(super) fn set(&self, napi: &Napi) -> io::Result<()> {
        let mut request = self.request(COMMAND_NAPI_SET, ACK);
        request.attribute(NAPI_ID, &napi.id.to_ne_bytes());
        request.attribute(NAPI_DEFER_HARD_IRQS, &napi.defer_hard_irqs.to_ne_bytes());
        request.attribute(NAPI_GRO_FLUSH_TIMEOUT, &napi.gro_flush_timeout_ns.to_ne_bytes());
        self.ask(request, |_| {})
    }

    /// Changes how long an instance waits for a poll.
    pub(super) fn set_flush_timeout(&self, id: u32, flush_timeout_ns: u64) -> io::Result<()> {
        let mut request = self.request(COMMAND_NAPI_SET, ACK);
        request.attribute(NAPI_ID, &id.to_ne_bytes());
        request.attribute(NAPI_GRO_FLUSH_TIMEOUT, &flush_timeout_ns.to_ne_bytes());
        self.ask(request, |_| {})
    }

    fn request(&self, command: u8, flags: u16) -> Request {
        Request::new(self.family, command, REQUEST | flags)
    }

    /// Sends a request and hands the body of each answer to `take`.
    fn ask(&self, request: Request, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let bytes = request.finish();
        rustix::net::sendto(
            &self.socket,
            &bytes,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )?;
        let mut buffer = vec![0; 32 << 10];
        for _ in 0..MESSAGE_LIMIT {
            let (len, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..len];
            while let Some((kind, body, after)) = split_message(rest) {
                match kind {
                    TYPE_DONE => return Ok(()),
                    TYPE_ERROR => return error_of(body),
                    kind if kind == self.family => take(body.get(GENERIC_HEADER..).unwrap_or(&[])),
                    _ => {}
                }
                rest = after;
            }
        }
        Err(io::Error::other("netlink did not come to an end"))
    }
}

/// A request that is being written.
struct Request(Vec<u8>);

impl Request {
    fn new(family: u16, command: u8, flags: u16) -> Self {
        let mut bytes = vec![0; NETLINK_HEADER + GENERIC_HEADER];
        bytes[4..6].copy_from_slice(&family.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes[NETLINK_HEADER] = command;
        bytes[NETLINK_HEADER + 1] = 1;
        Self(bytes)
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let len = (ATTRIBUTE_HEADER + value.len()) as u16;
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

/// The type and the body of the first message, and what follows it.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(NETLINK_HEADER..len)?;
    Some((kind, body, bytes.get(len.next_multiple_of(4)..).unwrap_or(&[])))
}

/// The result in an error message; a code of 0 is an acknowledgement.
fn error_of(body: &[u8]) -> io::Result<()> {
    let code = body.get(..4).and_then(|code| Some(i32::from_ne_bytes(code.try_into().ok()?)));
    match code {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The value of the first attribute of a kind.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
        let value = bytes.get(ATTRIBUTE_HEADER..len)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

/// An unsigned integer of four or eight bytes.
fn unsigned(value: &[u8]) -> Option<u64> {
    match value.len() {
        4 => Some(u64::from(u32::from_ne_bytes(value.try_into().ok()?))),
        8 => Some(u64::from_ne_bytes(value.try_into().ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_reads_back() {
        let mut request = Request::new(30, COMMAND_NAPI_SET, REQUEST | ACK);
        request.attribute(NAPI_ID, b"abc");
        request.attribute(NAPI_GRO_FLUSH_TIMEOUT, &200_000_u64.to_ne_bytes());
        let bytes = request.finish();
        let (kind, body, after) = split_message(&bytes).unwrap();
        assert_eq!((kind, body[0], after.len()), (30, COMMAND_NAPI_SET, 0));
        let attributes = &body[GENERIC_HEADER..];
        assert_eq!(attribute(attributes, NAPI_ID), Some(&b"abc"[..]));
        let timeout = attribute(attributes, NAPI_GRO_FLUSH_TIMEOUT).and_then(unsigned);
        assert_eq!(timeout, Some(200_000));
        assert_eq!(attribute(attributes, NAPI_INTERFACE), None);
    }

    #[test]
    fn an_error_message_is_an_error() {
        assert!(error_of(&0_i32.to_ne_bytes()).is_ok());
        let refused = error_of(&(-1_i32).to_ne_bytes()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(1));
        assert!(error_of(&[0]).is_err());
        assert!(error_of(&i32::MIN.to_ne_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_come_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            let mut messages = 0;
            while let Some((_, body, after)) = split_message(rest) {
                let _ = (attribute(body, 1), error_of(body));
                prop_assert!(after.len() < rest.len());
                rest = after;
                messages += 1;
            }
            prop_assert!(messages <= bytes.len() / NETLINK_HEADER);
            let _ = attribute(&bytes, 7);
        }
    }
}
