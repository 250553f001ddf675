//! A wrapper that writes every frame of a port to a capture file.

use std::io::{self, Write};
use std::os::fd::BorrowedFd;

use tidegate_memory::Arena;

use crate::admission::Early;
use crate::passed::Copies;
use crate::pcap::{
    PACKET_BYTES_MAX, PcapError, RECORD_HEADER_BYTES, Record, Writer, wall_clock_ns,
};
use crate::steering::Rule;
use crate::{Burst, Capabilities, Left, Port, PortCounters};

/// What a [`Capture`] writes.
#[derive(Clone, Copy, Debug)]
pub struct CaptureConfig {
    /// At most this much of each frame.
    pub snap_bytes: usize,
    /// The file grows to this size at most; frames after that are not written.
    pub limit_bytes: u64,
    /// Gives the time of a burst in nanoseconds since 1970.
    pub clock: fn() -> u64,
}

impl Default for CaptureConfig {
    /// Whole frames, no limit, the wall clock.
    fn default() -> Self {
        Self { snap_bytes: PACKET_BYTES_MAX, limit_bytes: u64::MAX, clock: wall_clock_ns }
    }
}

/// A port whose frames are written to a pcap file, both directions in the
/// order in which they pass.
///
/// The file shows what passed between stack and port, so checksums that were
/// left to the port are unfilled in it, as in a capture of a card with
/// checksum offload. When writing fails the capture ends and the port goes on;
/// [`Capture::into_parts`] tells.
pub struct Capture<P, W> {
    port: P,
    recorder: Recorder<W>,
    offered: Copies,
}

struct Recorder<W> {
    file: Writer<W>,
    config: CaptureConfig,
    recorded: u64,
    left_out: u64,
    failure: Option<io::Error>,
}

impl<P: Port, W: Write + Send> Capture<P, W> {
    /// Begins to write the frames of `port` to `file`.
    ///
    /// # Errors
    /// When the file's header cannot be written.
    pub fn new(port: P, file: W, config: CaptureConfig) -> Result<Self, PcapError> {
        let medium = port.capabilities().medium;
        let file = Writer::new(file, medium, config.snap_bytes).map_err(PcapError::Write)?;
        let recorder = Recorder { file, config, recorded: 0, left_out: 0, failure: None };
        Ok(Self { port, recorder, offered: Copies::default() })
    }

    /// Frames in the file.
    pub fn recorded(&self) -> u64 {
        self.recorder.recorded
    }

    /// Frames that passed and are not in the file: it has reached its limit, or
    /// writing failed.
    pub fn left_out(&self) -> u64 {
        self.recorder.left_out
    }

    /// The port below and the file.
    ///
    /// # Errors
    /// In place of the file: why writing ended early.
    pub fn into_parts(self) -> (P, io::Result<W>) {
        let file = match self.recorder.failure {
            Some(failure) => Err(failure),
            None => self.recorder.file.into_inner(),
        };
        (self.port, file)
    }
}

impl<W: Write> Recorder<W> {
    fn record(&mut self, packet: Record<'_>) {
        let kept = packet.data.len().min(self.config.snap_bytes);
        let grown = self.file.written_bytes() + (RECORD_HEADER_BYTES + kept) as u64;
        if self.failure.is_some() || grown > self.config.limit_bytes {
            self.left_out += 1;
            return;
        }
        match self.file.write(packet) {
            Ok(()) => self.recorded += 1,
            Err(failure) => {
                self.failure = Some(failure);
                self.left_out += 1;
            }
        }
    }
}

impl<P: Port, W: Write + Send> Port for Capture<P, W> {
    fn close_for_now(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<Left> {
        Box::new(self.port).close_for_now(arena, keep)
    }

    fn go_live(&mut self) -> io::Result<()> {
        self.port.go_live()
    }

    fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let before = burst.len();
        let outcome = self.port.receive(arena, burst, quota);
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
        self.offered.take(arena, burst, self.recorder.config.snap_bytes);
        let offered = burst.len();
        let outcome = self.port.transmit(arena, burst);
        let taken = offered - burst.len();
        if taken > 0 {
            let time_ns = (self.recorder.config.clock)();
            for (data, original_bytes) in self.offered.first(taken) {
                self.recorder.record(Record { time_ns, data, original_bytes });
            }
        }
        outcome
    }

    fn hold(&mut self, wait_ns: u64) -> io::Result<()> {
        self.port.hold(wait_ns)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.port.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.wake_fd()
    }

    fn set_steering(&mut self, rule: &Rule, take: bool) -> io::Result<()> {
        self.port.set_steering(rule, take)
    }

    fn admission(&mut self) -> Option<&mut dyn Early> {
        self.port.admission()
    }

    fn counters(&mut self) -> PortCounters {
        self.port.counters()
    }
}
