//! A netlink socket: requests, dumps and their replies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::NetlinkError;
use super::message::{Message, Request};

/// Receive buffer in bytes: more than the kernel puts into one message of a dump.
const BUFFER_BYTES: usize = 64 * 1024;

/// Maximum attempts at a dump whose table changes while it is read.
const MAX_DUMP_ATTEMPTS: u32 = 8;

/// Maximum number of messages in a reply: no table that is read here is as large.
const MAX_MESSAGES: usize = 1 << 22;

pub struct Socket {
    fd: OwnedFd,
    buffer: Vec<u8>,
    sequence: u32,
    /// Messages that could not be parsed.
    unreadable: u64,
}

impl Socket {
    /// Opens a socket that is subscribed to the multicast groups of the bit mask `groups`.
    pub fn open(groups: u32) -> Result<Self, NetlinkError> {
        let fail = |source: Errno| NetlinkError::Socket { source: source.into() };
        let mut flags = SocketFlags::CLOEXEC;
        if groups != 0 {
            flags |= SocketFlags::NONBLOCK;
        }
        let family = AddressFamily::NETLINK;
        // No protocol is NETLINK_ROUTE, whose number is 0.
        let fd = rustix::net::socket_with(family, SocketType::RAW, flags, None).map_err(fail)?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups)).map_err(fail)?;
        Ok(Self { fd, buffer: vec![0; BUFFER_BYTES], sequence: 0, unreadable: 0 })
    }

    /// Requests a whole table.
    pub fn dump(
        &mut self,
        what: &'static str,
        request: Request,
    ) -> Result<Vec<Message>, NetlinkError> {
        let fail = |source| NetlinkError::Request { what, source };
        for _ in 0..MAX_DUMP_ATTEMPTS {
            self.send(request.clone(), NLM_F_REQUEST | NLM_F_DUMP).map_err(fail)?;
            if let Some(answer) = self.read_reply().map_err(fail)? {
                return Ok(answer);
            }
        }
        Err(fail(io::Error::other("the table changed during every attempt to read it")))
    }

    /// Sends a request and waits for the kernel's acknowledgement.
    pub fn command(&mut self, what: &'static str, request: Request) -> Result<(), NetlinkError> {
        self.request(what, request, NLM_F_CREATE | NLM_F_REPLACE).map(|_| ())
    }

    /// Requests one entry of a table.
    pub fn get(
        &mut self,
        what: &'static str,
        request: Request,
    ) -> Result<Vec<Message>, NetlinkError> {
        self.request(what, request, 0)
    }

    /// Sends a request with these flags. Returns what precedes the kernel's acknowledgement.
    fn request(
        &mut self,
        what: &'static str,
        request: Request,
        flags: u16,
    ) -> Result<Vec<Message>, NetlinkError> {
        let fail = |source| NetlinkError::Request { what, source };
        self.send(request, NLM_F_REQUEST | NLM_F_ACK | flags).map_err(fail)?;
        self.read_reply().map_err(fail).map(Option::unwrap_or_default)
    }

    /// Number of messages that were skipped since they could not be parsed: a newer kernel may send
    /// attributes that this version does not know.
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }

    /// Reads one datagram of notifications and hands each notification to `on_message`. Returns
    /// false when no datagram is waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a datagram that is larger than the buffer; the kernel's
    /// errors.
    pub fn notifications(&mut self, mut on_message: impl FnMut(Message)) -> io::Result<bool> {
        let Some(len) = self.receive(RecvFlags::DONTWAIT)? else { return Ok(false) };
        for message in (Messages { bytes: &self.buffer[..len] }) {
            match message.map(|message| message.payload) {
                Ok(NetlinkPayload::InnerMessage(inner)) => on_message(inner),
                Ok(_) => {}
                Err(_) => self.unreadable += 1,
            }
        }
        Ok(true)
    }

    fn send(&mut self, request: Request, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        rustix::net::send(&self.fd, &bytes, SendFlags::empty())?;
        Ok(())
    }

    /// Reads up to the end of the reply; `None` when a dump was inconsistent.
    fn read_reply(&mut self) -> io::Result<Option<Vec<Message>>> {
        let mut answer = Vec::new();
        let mut consistent = true;
        loop {
            let len = self.receive(RecvFlags::empty())?.unwrap_or(0);
            for message in (Messages { bytes: &self.buffer[..len] }) {
                let message = match message {
                    Ok(message) => message,
                    // One entry of a table is missing; the end of the reply must not be.
                    Err(Unreadable { is_control: false, .. }) => {
                        self.unreadable += 1;
                        continue;
                    }
                    Err(unreadable) => return Err(io::Error::other(unreadable.why)),
                };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                consistent &= message.header.flags & NLM_F_DUMP_INTR == 0;
                match message.payload {
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    NetlinkPayload::Done(_) => return Ok(consistent.then_some(answer)),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    NetlinkPayload::Error(_) => return Ok(Some(answer)),
                    NetlinkPayload::InnerMessage(inner) if answer.len() < MAX_MESSAGES => {
                        answer.push(inner);
                    }
                    NetlinkPayload::InnerMessage(_) => {
                        return Err(io::Error::other("the table is too large to read"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Reads one datagram into the buffer; `None` when no datagram is waiting.
    fn receive(&mut self, flags: RecvFlags) -> io::Result<Option<usize>> {
        loop {
            match rustix::net::recv(&self.fd, &mut self.buffer[..], flags | RecvFlags::TRUNC) {
                Ok((_, len)) if len > self.buffer.len() => {
                    let why = format!(
                        "the kernel sent a message of {len} bytes, more than the limit of \
                         {BUFFER_BYTES}"
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                Ok((_, len)) => return Ok(Some(len)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The messages of one datagram.
struct Messages<'a> {
    bytes: &'a [u8],
}

/// Message that cannot be parsed.
#[derive(Debug)]
struct Unreadable {
    /// Message that ends a reply, or has no valid length.
    is_control: bool,
    why: String,
}

impl Iterator for Messages<'_> {
    type Item = Result<NetlinkMessage<Message>, Unreadable>;

    fn next(&mut self) -> Option<Self::Item> {
        // struct nlmsghdr is 16 bytes; its first field is the length of the whole message.
        let length = u32::from_ne_bytes(self.bytes.first_chunk().copied()?) as usize;
        if length < 16 || length > self.bytes.len() {
            self.bytes = &[];
            let why = "a netlink message has an invalid length".to_owned();
            return Some(Err(Unreadable { is_control: true, why }));
        }
        let (message, rest) = self.bytes.split_at(length);
        // Messages begin on multiples of four bytes (NLMSG_ALIGN).
        self.bytes = rest.get(length.next_multiple_of(4) - length..).unwrap_or(&[]);
        // The type follows the length; types below 16 are of netlink itself (NLMSG_MIN_TYPE).
        let is_control = u16::from_ne_bytes([message[4], message[5]]) < 16;
        Some(
            NetlinkMessage::deserialize(message)
                .map_err(|error| Unreadable { is_control, why: error.to_string() }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A socket that receives what the test sends.
    fn connected() -> (Socket, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
        let (near, far) = pair.unwrap();
        (Socket { fd: near, buffer: vec![0; 256], sequence: 0, unreadable: 0 }, far)
    }

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(body);
        bytes
    }

    /// RTM_NEWNEIGH of linux/rtnetlink.h.
    const NEW_NEIGHBOUR: u16 = 28;
    /// NLMSG_DONE of linux/netlink.h.
    const DONE: u16 = 3;

    #[test]
    fn unreadable_messages_are_skipped_and_counted() {
        let (mut socket, kernel) = connected();
        let short = message(NEW_NEIGHBOUR, &[2, 0, 0, 0]);
        let good = message(NEW_NEIGHBOUR, &[2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        let send = |bytes: &[u8]| {
            assert_eq!(rustix::net::send(&kernel, bytes, SendFlags::empty()), Ok(bytes.len()));
        };
        let mut read = 0;
        send(&[&short[..], &good].concat());
        assert!(socket.notifications(|_| read += 1).unwrap());
        assert_eq!((read, socket.unreadable()), (1, 1));
        // A datagram that ends inside a message.
        send(&good[..20]);
        assert!(socket.notifications(|_| read += 1).unwrap());
        assert_eq!((read, socket.unreadable()), (1, 2));
        assert!(!socket.notifications(|_| read += 1).unwrap());
        send(&[0; 300]);
        let error = socket.notifications(|_| read += 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        // A table misses an entry; without its end it would never be complete.
        send(&[&short[..], &good, &message(DONE, &[0; 4])].concat());
        assert_eq!(socket.read_reply().unwrap().map(|table| table.len()), Some(1));
        assert_eq!(socket.unreadable(), 3);
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let count = Messages { bytes: &bytes }.count();
            prop_assert!(count <= bytes.len() / 16 + 1);
        }

        #[test]
        fn damaged_messages_end_without_a_panic(
            kind in 16u16..32,
            body in proptest::collection::vec(any::<u8>(), 0..128),
        ) {
            let mut bytes = Vec::new();
            bytes.extend((16 + body.len() as u32).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(&body);
            let count = Messages { bytes: &bytes }.count();
            prop_assert_eq!(count, 1);
        }
    }
}
