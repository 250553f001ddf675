//! A wrapper that writes every frame of a device to a capture file.

use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate_memory::Arena;

use crate::admission::EarlyDrop;
use crate::pcap::{
    MAX_PACKET_BYTES, PcapError, RECORD_HEADER_BYTES, Record, Writer, wall_clock_ns,
};
use crate::steering::SharedRules;
use crate::tx_copies::TxCopies;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState};

/// Settings of a [`Capture`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CaptureConfig {
    /// Maximum bytes of each frame to write.
    pub snap_bytes: usize,
    /// Maximum size of the file in bytes; later frames are not written.
    pub limit_bytes: u64,
    /// Returns the time of a burst in nanoseconds since 1970.
    pub clock: fn() -> u64,
}

impl Default for CaptureConfig {
    /// Whole frames, no limit, the wall clock.
    fn default() -> Self {
        Self { snap_bytes: MAX_PACKET_BYTES, limit_bytes: u64::MAX, clock: wall_clock_ns }
    }
}

impl CaptureConfig {
    /// Sets the maximum bytes of each frame to write.
    pub fn snap_bytes(self, snap_bytes: usize) -> Self {
        Self { snap_bytes, ..self }
    }

    /// Sets the maximum size of the file in bytes.
    pub fn limit_bytes(self, limit_bytes: u64) -> Self {
        Self { limit_bytes, ..self }
    }

    /// Sets the clock: the time of a burst in nanoseconds since 1970.
    pub fn clock(self, clock: fn() -> u64) -> Self {
        Self { clock, ..self }
    }
}

/// A device whose frames are written to a pcap file, both directions in the order in which
/// they pass.
///
/// The file shows frames between stack and device. Checksums left to the device are therefore
/// unfilled in the file, as in a capture on a NIC with checksum offload. When writing fails,
/// the capture ends and the device goes on; [`Capture::into_parts`] returns the error.
///
/// # Examples
/// ```
/// use tidegate_device::capture::{Capture, CaptureConfig};
/// use tidegate_device::mem::{MemConfig, wire};
///
/// let (near, _far) = wire(&MemConfig::default())?;
/// let config = CaptureConfig::default().snap_bytes(96);
/// let captured = Capture::new(near, Vec::<u8>::new(), config)?;
/// assert_eq!(captured.recorded(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Capture<P, W> {
    device: P,
    recorder: Recorder<W>,
    tx_copies: TxCopies,
}

struct Recorder<W> {
    file: Writer<W>,
    config: CaptureConfig,
    recorded: u64,
    omitted: u64,
    failure: Option<io::Error>,
}

impl<P: Device, W: Write + Send> Capture<P, W> {
    /// Begins to write the frames of `device` to `file`.
    ///
    /// # Errors
    /// When the file's header cannot be written.
    pub fn new(device: P, file: W, config: CaptureConfig) -> Result<Self, PcapError> {
        let medium = device.capabilities().medium;
        let file = Writer::new(file, medium, config.snap_bytes).map_err(PcapError::Write)?;
        let recorder = Recorder { file, config, recorded: 0, omitted: 0, failure: None };
        Ok(Self { device, recorder, tx_copies: TxCopies::default() })
    }

    /// Frames in the file.
    pub fn recorded(&self) -> u64 {
        self.recorder.recorded
    }

    /// Frames that passed but are not in the file: the file has reached its limit, or writing
    /// failed.
    pub fn omitted(&self) -> u64 {
        self.recorder.omitted
    }

    /// The wrapped device and the file.
    ///
    /// # Errors
    /// The write error that ended the capture early, in place of the file.
    pub fn into_parts(self) -> (P, io::Result<W>) {
        let file = match self.recorder.failure {
            Some(failure) => Err(failure),
            None => self.recorder.file.into_inner(),
        };
        (self.device, file)
    }
}

impl<W: Write> Recorder<W> {
    fn record(&mut self, packet: Record<'_>) {
        let kept = packet.data.len().min(self.config.snap_bytes);
        let grown = self.file.written_bytes() + (RECORD_HEADER_BYTES + kept) as u64;
        if self.failure.is_some() || grown > self.config.limit_bytes {
            self.omitted += 1;
            return;
        }
        match self.file.write(packet) {
            Ok(()) => self.recorded += 1,
            Err(failure) => {
                self.failure = Some(failure);
                self.omitted += 1;
            }
        }
    }
}

impl<P: Device, W: Write + Send> Device for Capture<P, W> {
    fn close_for_handover(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<HandoverState> {
        Box::new(self.device).close_for_handover(arena, keep)
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.device.take_over()
    }

    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let before = burst.len();
        let outcome = self.device.receive(arena, burst, quota);
        if burst.len() > before {
            let time_ns = (self.recorder.config.clock)();
            for frame in burst.iter().skip(before) {
                let data = arena.bytes(frame);
                self.recorder.record(Record { time_ns, data, original_bytes: data.len() });
            }
        }
        outcome
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.tx_copies.copy_burst(arena, burst, self.recorder.config.snap_bytes);
        let offered = burst.len();
        let outcome = self.device.transmit(arena, burst);
        let taken = offered - burst.len();
        if taken > 0 {
            let time_ns = (self.recorder.config.clock)();
            for (data, original_bytes) in self.tx_copies.first(taken) {
                self.recorder.record(Record { time_ns, data, original_bytes });
            }
        }
        outcome
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.device.set_idle_polls(allowed);
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        self.device.pause_receive(wait_ns)
    }

    fn needs_retry(&mut self) -> bool {
        self.device.needs_retry()
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.device.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.wake_fd()
    }

    fn shared_rules(&self) -> Option<Arc<dyn SharedRules>> {
        self.device.shared_rules()
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        self.device.early_drop()
    }

    fn counters(&mut self) -> DeviceCounters {
        self.device.counters()
    }
}
