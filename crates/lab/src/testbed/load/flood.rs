//! Flood of prebuilt frames, sent by the kernel.
//!
//! The kernel runs a BPF program on its own frames and redirects them to a device
//! (`BPF_PROG_TEST_RUN` with live frames, Linux 5.18). One core sends several million packets per
//! second, at a rate that the program keeps by the clock. The flood receives nothing: its effect
//! is measured at the server and at the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{TestRun, TestRunAttrs, TestRunOptions, Xdp};

use super::bpf;
use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::netns::VethEnd;
use tidegate_load::template::{Addressing, FrameTemplate, sum};

/// Built from `bpf/flood.bpf.c` by `make bpf`.
static BPF_OBJECT: &[u8] = aya::include_bytes_aligned!("../../../bpf/flood.bpf.o");

/// Maximum length of a frame in bytes: what the BPF program copies.
pub const MAX_FRAME_BYTES: usize = 128;
/// Maximum number of different frames; they are sent in turn.
pub const MAX_FRAMES: usize = 16_384;
/// Minimum length of a frame for a test run of the kernel, in bytes.
const MIN_FRAME_BYTES: usize = 60;

/// Approximate duration of one system call, in seconds. It bounds the time until a stop takes
/// effect.
const CALL_SECONDS: f64 = 0.05;
/// Maximum duration of one run of the program that waits for a frame to be due, in seconds.
const MAX_RUN_SECONDS: f64 = 10e-6;
/// Interval of a paused flood: system calls in progress send nothing more.
const PAUSED_INTERVAL: u64 = u64::MAX;
/// Upper bound of the rate of any flood, in frames per second.
const MAX_RATE_PPS: f64 = TEN_GIGABIT_LINE_PPS;
/// Number of threads that send in turn. At the end of a system call the kernel waits for an RCU
/// grace period, 10 ms and more; another thread sends meanwhile.
const SENDER_THREADS: usize = 3;
/// Frames that the kernel passes to the device in one batch; slow floods use smaller batches.
///
/// The kernel keeps this many frames for reuse. With fewer than a veth queues (256), sender and
/// receiver of a fast flood contend for the lock of the page allocator.
const LARGE_BATCH_FRAMES: u32 = 256;
const SMALL_BATCH_FRAMES: u32 = 8;
/// Minimum rate for large batches, in frames per second.
const LARGE_BATCH_MIN_PPS: f64 = 500_000.0;

/// Note for reports about the frames of a flood.
pub(crate) const FLOOD_NOTE: &str = "every frame that counts as offered was made and sent; frames \
                               that overflow the queue of the veth are freed by the sender, under a \
                               lock that the receiver takes for its own frames";
/// Rate of 64-byte frames at the line rate of 10 Gb/s, in frames per second (RFC 2544,
/// section 20).
const TEN_GIGABIT_LINE_PPS: f64 = 14_880_952.0;

/// `struct settings` of the BPF program: interface and number of frames, version, start time,
/// interval.
type SettingsWords = [u64; 4];
/// `struct progress` of the BPF program: version, time of the next frame, frames sent, index of
/// the next frame.
type ProgressWords = [u64; 4];

/// Index of the number of sent frames in `struct progress`.
const OFFERED_WORD: usize = 2;

/// Flood that a dedicated core sends until dropped.
pub struct Flood {
    settings: Array<MapData, SettingsWords>,
    progress: Array<MapData, ProgressWords>,
    /// Interface index, and the number of frames in the upper 32 bits.
    device_and_frame_count: u64,
    version: u64,
    control: Arc<ThreadControl>,
    threads: Vec<JoinHandle<Result<(), LabError>>>,
}

/// State shared with the sender threads.
#[derive(Default)]
struct ThreadControl {
    stop: AtomicBool,
    /// Runs of the program per system call; 0 while the flood is paused.
    runs_per_call: AtomicU32,
    batch_frames: AtomicU32,
    /// Number of threads inside a system call.
    active_calls: AtomicU32,
}

/// Returns the batch size for a rate.
fn batch_frames_at(rate_pps: Option<f64>) -> u32 {
    let fast = rate_pps.is_none_or(|pps| pps >= LARGE_BATCH_MIN_PPS);
    if fast { LARGE_BATCH_FRAMES } else { SMALL_BATCH_FRAMES }
}

