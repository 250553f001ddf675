//! A wrapper that writes one line for every frame of a port.

mod summary;

use std::io::{self, Write};
use std::os::fd::BorrowedFd;

use tidegate_memory::Arena;

use crate::admission::Early;
use crate::passed::Copies;
use crate::steering::Rule;
use crate::{Burst, Capabilities, Left, Port, PortCounters};

pub use summary::Summary;

/// A port that tells of its frames: `<` for one that came, `>` for one that
/// went, its length in bytes, and a [`Summary`].
///
/// When writing fails tracing ends and the port goes on; [`Trace::into_parts`]
/// tells.
pub struct Trace<P, W> {
    port: P,
    lines: Lines<W>,
    offered: Copies,
}

struct Lines<W> {
    to: W,
    failure: Option<io::Error>,
}

impl<P: Port, W: Write + Send> Trace<P, W> {
    /// Writes the frames of `port` to `to`, which best is buffered.
    pub fn new(port: P, to: W) -> Self {
        Self { port, lines: Lines { to, failure: None }, offered: Copies::default() }
    }

    /// The port below and the writer.
    ///
    /// # Errors
    /// In place of the writer: why writing ended early.
    pub fn into_parts(self) -> (P, io::Result<W>) {
        let Lines { mut to, failure } = self.lines;
        let to = match failure {
            Some(failure) => Err(failure),
            None => to.flush().map(|()| to),
        };
        (self.port, to)
    }
}

impl<W: Write> Lines<W> {
    fn write(&mut self, direction: char, len: usize, summary: Summary<'_>) {
        if self.failure.is_none() {
            self.failure = writeln!(self.to, "{direction} {len} {summary}").err();
        }
    }
}

impl<P: Port, W: Write + Send> Port for Trace<P, W> {
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
        let medium = self.port.capabilities().medium;
        for frame in burst.iter().skip(before) {
            self.lines.write('<', frame.len(), Summary::new(medium, arena.bytes(frame)));
        }
        outcome
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.offered.take(arena, burst, usize::MAX);
        let offered = burst.len();
        let outcome = self.port.transmit(arena, burst);
        let medium = self.port.capabilities().medium;
        for (data, len) in self.offered.first(offered - burst.len()) {
            self.lines.write('>', len, Summary::new(medium, data));
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
