//! The side of the reader: memory, rings and connection to a running server.

use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tidegate::capture::{
    CaptureCounts, CaptureLayout, CaptureReader, CaptureRecord, FilterInstruction,
};
use tidegate_memory::shared::Region;

use super::serve::{CaptureInfo, CaptureSettings};
use crate::Failure;
use crate::control;

/// Maximum number of records of one core before the next core has its turn.
const TURN_RECORDS: usize = 64;

/// Capture at a running server.
pub(super) struct Session {
    stream: UnixStream,
    readers: Vec<CaptureReader>,
    /// Difference of the wall clock and the monotonic clock.
    wall_offset_ns: i128,
}

impl Session {
    /// Begins a capture at the server with control socket `socket`.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses the capture.
    pub(super) fn start(
        socket: &Path,
        info: &CaptureInfo,
        filter: &[FilterInstruction],
        (snap_bytes, notifications): (usize, bool),
        ring_bytes: usize,
    ) -> Result<Self, Failure> {
        let layout = CaptureLayout::new(info.cores, ring_bytes)?;
        let memory = Arc::new(Region::create(layout.words())?);
        let settings = CaptureSettings {
            cores: info.cores,
            ring_bytes,
            snap_bytes,
            notifications,
            filter: filter.iter().map(|one| (one.code, one.jt, one.jf, one.k)).collect(),
        };
        let stream = control::start_capture(socket, settings, memory.as_fd())?;
        stream.set_nonblocking(true)?;
        let readers = (0..info.cores).map(|core| CaptureReader::new(layout, &memory, core));
        let readers = readers.collect::<Result<_, _>>()?;
        let wall_offset_ns = clock_ns(ClockId::Realtime) - clock_ns(ClockId::Monotonic);
        Ok(Self { stream, readers, wall_offset_ns })
    }

    /// Passes records to `take` until it returns false, some from each core in turn. Returns their
    /// number.
    ///
    /// # Errors
    /// Those of `take`, and broken records.
    pub(super) fn read(
        &mut self,
        mut take: impl FnMut(usize, &CaptureRecord<'_>) -> Result<bool, Failure>,
    ) -> Result<usize, Failure> {
        let mut total = 0;
        for (core, reader) in self.readers.iter_mut().enumerate() {
            for _ in 0..TURN_RECORDS {
                let Some(record) = reader.read()? else { break };
                total += 1;
                if !take(core, &record)? {
                    return Ok(total);
                }
            }
        }
        Ok(total)
    }

    /// Ends the capture: the server learns it, and its last records can still be read.
    pub(super) fn end(&self) {
        // The server may have gone.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// True if the server or this capture has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        // The server sends nothing more: its end is an error too.
        let result = self.stream.read_exact(&mut [0]);
        result.err().is_none_or(|error| error.kind() != ErrorKind::WouldBlock)
    }

    /// Time of a record since 1970.
    pub(super) fn wall_time(wall_offset_ns: i128, time_ns: u64) -> Duration {
        let ns = i128::from(time_ns) + wall_offset_ns;
        Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
    }

    /// Difference of the wall clock and the clock of records.
    pub(super) fn wall_offset_ns(&self) -> i128 {
        self.wall_offset_ns
    }

    /// Numbers of each core so far.
    pub(super) fn counts(&self) -> Vec<CaptureCounts> {
        self.readers.iter().map(CaptureReader::counts).collect()
    }
}

fn clock_ns(clock: ClockId) -> i128 {
    let now = clock_gettime(clock);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}
