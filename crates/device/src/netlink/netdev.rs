//! Settings of single NAPI instances, by the kernel's generic netlink family
//! `netdev` (Linux 6.13 and newer; `Documentation/netlink/specs/netdev.yaml`).
//!
//! Unlike `/sys`, netlink always refers to the network namespace of the calling thread.

use std::collections::HashMap;
use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// `NLM_F_REQUEST`, `NLM_F_ACK` and `NLM_F_DUMP` of `linux/netlink.h`.
const NLM_F_REQUEST: u16 = 0x001;
const NLM_F_ACK: u16 = 0x004;
const NLM_F_DUMP: u16 = 0x300;

/// Generic netlink message types: `NLMSG_ERROR`, `NLMSG_DONE` and `GENL_ID_CTRL`.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const GENL_ID_CTRL: u16 = 0x10;

/// `CTRL_CMD_GETFAMILY` and its attributes, of `linux/genetlink.h`.
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// `NETDEV_CMD_QUEUE_GET`, its attributes, and the type of receive queues, of `linux/netdev.h`.
const NETDEV_CMD_QUEUE_GET: u8 = 10;
const NETDEV_A_QUEUE_ID: u16 = 1;
const NETDEV_A_QUEUE_IFINDEX: u16 = 2;
const NETDEV_A_QUEUE_TYPE: u16 = 3;
const NETDEV_A_QUEUE_NAPI_ID: u16 = 4;
const NETDEV_QUEUE_TYPE_RX: u64 = 0;

/// `NETDEV_CMD_NAPI_GET` and `_SET` and their attributes, of `linux/netdev.h`.
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_CMD_NAPI_SET: u8 = 14;
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_DEFER_HARD_IRQS: u16 = 5;
const NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT: u16 = 6;
const NETDEV_A_NAPI_IRQ_SUSPEND_TIMEOUT: u16 = 7;

/// Sizes of `struct nlmsghdr`, `struct genlmsghdr` and `struct nlattr`, in bytes.
const NETLINK_HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;

/// Maximum datagrams read for one reply; more are an error.
const MAX_DATAGRAMS: usize = 4096;

/// NAPI instance and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NapiSettings {
    pub(crate) id: u32,
    pub(crate) defer_hard_irqs: u32,
    pub(crate) gro_flush_timeout_ns: u64,
}

/// Netlink socket for the `netdev` family.
pub(crate) struct NetdevSocket {
    socket: OwnedFd,
    family: u16,
}

