//! UDP datagrams of an attachment.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::shared::PeerError;
use tidegate_stack::{UdpOptions, UdpSendOptions};

use super::Attachment;
use crate::ipc::command::{Command, Handle};
use crate::ipc::datagram::{DatagramHeader, HEADER_BYTES, MAX_PAYLOAD_BYTES, record_bytes};

/// Datagram that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    /// Bytes written to the buffer.
    pub len: usize,
    /// Bytes of the datagram; more than `len` if it was truncated to the buffer.
    pub full_len: usize,
    /// Source address.
    pub from: SocketAddr,
    /// Local address that the datagram was sent to.
    pub to: IpAddr,
    /// Remaining hop limit or time to live.
    pub hop_limit: u8,
    /// Traffic class byte.
    pub traffic_class: u8,
    /// Time at which the network core passed the datagram on, in nanoseconds of the system's
    /// monotonic clock.
    pub received_ns: u64,
}

impl Attachment {
    /// Receives one datagram. With `peek` the datagram stays in the queue.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the queue is empty; an error that the peer's
    /// host reported (ICMP), once.
    pub fn recv_datagram(
        &mut self,
        handle: Handle,
        buf: &mut [u8],
        peek: bool,
    ) -> io::Result<ReceivedDatagram> {
        let socket = self.socket(handle)?;
        let _lock = socket.lock_streams()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            self.note_datagram_error(kind);
            return Err(kind.into());
        }
        let socket = match socket.error_reports.are_expected() {
            true => {
                self.collect_error_reports(handle)?;
                self.socket(handle)?
            }
            false => socket,
        };
        let Some(read) = &mut socket.read else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut header = [0; HEADER_BYTES];
        let parsed = match read.peek(0, &mut header) {
            Ok(0) => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(_) => DatagramHeader::from_bytes(&header),
            Err(broken) => return Err(self.disconnect(broken)),
        };
        let Some(DatagramHeader {
            len: full_len,
            remote: Some(from),
            local: Some(to),
            hop_limit,
            traffic_class,
            received_ns,
            is_error_report: false,
        }) = parsed
        else {
            return Err(self.disconnect(PeerError));
        };
        let len = buf.len().min(full_len);
        if let Err(broken) = read.peek(HEADER_BYTES, &mut buf[..len]) {
            return Err(self.disconnect(broken));
        }
        if !peek {
            read.skip(record_bytes(full_len));
            read.release();
            if socket.slot.poll_on_rx_space.take() {
                self.send_command(Command::Poll(handle))?;
            }
        }
        // A daemon of an older build does not mark the fields as present.
        let (hop_limit, traffic_class) =
            (hop_limit.unwrap_or_default(), traffic_class.unwrap_or_default());
        Ok(ReceivedDatagram { len, full_len, from, to, hop_limit, traffic_class, received_ns })
    }

    /// Forgets what is known of addresses after an error that may mean a smaller path MTU.
    pub(super) fn note_datagram_error(&mut self, kind: io::ErrorKind) {
        if kind == io::ErrorKind::InvalidInput {
            self.address_cache.clear();
        }
    }

    /// Sets the options of a socket, but not those of address sharing.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn set_udp_options(&mut self, handle: Handle, options: UdpOptions) -> io::Result<()> {
        self.socket(handle)?.error_reports.expect(options.report_errors);
        self.send_command(Command::SetUdpOptions { socket: handle, options })
    }

    /// Sends one datagram to `to`, or to the connected peer if `to` is `None`. `options` are
    /// header fields of this datagram; `None` selects those of the socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the stream to the daemon has no space;
    /// [`io::ErrorKind::InvalidInput`] for more bytes than a datagram can hold;
    /// [`io::ErrorKind::NotConnected`] without a destination; an error that an earlier
    /// datagram caused, once.
    pub fn send_datagram(
        &mut self,
        handle: Handle,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: impl Into<UdpSendOptions>,
    ) -> io::Result<()> {
        let socket = self.socket(handle)?;
        let _lock = socket.lock_streams()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            self.note_datagram_error(kind);
            return Err(kind.into());
        }
        if to.is_none() && socket.peer.is_none() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let len = payload.len();
        if len > MAX_PAYLOAD_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some(write) = &mut socket.write else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut has_space = || write.space().map(|room| room >= record_bytes(len));
        let mut fits = has_space();
        if fits == Ok(false) {
            socket.slot.notify_on_tx_space.request();
            fits = has_space();
        }
        let header = DatagramHeader::to_send(len, to, options).to_bytes();
        let padding = [0; 8];
        let padding = &padding[..record_bytes(len) - HEADER_BYTES - len];
        let written = match fits {
            Ok(false) => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(true) => [&header, payload, padding]
                .iter()
                .try_for_each(|piece| write.write(piece).map(|_| ())),
            Err(broken) => Err(broken),
        };
        if let Err(broken) = written {
            return Err(self.disconnect(broken));
        }
        write.publish();
        if socket.slot.poll_on_write.take() {
            self.send_command(Command::Poll(handle))?;
        }
        Ok(())
    }
}
