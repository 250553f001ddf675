//! Error reports of UDP sockets. They come in the stream of the datagrams, and are taken apart.

use std::collections::VecDeque;
use std::io;

use tidegate_memory::shared::PeerError;
use tidegate_stack::UdpErrorReport;

use super::Attachment;
use crate::ipc::command::{Command, Handle};
use crate::ipc::datagram::{DatagramHeader, HEADER_BYTES, record_bytes};
use crate::ipc::layout::StreamIn;

/// Maximum number of reports that are kept beside the stream; later ones are dropped.
const MAX_REPORTS: usize = 16;

/// Error reports of a socket, oldest first.
#[derive(Debug, Default)]
pub(super) struct ErrorReports {
    /// The stream may hold reports.
    are_expected: bool,
    /// Reports that are no longer in the stream.
    collected: VecDeque<UdpErrorReport>,
    /// Reports that are still in the stream, behind datagrams, and were taken already.
    taken_ahead: usize,
}

impl ErrorReports {
    /// Reports of the same socket in another process.
    pub(super) fn for_other_holder(&self) -> Self {
        Self { are_expected: self.are_expected, ..Self::default() }
    }

    /// True if the stream may hold reports.
    #[inline]
    pub(super) fn are_expected(&self) -> bool {
        self.are_expected
    }

    /// Called when the application sets options: with `reports_errors` reports may come.
    pub(super) fn expect(&mut self, reports_errors: bool) {
        self.are_expected |= reports_errors;
    }
}

/// Reads the header at `offset` bytes in the stream; `None` at the end.
fn header_at(read: &mut StreamIn, offset: usize) -> Result<Option<DatagramHeader>, PeerError> {
    let mut header = [0; HEADER_BYTES];
    match read.peek(offset, &mut header)? {
        0 => Ok(None),
        _ => DatagramHeader::from_bytes(&header).map(Some).ok_or(PeerError),
    }
}

/// Reads the report whose header is at `offset` bytes in the stream.
fn report_at(
    read: &mut StreamIn,
    offset: usize,
    header: DatagramHeader,
) -> Result<UdpErrorReport, PeerError> {
    let mut payload = vec![0; header.len];
    read.peek(offset + HEADER_BYTES, &mut payload)?;
    header.to_error_report(payload.into()).ok_or(PeerError)
}

impl ErrorReports {
    /// Moves the reports at the front of the stream out of it, so that the stream begins with a
    /// datagram. Returns true if there were any.
    fn collect(&mut self, read: &mut StreamIn) -> Result<bool, PeerError> {
        let mut is_any = false;
        while let Some(header) = header_at(read, 0)?.filter(|header| header.is_error_report) {
            match self.taken_ahead.checked_sub(1) {
                Some(left) => self.taken_ahead = left,
                None if self.collected.len() < MAX_REPORTS => {
                    self.collected.push_back(report_at(read, 0, header)?);
                }
                None => {}
            }
            read.skip(record_bytes(header.len));
            is_any = true;
        }
        if is_any {
            read.release();
        }
        Ok(is_any)
    }

    /// Takes the oldest report, also from behind datagrams that are not read yet.
    fn take(&mut self, read: &mut StreamIn) -> Result<Option<UdpErrorReport>, PeerError> {
        if let Some(report) = self.collected.pop_front() {
            return Ok(Some(report));
        }
        let (mut offset, mut taken) = (0, self.taken_ahead);
        while let Some(header) = header_at(read, offset)? {
            if header.is_error_report {
                if taken == 0 {
                    self.taken_ahead += 1;
                    return report_at(read, offset, header).map(Some);
                }
                taken -= 1;
            }
            offset += record_bytes(header.len);
        }
        Ok(None)
    }
}

impl Attachment {
    /// Moves the reports at the front of a socket's stream out of it.
    pub(super) fn collect_error_reports(&mut self, handle: Handle) -> io::Result<()> {
        let socket = self.socket(handle)?;
        let Some(read) = &mut socket.read else { return Ok(()) };
        match socket.error_reports.collect(read) {
            Ok(true) if socket.slot.poll_on_rx_space.take() => {
                self.send_command(Command::Poll(handle))
            }
            Ok(_) => Ok(()),
            Err(broken) => Err(self.disconnect(broken)),
        }
    }

    /// Takes the oldest ICMP error about a datagram that a socket has sent. A socket has them with
    /// [`tidegate_stack::UdpOptions::report_errors`].
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn take_error_report(&mut self, handle: Handle) -> io::Result<Option<UdpErrorReport>> {
        let socket = self.socket(handle)?;
        if !socket.error_reports.are_expected() {
            return Ok(None);
        }
        let _lock = socket.lock_streams()?;
        self.collect_error_reports(handle)?;
        let socket = self.socket(handle)?;
        let Some(read) = &mut socket.read else { return Ok(None) };
        match socket.error_reports.take(read) {
            Ok(report) => Ok(report),
            Err(broken) => Err(self.disconnect(broken)),
        }
    }
}