impl NetdevSocket {
    /// Opens a socket and resolves the family's ID.
    pub(crate) fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(rustix::net::netlink::GENERIC),
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(1)))?;
        let mut netdev = Self { socket, family: GENL_ID_CTRL };
        let mut request = netdev.request(CTRL_CMD_GETFAMILY, NLM_F_ACK);
        request.push_attribute(CTRL_ATTR_FAMILY_NAME, b"netdev\0");
        let mut family = None;
        netdev.send_request(request, |body| {
            family = find_attribute(body, CTRL_ATTR_FAMILY_ID)
                .and_then(|v| Some(u16::from_ne_bytes(v.try_into().ok()?)));
        })?;
        netdev.family = family.ok_or(io::ErrorKind::Unsupported)?;
        Ok(netdev)
    }

    /// Lists the NAPI instances of an interface.
    pub(crate) fn napis(&self, interface_index: u32) -> io::Result<Vec<NapiSettings>> {
        let mut request = self.request(NETDEV_CMD_NAPI_GET, NLM_F_DUMP);
        request.push_attribute(NETDEV_A_NAPI_IFINDEX, &interface_index.to_ne_bytes());
        let mut napis = Vec::new();
        self.send_request(request, |body| {
            let number = |kind| find_attribute(body, kind).and_then(parse_unsigned);
            // Older kernels list instances without settings.
            if let (Some(id), Some(irqs), Some(timeout)) = (
                number(NETDEV_A_NAPI_ID),
                number(NETDEV_A_NAPI_DEFER_HARD_IRQS),
                number(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT),
            ) {
                napis.push(NapiSettings {
                    id: id as u32,
                    defer_hard_irqs: irqs as u32,
                    gro_flush_timeout_ns: timeout,
                });
            }
        })?;
        Ok(napis)
    }

    /// NAPI instances of the receive queues of an interface, as far as its driver tells.
    pub(crate) fn receive_queue_napis(
        &self,
        interface_index: u32,
    ) -> io::Result<HashMap<u32, u32>> {
        let mut request = self.request(NETDEV_CMD_QUEUE_GET, NLM_F_DUMP);
        request.push_attribute(NETDEV_A_QUEUE_IFINDEX, &interface_index.to_ne_bytes());
        let mut napis = HashMap::new();
        self.send_request(request, |body| {
            let number = |kind| find_attribute(body, kind).and_then(parse_unsigned);
            let is_receive = number(NETDEV_A_QUEUE_TYPE) == Some(NETDEV_QUEUE_TYPE_RX);
            let (queue, napi) = (number(NETDEV_A_QUEUE_ID), number(NETDEV_A_QUEUE_NAPI_ID));
            if let (true, Some(queue), Some(napi)) = (is_receive, queue, napi) {
                napis.insert(queue as u32, napi as u32);
            }
        })?;
        Ok(napis)
    }

    /// Changes the settings of a NAPI instance.
    pub(crate) fn set(&self, napi: &NapiSettings) -> io::Result<()> {
        let mut request = self.request(NETDEV_CMD_NAPI_SET, NLM_F_ACK);
        request.push_attribute(NETDEV_A_NAPI_ID, &napi.id.to_ne_bytes());
        request.push_attribute(NETDEV_A_NAPI_DEFER_HARD_IRQS, &napi.defer_hard_irqs.to_ne_bytes());
        request.push_attribute(
            NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT,
            &napi.gro_flush_timeout_ns.to_ne_bytes(),
        );
        self.send_request(request, |_| {})
    }

    /// Changes the flush timeout of a NAPI instance, in nanoseconds.
    pub(crate) fn set_flush_timeout(&self, id: u32, flush_timeout_ns: u64) -> io::Result<()> {
        let mut request = self.request(NETDEV_CMD_NAPI_SET, NLM_F_ACK);
        request.push_attribute(NETDEV_A_NAPI_ID, &id.to_ne_bytes());
        request.push_attribute(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT, &flush_timeout_ns.to_ne_bytes());
        self.send_request(request, |_| {})
    }

    /// Sets the suspend timeout of a NAPI instance, in nanoseconds.
    fn set_irq_suspend_timeout(&self, id: u32, suspend_timeout_ns: u64) -> io::Result<()> {
        let mut request = self.request(NETDEV_CMD_NAPI_SET, NLM_F_ACK);
        request.push_attribute(NETDEV_A_NAPI_ID, &id.to_ne_bytes());
        let suspend_timeout_ns = suspend_timeout_ns.to_ne_bytes();
        request.push_attribute(NETDEV_A_NAPI_IRQ_SUSPEND_TIMEOUT, &suspend_timeout_ns);
        self.send_request(request, |_| {})
    }

    fn request(&self, command: u8, flags: u16) -> NetlinkRequest {
        NetlinkRequest::new(self.family, command, NLM_F_REQUEST | flags)
    }

    /// Sends a request and passes the body of each reply to `on_message`.
    fn send_request(
        &self,
        request: NetlinkRequest,
        mut on_message: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let bytes = request.finish();
        rustix::net::sendto(
            &self.socket,
            &bytes,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )?;
        let mut buffer = vec![0; 32 << 10];
        for _ in 0..MAX_DATAGRAMS {
            let (len, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..len];
            while let Some((kind, body, after)) = split_message(rest) {
                match kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return parse_error(body),
                    kind if kind == self.family => {
                        on_message(body.get(GENERIC_HEADER_BYTES..).unwrap_or(&[]));
                    }
                    _ => {}
                }
                rest = after;
            }
        }
        Err(io::Error::other("no end of the netlink reply"))
    }
}