impl ThreadControl {
    fn set_rate(&self, rate_pps: Option<f64>) {
        let runs_per_call = match rate_pps {
            Some(0.0) => 0,
            Some(rate_pps) => {
                (rate_pps.clamp(1.0 / MAX_RUN_SECONDS, MAX_RATE_PPS) * CALL_SECONDS) as u32
            }
            None => (MAX_RATE_PPS * CALL_SECONDS) as u32,
        };
        self.batch_frames.store(batch_frames_at(rate_pps), Ordering::Relaxed);
        self.runs_per_call.store(runs_per_call, Ordering::SeqCst);
    }
}

impl Flood {
    /// Creates a flood of `frames`, sent in turn through the device of `end` from core `core`.
    ///
    /// The sender threads have the lowest priority on that core. The flood sends nothing until
    /// [`Flood::set_rate`]. The peer of the device must have a NAPI context: an XDP program, or GRO
    /// on. The sender frees the frames that overflow the peer's queue.
    ///
    /// # Errors
    /// When the kernel is older than Linux 5.18 or rejects the program, or `frames` is empty, has
    /// more than [`MAX_FRAMES`] frames, or a frame exceeds [`MAX_FRAME_BYTES`].
    pub fn new(end: &VethEnd, frames: &[Vec<u8>], core: usize) -> Result<Self, LabError> {
        let invalid = |what: &str| LabError::Config(format!("a flood {what}"));
        let longest = frames.iter().map(Vec::len).max().unwrap_or(0);
        if frames.is_empty() || frames.len() > MAX_FRAMES || longest > MAX_FRAME_BYTES {
            return Err(invalid(&format!(
                "has 1 to {MAX_FRAMES} frames of up to {MAX_FRAME_BYTES} bytes, not {} of up to \
                 {longest}",
                frames.len()
            )));
        }
        let mut ebpf = Ebpf::load(BPF_OBJECT)
            .map_err(LabError::io_other("cannot load the flood's BPF object"))?;
        let program = bpf::xdp_program(&mut ebpf, "flood")?;
        program.load().map_err(LabError::io_other("the kernel rejects the flood's BPF program"))?;
        copy_frames(&mut ebpf, frames)?;
        let settings = bpf::take_array(&mut ebpf, "settings")?;
        let progress = bpf::take_array(&mut ebpf, "progress")?;
        let data = vec![0; longest.max(MIN_FRAME_BYTES).next_multiple_of(8)];
        let control = Arc::new(ThreadControl::default());
        let ebpf = Arc::new(ebpf);
        let mut threads = Vec::new();
        for _ in 0..SENDER_THREADS {
            let (ebpf, data, thread_control) =
                (Arc::clone(&ebpf), data.clone(), Arc::clone(&control));
            threads.push(end.namespace.spawn(move || {
                cpu::pin_this_thread(core)?;
                cpu::lower_to_last_priority()?;
                run_sender(&ebpf, &data, &thread_control)
            })?);
        }
        let device_and_frame_count = u64::from(end.ifindex()?) | (frames.len() as u64) << 32;
        Ok(Self { settings, progress, device_and_frame_count, version: 0, control, threads })
    }

    /// Sets the rate in frames per second: `Some(0.0)` pauses the flood, `None` is the maximum.
    ///
    /// # Errors
    /// When the kernel rejects the new settings.
    pub fn set_rate(&mut self, rate_pps: Option<f64>) -> Result<(), LabError> {
        if rate_pps == Some(0.0) {
            self.control.set_rate(rate_pps);
            return self.write_settings(PAUSED_INTERVAL);
        }
        if batch_frames_at(rate_pps) != self.control.batch_frames.load(Ordering::Relaxed) {
            self.wait_for_calls()?;
        }
        // At least 1: 0 means no limit. Unit: 1/1024 ns.
        let interval_ns_x1024 = rate_pps.map_or(0, |rate| ((1024e9 / rate) as u64).max(1));
        self.write_settings(interval_ns_x1024)?;
        self.control.set_rate(rate_pps);
        self.unpark();
        Ok(())
    }

