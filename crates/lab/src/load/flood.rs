//! A flood: frames made ahead, sent by the kernel itself.
//!
//! The kernel runs a BPF program on frames of its own and redirects them to a
//! device (`BPF_PROG_TEST_RUN` with live frames, Linux 5.18): several million
//! packets a second from one core, at a rate that the program keeps by the
//! clock. Nothing is received: what came of the flood is read from the server
//! and from the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aya::maps::{Array, MapData};
use aya::programs::{TestRun, TestRunAttrs, TestRunOptions, Xdp};
use aya::{Ebpf, Pod};

use super::template::{Addressing, Template, sum};
use crate::cpu;
use crate::error::LabError;
use crate::netns::End;

/// Built from `bpf/flood.bpf.c` by `make bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/flood.bpf.o");

/// The longest frame in bytes: what the program copies.
pub const MAX_FRAME_BYTES: usize = 128;
/// The most frames to take turns with.
pub const MAX_FRAMES: usize = 16_384;
/// The shortest frame that the kernel takes: an Ethernet header, and some.
const MIN_FRAME_BYTES: usize = 60;

/// How long the runs of one system call take about, in seconds: a stop is
/// noticed so soon.
const CALL_S: f64 = 0.05;
/// A run takes so long at most, in seconds, when it waits for a frame to be due.
const RUN_MAX_S: f64 = 10e-6;
/// The interval of a flood that stands still: calls that have begun send no
/// more.
const NEVER: u64 = u64::MAX;
/// What no flood exceeds, in frames per second.
const RATE_MAX: f64 = 10e6;
/// Threads that send in turns. At the end of a call the kernel waits until every
/// core was seen outside of read sections, 10 ms and more. Another thread sends
/// meanwhile.
const THREADS: usize = 3;
/// Frames that the kernel hands to the device at once. Slow floods come in
/// smaller batches. The kernel keeps as many frames to send again: with fewer
/// than a veth holds (256), sender and receiver of a fast flood meet at the lock
/// of the page allocator.
const BATCH: u32 = 256;
const SMALL_BATCH: u32 = 8;
/// The slowest flood that comes in large batches, in frames per second.
const LARGE_BATCHES_PPS: f64 = 500_000.0;

/// `struct settings` of the program: the interface and the number of frames,
/// the version, when to begin, the interval.
type Settings = [u64; 4];
/// `struct progress` of the program: the version, what is due, frames sent,
/// the next frame.
type Progress = [u64; 4];

const SENT: usize = 2;

/// A flood that runs on a core of its own until it is dropped.
pub struct Flood {
    settings: Array<MapData, Settings>,
    progress: Array<MapData, Progress>,
    destination: u64,
    version: u64,
    control: Arc<Control>,
    threads: Vec<JoinHandle<Result<(), LabError>>>,
}

/// What the flood's threads are told.
#[derive(Default)]
struct Control {
    stop: AtomicBool,
    /// Runs of the program in one system call; 0 when nothing is to be sent.
    runs: AtomicU32,
    batch: AtomicU32,
}

impl Control {
    fn set_rate(&self, rate_pps: Option<f64>) {
        let fast = rate_pps.is_none_or(|pps| pps >= LARGE_BATCHES_PPS);
        let batch = if fast { BATCH } else { SMALL_BATCH };
        let runs = match rate_pps {
            Some(0.0) => 0,
            Some(rate_pps) => (rate_pps.clamp(1.0 / RUN_MAX_S, RATE_MAX) * CALL_S) as u32,
            None => (RATE_MAX * CALL_S) as u32,
        };
        self.batch.store(batch, Ordering::Relaxed);
        self.runs.store(runs, Ordering::Relaxed);
    }
}

