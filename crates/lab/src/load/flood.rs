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

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{RawTracePoint, TestRun, TestRunAttrs, TestRunOptions, Xdp};

use super::bpf;
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
const RATE_MAX: f64 = TEN_GIGABIT_LINE_PPS;
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

/// For how long no frames are made when the peer has no room, in nanoseconds:
/// a veth holds 256, and no server takes that many meanwhile.
const FULL_NS: u64 = 40_000;
/// What people are told of [`Flood::lose_as_a_card`].
pub(crate) const CARD: &str = "a frame that the veth has no room for costs nobody anything, as at \
                               a card: for 40 us none are made, and those that were due count as \
                               offered; the most is a line of 10 Gb/s";
/// The most frames of 64 bytes that a line of 10 Gb/s brings in a second (RFC
/// 2544, section 20).
const TEN_GIGABIT_LINE_PPS: f64 = 14_880_952.0;

/// `struct settings` of the program: the interface and the number of frames,
/// the version, when to begin, the interval, the pause when the peer is full,
/// the core.
type Settings = [u64; 6];
/// `struct progress` of the program: the version, what is due, frames offered,
/// the next frame, when the peer may have room.
type Progress = [u64; 5];

const SENT: usize = 2;

/// A flood that runs on a core of its own until it is dropped.
pub struct Flood {
    settings: Array<MapData, Settings>,
    progress: Array<MapData, Progress>,
    destination: u64,
    version: u64,
    core: usize,
    /// [`FULL_NS`], or 0 when the sender drops what the peer has no room for.
    full_ns: u64,
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
    /// Threads that are in a call.
    calling: AtomicU32,
}

/// Frames that are handed over at once at this rate.
fn batch_at(rate_pps: Option<f64>) -> u32 {
    let fast = rate_pps.is_none_or(|pps| pps >= LARGE_BATCHES_PPS);
    if fast { BATCH } else { SMALL_BATCH }
}

impl Control {
    fn set_rate(&self, rate_pps: Option<f64>) {
        let runs = match rate_pps {
            Some(0.0) => 0,
            Some(rate_pps) => (rate_pps.clamp(1.0 / RUN_MAX_S, RATE_MAX) * CALL_S) as u32,
            None => (RATE_MAX * CALL_S) as u32,
        };
        self.batch.store(batch_at(rate_pps), Ordering::Relaxed);
        self.runs.store(runs, Ordering::SeqCst);
    }
}

impl Flood {
    /// Makes a flood of `frames`, in turns, through the device of `end`, from
    /// core `core`, where every other thread comes first. It sends nothing until
    /// [`Flood::set_rate`]. The peer of the device must have a NAPI context: an
    /// XDP program, or GRO on. What the peer has no room for the sender drops.
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
        let program = bpf::xdp(&mut ebpf, "flood")?;
        program.load().map_err(LabError::io_other("the kernel refuses the flood's program"))?;
        watch_room(&mut ebpf)?;
        fill(&mut ebpf, frames)?;
        let settings = bpf::array(&mut ebpf, "settings")?;
        let progress = bpf::array(&mut ebpf, "progress")?;
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
        Ok(Self { settings, progress, destination, version: 0, core, full_ns: 0, control, threads })
    }

    /// Lets what the peer has no room for be lost as at a card, at no cost: the
    /// sender makes no frames for a while, and those that were due count as
    /// offered. The most that it can send is what a line of 10 Gb/s brings.
    ///
    /// Without this the sender frees them under a lock that the receiver takes
    /// for each frame of its own: at seven million a second that lock was a
    /// quarter of what a receiver did.
    pub fn lose_as_a_card(&mut self) {
        self.full_ns = FULL_NS;
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
        if batch_at(rate_pps) != self.control.batch.load(Ordering::Relaxed) {
            self.end_calls()?;
        }
        let rate_pps = match rate_pps {
            None if self.full_ns > 0 => Some(TEN_GIGABIT_LINE_PPS),
            other => other,
        };
        // At least 1: 0 means no limit.
        let interval = rate_pps.map_or(0, |rate| ((1024e9 / rate) as u64).max(1));
        self.write(interval)?;
        self.control.set_rate(rate_pps);
        self.unpark();
        Ok(())
    }

    /// Waits until no call is under way: one keeps the size of its batches.
    fn end_calls(&mut self) -> Result<(), LabError> {
        self.control.set_rate(Some(0.0));
        self.write(NEVER)?;
        while self.control.calling.load(Ordering::SeqCst) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn write(&mut self, interval: u64) -> Result<(), LabError> {
        self.version += 1;
        let settings = [
            self.destination,
            self.version,
            monotonic_ns(),
            interval,
            self.full_ns,
            self.core as u64,
        ];
        self.settings
            .set(0, settings, 0)
            .map_err(LabError::io_other("cannot set the rate of the flood"))
    }

    /// Frames offered so far, whether the peer had room for them or not.
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
        // Calls under way end soon. If the kernel refuses, they take their time.
        let _ = self.write(NEVER);
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
        control.calling.fetch_add(1, Ordering::SeqCst);
        let runs = control.runs.load(Ordering::SeqCst);
        if runs == 0 {
            control.calling.fetch_sub(1, Ordering::SeqCst);
            thread::park_timeout(Duration::from_millis(100));
            continue;
        }
        let options = TestRunOptions {
            data_in: Some(data),
            repeat: runs,
            attrs: TestRunAttrs::new().xdp_live_frames(control.batch.load(Ordering::Relaxed)),
            ..TestRunOptions::new()
        };
        let ran = program.test_run(options);
        control.calling.fetch_sub(1, Ordering::SeqCst);
        ran.map_err(LabError::io_other(
            "the kernel does not run the flood (live frames need Linux 5.18)",
        ))?;
    }
    Ok(())
}

/// Tells the program of frames that the peer had no room for.
fn watch_room(ebpf: &mut Ebpf) -> Result<(), LabError> {
    let refused = "the kernel does not tell the flood of frames that are lost";
    let program: &mut RawTracePoint = ebpf
        .program_mut("room")
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| LabError::Config("the flood does not see what is lost".into()))?;
    program.load().map_err(LabError::io_other(refused))?;
    program.attach("xdp_devmap_xmit").map(drop).map_err(LabError::io_other(refused))
}

fn fill(ebpf: &mut Ebpf, frames: &[Vec<u8>]) -> Result<(), LabError> {
    let mut map: Array<MapData, [u8; MAX_FRAME_BYTES]> = bpf::array(ebpf, "frames")?;
    for (index, frame) in frames.iter().enumerate() {
        let mut bytes = [0; MAX_FRAME_BYTES];
        bytes[..frame.len()].copy_from_slice(frame);
        map.set(index as u32, bytes, 0).map_err(LabError::io_other("cannot hand over a frame"))?;
    }
    Ok(())
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