/// Sets the time for which the interrupts of an interface stay off while a program that prefers to
/// busy-poll finds packets, in nanoseconds (`irq-suspend-timeout`, Linux 6.13). The namespace is
/// that of the calling thread.
///
/// # Errors
/// If the kernel is older, or the interface has no NAPI instance.
pub fn set_irq_suspend_timeout(interface_index: u32, timeout_ns: u64) -> io::Result<()> {
    let netdev = NetdevSocket::open()?;
    let napis = netdev.napis(interface_index)?;
    if napis.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the interface has no NAPI instance"));
    }
    napis.iter().try_for_each(|napi| netdev.set_irq_suspend_timeout(napi.id, timeout_ns))
}

/// Netlink request under construction.
struct NetlinkRequest(Vec<u8>);

impl NetlinkRequest {
    fn new(family: u16, command: u8, flags: u16) -> Self {
        let mut bytes = vec![0; NETLINK_HEADER_BYTES + GENERIC_HEADER_BYTES];
        bytes[4..6].copy_from_slice(&family.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes[NETLINK_HEADER_BYTES] = command;
        bytes[NETLINK_HEADER_BYTES + 1] = 1;
        Self(bytes)
    }

    fn push_attribute(&mut self, kind: u16, value: &[u8]) {
        let len = (ATTRIBUTE_HEADER_BYTES + value.len()) as u16;
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

/// Splits off the first message: returns its type, its body and the remaining bytes.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(NETLINK_HEADER_BYTES..len)?;
    Some((kind, body, bytes.get(len.next_multiple_of(4)..).unwrap_or(&[])))
}

/// Parses an error message; code 0 is an acknowledgement.
fn parse_error(body: &[u8]) -> io::Result<()> {
    let code = body.get(..4).and_then(|code| Some(i32::from_ne_bytes(code.try_into().ok()?)));
    match code {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Finds the value of the first attribute of type `wanted`.
fn find_attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
        let value = bytes.get(ATTRIBUTE_HEADER_BYTES..len)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

/// Parses an unsigned integer of four or eight bytes.
fn parse_unsigned(value: &[u8]) -> Option<u64> {
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
    fn parses_what_it_builds() {
        let mut request = NetlinkRequest::new(30, NETDEV_CMD_NAPI_SET, NLM_F_REQUEST | NLM_F_ACK);
        request.push_attribute(NETDEV_A_NAPI_ID, b"abc");
        request.push_attribute(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT, &200_000_u64.to_ne_bytes());
        let bytes = request.finish();
        let (kind, body, after) = split_message(&bytes).unwrap();
        assert_eq!((kind, body[0], after.len()), (30, NETDEV_CMD_NAPI_SET, 0));
        let attributes = &body[GENERIC_HEADER_BYTES..];
        assert_eq!(find_attribute(attributes, NETDEV_A_NAPI_ID), Some(&b"abc"[..]));
        let timeout =
            find_attribute(attributes, NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT).and_then(parse_unsigned);
        assert_eq!(timeout, Some(200_000));
        assert_eq!(find_attribute(attributes, NETDEV_A_NAPI_IFINDEX), None);
    }

    #[test]
    fn parses_error_messages() {
        assert!(parse_error(&0_i32.to_ne_bytes()).is_ok());
        let refused = parse_error(&(-1_i32).to_ne_bytes()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(1));
        assert!(parse_error(&[0]).is_err());
        assert!(parse_error(&i32::MIN.to_ne_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_come_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            let mut messages = 0;
            while let Some((_, body, after)) = split_message(rest) {
                let _ = (find_attribute(body, 1), parse_error(body));
                prop_assert!(after.len() < rest.len());
                rest = after;
                messages += 1;
            }
            prop_assert!(messages <= bytes.len() / NETLINK_HEADER_BYTES);
            let _ = find_attribute(&bytes, 7);
        }
    }
}