    /// Waits until no system call is in progress: a call keeps its batch size.
    fn wait_for_calls(&mut self) -> Result<(), LabError> {
        self.control.set_rate(Some(0.0));
        self.write_settings(PAUSED_INTERVAL)?;
        while self.control.active_calls.load(Ordering::SeqCst) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Writes the settings of the BPF program; the interval is in 1/1024 ns.
    fn write_settings(&mut self, interval_ns_x1024: u64) -> Result<(), LabError> {
        self.version += 1;
        let settings =
            [self.device_and_frame_count, self.version, monotonic_ns(), interval_ns_x1024];
        self.settings
            .set(0, settings, 0)
            .map_err(LabError::io_other("cannot set the rate of the flood"))
    }

    /// Returns the number of frames made and sent so far, including frames that overflowed the
    /// peer's queue.
    ///
    /// # Errors
    /// When a sender thread has failed, with the reason.
    pub fn offered(&mut self) -> Result<u64, LabError> {
        if self.threads.iter().any(JoinHandle::is_finished) {
            self.control.stop.store(true, Ordering::Relaxed);
            self.unpark();
            self.join_threads()?;
        }
        let progress = self.progress.get(&0, 0);
        Ok(progress.map_err(LabError::io_other("cannot read the flood's counter"))?[OFFERED_WORD])
    }

    fn unpark(&self) {
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    /// Joins the threads and returns the first error.
    fn join_threads(&mut self) -> Result<(), LabError> {
        let join = |thread: JoinHandle<_>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let results: Vec<_> = self.threads.drain(..).map(join).collect();
        results.into_iter().collect()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::Relaxed);
        // Calls in progress end soon. If the write fails, they end after their last run.
        let _ = self.write_settings(PAUSED_INTERVAL);
        self.unpark();
        // `offered` has returned the error, or the caller did not ask for it.
        let _ = self.join_threads();
    }
}

/// Runs the BPF program until stopped.
fn run_sender(ebpf: &Ebpf, data: &[u8], control: &ThreadControl) -> Result<(), LabError> {
    let program: &Xdp =
        ebpf.program("flood").and_then(|program| program.try_into().ok()).ok_or_else(|| {
            LabError::Config("the flood's BPF object has no XDP program `flood`".into())
        })?;
    while !control.stop.load(Ordering::Relaxed) {
        control.active_calls.fetch_add(1, Ordering::SeqCst);
        let runs = control.runs_per_call.load(Ordering::SeqCst);
        if runs == 0 {
            control.active_calls.fetch_sub(1, Ordering::SeqCst);
            thread::park_timeout(Duration::from_millis(100));
            continue;
        }
        let options = TestRunOptions {
            data_in: Some(data),
            repeat: runs,
            attrs: TestRunAttrs::new()
                .xdp_live_frames(control.batch_frames.load(Ordering::Relaxed)),
            ..TestRunOptions::new()
        };
        let ran = program.test_run(options);
        control.active_calls.fetch_sub(1, Ordering::SeqCst);
        ran.map_err(LabError::io_other(
            "the kernel does not run the flood (live frames need Linux 5.18)",
        ))?;
    }
    Ok(())
}

fn copy_frames(ebpf: &mut Ebpf, frames: &[Vec<u8>]) -> Result<(), LabError> {
    let mut map: Array<MapData, [u8; MAX_FRAME_BYTES]> = bpf::take_array(ebpf, "frames")?;
    for (index, frame) in frames.iter().enumerate() {
        let mut bytes = [0; MAX_FRAME_BYTES];
        bytes[..frame.len()].copy_from_slice(frame);
        map.set(index as u32, bytes, 0)
            .map_err(LabError::io_other("cannot write a frame to the BPF map"))?;
    }
    Ok(())
}

/// Returns the monotonic clock, which the BPF program reads, in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Builds one frame for each payload, from the flows of `addressing` in turn.
pub fn frames<'p>(
    addressing: &Addressing,
    payloads: impl IntoIterator<Item = &'p [u8]>,
) -> Vec<Vec<u8>> {
    let template = FrameTemplate::new(addressing);
    let frame = |(number, payload): (usize, &[u8])| {
        let mut frame = vec![0; template.header_bytes()];
        frame.extend(payload);
        template.write_headers(number as u32 % addressing.flow_count(), &mut frame, sum(payload));
        frame
    };
    payloads.into_iter().enumerate().map(frame).collect()
}
