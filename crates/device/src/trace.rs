//! A wrapper that writes one line for every frame of a device.

mod summary;

use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate_memory::Arena;

use crate::admission::EarlyDrop;
use crate::steering::SharedRules;
use crate::tx_copies::TxCopies;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState};

pub use summary::Summary;

/// A device that prints its frames: `<` for received, `>` for transmitted, the length in bytes, and
/// a [`Summary`].
///
/// When writing fails, tracing ends and the device goes on; [`Trace::into_parts`] returns the
/// error.
pub struct Trace<P, W> {
    device: P,
    writer: TraceWriter<W>,
    tx_copies: TxCopies,
}

struct TraceWriter<W> {
    to: W,
    failure: Option<io::Error>,
}

impl<P: Device, W: Write + Send> Trace<P, W> {
    /// Writes the frames of `device` to `to`, which should be buffered.
    pub fn new(device: P, to: W) -> Self {
        Self { device, writer: TraceWriter { to, failure: None }, tx_copies: TxCopies::default() }
    }

    /// The wrapped device and the writer.
    ///
    /// # Errors
    /// The write error that ended tracing early, in place of the writer.
    pub fn into_parts(self) -> (P, io::Result<W>) {
        let TraceWriter { mut to, failure } = self.writer;
        let to = match failure {
            Some(failure) => Err(failure),
            None => to.flush().map(|()| to),
        };
        (self.device, to)
    }
}

impl<W: Write> TraceWriter<W> {
    fn write(&mut self, direction: char, len: usize, summary: Summary<'_>) {
        if self.failure.is_none() {
            self.failure = writeln!(self.to, "{direction} {len} {summary}").err();
        }
    }
}

impl<P: Device, W: Write + Send> Device for Trace<P, W> {
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
        let medium = self.device.capabilities().medium;
        for frame in burst.iter().skip(before) {
            self.writer.write('<', frame.len(), Summary::new(medium, arena.bytes(frame)));
        }
        outcome
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.tx_copies.copy_burst(arena, burst, usize::MAX);
        let offered = burst.len();
        let outcome = self.device.transmit(arena, burst);
        let medium = self.device.capabilities().medium;
        for (data, len) in self.tx_copies.first(offered - burst.len()) {
            self.writer.write('>', len, Summary::new(medium, data));
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
