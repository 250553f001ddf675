//! Capture at a running engine: copies of frames for readers in other processes.
//!
//! Without a reader this costs nothing: the branch to it is that to admission and to transmit
//! classes. With a reader the engine processes frames one at a time, so that the record of each says
//! what became of the frame.

mod filter;
mod ring;

use std::io;
use std::sync::Arc;

use tidegate_device::tx_copies::TxCopies;
use tidegate_memory::shared::Region;
use tidegate_stack::{Event, Stack};

pub use filter::{CaptureFilter, FilterError, FilterInstruction, MAX_FILTER_INSTRUCTIONS};
pub use ring::{
    CaptureCounts, CaptureDirection, CaptureLayout, CaptureReader, CaptureRecord, CaptureWriter,
    MAX_CAPTURE_CORES, MAX_RING_BYTES, MAX_SNAP_BYTES, MIN_RING_BYTES,
};

/// Maximum number of captures at a time.
pub const MAX_CAPTURES: usize = 4;

/// Request for a capture on all cores of a stack.
#[derive(Clone)]
pub struct CaptureRequest {
    /// Number of the capture, to end it by.
    pub number: u64,
    /// Selects frames; all without a filter.
    pub filter: Option<CaptureFilter>,
    /// Maximum bytes of a frame to copy.
    pub snap_bytes: usize,
    /// Records also when programs are notified.
    pub notifications: bool,
    /// Memory of the reader.
    pub memory: Arc<Region>,
    /// Layout of the memory.
    pub layout: CaptureLayout,
}

/// Capture of one core.
pub struct CaptureTap {
    pub(crate) number: u64,
    filter: Option<CaptureFilter>,
    snap_bytes: usize,
    pub(crate) notifications: bool,
    writer: CaptureWriter,
    /// The reader has broken the ring.
    is_broken: bool,
}

impl CaptureTap {
    /// Capture of core `core`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the memory is too small.
    pub fn new(request: &CaptureRequest, core: usize) -> io::Result<Self> {
        let CaptureRequest { number, filter, snap_bytes, notifications, memory, layout } = request;
        let writer = CaptureWriter::new(*layout, memory, core)?;
        let snap_bytes = (*snap_bytes).min(MAX_SNAP_BYTES);
        let filter = filter.clone();
        let (number, notifications) = (*number, *notifications);
        Ok(Self { number, filter, snap_bytes, notifications, writer, is_broken: false })
    }

    pub(crate) fn selects(&self, data: &[u8], original_bytes: usize) -> bool {
        self.filter.as_ref().is_none_or(|filter| filter.matches(data, original_bytes))
    }

    pub(crate) fn record(&mut self, record: &CaptureRecord<'_>) {
        if self.is_broken {
            return;
        }
        let data = &record.data[..record.data.len().min(self.snap_bytes)];
        self.is_broken = self.writer.write(&CaptureRecord { data, ..*record }).is_err();
    }
}

/// Captures of an engine.
#[derive(Default)]
pub(crate) struct Captures {
    pub(crate) taps: Vec<CaptureTap>,
    /// Copy of the frame that the stack processes.
    copy: Vec<u8>,
    pub(crate) tx_copies: TxCopies,
}

impl Captures {
    /// Copies a frame if a capture selects it. Returns a bit for each such capture.
    pub(crate) fn copy_selected(&mut self, data: &[u8]) -> u32 {
        let selects =
            |(at, tap): (usize, &CaptureTap)| u32::from(tap.selects(data, data.len())) << at;
        let selected = self.taps.iter().enumerate().map(selects).fold(0, |all, one| all | one);
        if selected != 0 {
            self.copy.clear();
            self.copy.extend_from_slice(&data[..data.len().min(MAX_SNAP_BYTES)]);
        }
        selected
    }

    /// Records the copied frame for the captures that have selected it.
    pub(crate) fn record_copy(&mut self, selected: u32, record: &CaptureRecord<'_>) {
        let record = CaptureRecord { data: &self.copy, ..*record };
        for (at, tap) in self.taps.iter_mut().enumerate() {
            if selected & (1 << at) != 0 {
                tap.record(&record);
            }
        }
    }

    /// Records that the program of a socket is notified of an event.
    pub(crate) fn record_event(&mut self, time_ns: u64, stack: &Stack, event: Event) {
        let (protocol, local, peer) = match event {
            Event::UdpReadable(id) => ("udp", stack.udp_local_addr(id), stack.udp_peer_addr(id)),
            Event::TcpReadable(id) => ("tcp", stack.tcp_local_addr(id), stack.tcp_peer_addr(id)),
            Event::TcpAcceptable(id) => ("tcp", stack.tcp_listener_addr(id), None),
            _ => return,
        };
        let Some(local) = local else { return };
        let text = match peer {
            Some(peer) => format!("{protocol} {local} {peer}"),
            None => format!("{protocol} {local}"),
        };
        for tap in self.taps.iter_mut().filter(|tap| tap.notifications) {
            tap.record(&CaptureRecord {
                time_ns,
                done_ns: time_ns,
                direction: CaptureDirection::Notified,
                drop_reason: None,
                original_bytes: text.len(),
                lost: 0,
                data: text.as_bytes(),
            });
        }
    }

    pub(crate) fn publish(&mut self) {
        self.taps.iter_mut().for_each(|tap| tap.writer.publish());
    }
}