impl Flood {
    /// Makes a flood of `frames`, in turns, through the device of `end`, from
    /// core `core`, where every other thread comes first. It sends nothing until [`Flood::set_rate`]. The peer of the
    /// device must have a NAPI context: an XDP program, or GRO on.
    ///
    /// # Errors
    /// When the kernel is older than Linux 5.18, refuses the program, or there
    /// are no frames or too long ones.
    pub fn new(end: &End, frames: &[Vec<u8>], core: usize) -> Result<Self, LabError> {
        let refused = |what: &str| LabError::Config(format!("a flood {what}"));
        let longest = frames.iter().map(Vec::len).max().unwrap_or(0);
        if frames.is_empty() || frames.len() > MAX_FRAMES || longest > MAX_FRAME_BYTES {
            return Err(refused(&format!(
                "has 1 to {MAX_FRAMES} frames of up to {MAX_FRAME_BYTES} bytes, not {} of up to \
                 {longest}",
                frames.len()
            )));
        }
        let mut ebpf = Ebpf::load(OBJECT).map_err(LabError::io_other("cannot load the flood"))?;
        let program: &mut Xdp = ebpf
            .program_mut("flood")
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| refused("has no program"))?;
        program.load().map_err(LabError::io_other("the kernel refuses the flood's program"))?;
        fill(&mut ebpf, frames)?;
        let settings = take(&mut ebpf, "settings")?;
        let progress = take(&mut ebpf, "progress")?;
        let data = vec![0; longest.max(MIN_FRAME_BYTES).next_multiple_of(8)];
        let control = Arc::new(Control::default());
        let ebpf = Arc::new(ebpf);
        let mut threads = Vec::new();
        for _ in 0..THREADS {
            let (ebpf, data, told) = (Arc::clone(&ebpf), data.clone(), Arc::clone(&control));
            threads.push(end.namespace.spawn(move || {
                cpu::pin_this_thread(core)?;
                cpu::run_last()?;
                run(&ebpf, &data, &told)
            })?);
        }
        let destination = u64::from(end.index()?) | (frames.len() as u64) << 32;
        Ok(Self { settings, progress, destination, version: 0, control, threads })
    }

    /// Sends so many frames per second from now on: `Some(0.0)` none, `None` as
    /// many as it can.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_rate(&mut self, rate_pps: Option<f64>) -> Result<(), LabError> {
        if rate_pps == Some(0.0) {
            self.control.set_rate(rate_pps);
            return self.write(NEVER);
        }
        // At least 1: 0 means no limit.
        let interval = rate_pps.map_or(0, |rate| ((1024e9 / rate) as u64).max(1));
        self.write(interval)?;
        self.control.set_rate(rate_pps);
        self.unpark();
        Ok(())
    }

    fn write(&mut self, interval: u64) -> Result<(), LabError> {
        self.version += 1;
        let settings = [self.destination, self.version, monotonic_ns(), interval];
        self.settings
            .set(0, settings, 0)
            .map_err(LabError::io_other("cannot set the rate of the flood"))
    }

    /// Frames sent so far, whether the peer had room for them or not.
    ///
    /// # Errors
    /// When the flood has ended by itself, with the reason.
    pub fn sent(&mut self) -> Result<u64, LabError> {
        if self.threads.iter().any(JoinHandle::is_finished) {
            self.control.stop.store(true, Ordering::Relaxed);
            self.unpark();
            self.join()?;
        }
        let progress = self.progress.get(&0, 0);
        Ok(progress.map_err(LabError::io_other("cannot read the flood's counter"))?[SENT])
    }

    fn unpark(&self) {
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    /// The first error of the threads, when all have ended.
    fn join(&mut self) -> Result<(), LabError> {
        let join = |thread: JoinHandle<_>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let ends: Vec<_> = self.threads.drain(..).map(join).collect();
        ends.into_iter().collect()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::Relaxed);
        self.unpark();
        // What it failed with was told by `sent`, or nobody asked.
        let _ = self.join();
    }
}

/// Runs the program until told to stop.
fn run(ebpf: &Ebpf, data: &[u8], control: &Control) -> Result<(), LabError> {
    let program: &Xdp = ebpf
        .program("flood")
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| LabError::Config("the flood's program is gone".into()))?;
    while !control.stop.load(Ordering::Relaxed) {
        let runs = control.runs.load(Ordering::Relaxed);
        if runs == 0 {
            thread::park_timeout(Duration::from_millis(100));
            continue;
        }
        let options = TestRunOptions {
            data_in: Some(data),
            repeat: runs,
            attrs: TestRunAttrs::new().xdp_live_frames(control.batch.load(Ordering::Relaxed)),
            ..TestRunOptions::new()
        };
        program.test_run(options).map_err(LabError::io_other(
            "the kernel does not run the flood (live frames need Linux 5.18)",
        ))?;
    }
    Ok(())
}

fn fill(ebpf: &mut Ebpf, frames: &[Vec<u8>]) -> Result<(), LabError> {
    let mut map: Array<MapData, [u8; MAX_FRAME_BYTES]> = take(ebpf, "frames")?;
    for (index, frame) in frames.iter().enumerate() {
        let mut bytes = [0; MAX_FRAME_BYTES];
        bytes[..frame.len()].copy_from_slice(frame);
        map.set(index as u32, bytes, 0).map_err(LabError::io_other("cannot hand over a frame"))?;
    }
    Ok(())
}

fn take<V: Pod>(ebpf: &mut Ebpf, name: &str) -> Result<Array<MapData, V>, LabError> {
    ebpf.take_map(name)
        .and_then(|map| map.try_into().ok())
        .ok_or_else(|| LabError::Config(format!("the flood has no map `{name}`")))
}

/// The clock that the program reads, in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Frames from the flows of `addressing`, one with each payload.
pub fn frames<'p>(
    addressing: &Addressing,
    payloads: impl IntoIterator<Item = &'p [u8]>,
) -> Vec<Vec<u8>> {
    let template = Template::new(addressing);
    let frame = |(number, payload): (usize, &[u8])| {
        let mut frame = vec![0; template.header_bytes()];
        frame.extend(payload);
        template.write(number as u32 % addressing.flows(), &mut frame, sum(payload));
        frame
    };
    payloads.into_iter().enumerate().map(frame).collect()
}
