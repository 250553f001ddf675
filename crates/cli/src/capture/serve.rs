//! The side of the running server: captures that it serves through its control socket.

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use tidegate::DropReason;
use tidegate::capture::{CaptureFilter, CaptureLayout, CaptureRequest, FilterInstruction};
use tidegate_memory::shared::Region;
use tidegate_wire::Medium;

use crate::Failure;
use crate::controllable::Controllable;

/// Facts that a reader needs before it begins.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CaptureInfo {
    /// Network cores, each with a ring of its own.
    pub(crate) cores: usize,
    /// Frames begin with an IP header, not with an Ethernet header.
    pub(crate) is_ip: bool,
    /// Sockets belong to attached programs.
    pub(crate) has_programs: bool,
    /// Names of the drop reasons, in the order of their numbers.
    pub(crate) drop_reasons: Vec<String>,
    /// Process id of the server.
    pub(crate) pid: u32,
    /// Name of the server's program.
    pub(crate) program: String,
}

/// Capture as a reader requests it. The descriptor of its memory comes along.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct CaptureSettings {
    /// Network cores that the reader has prepared rings for.
    pub(crate) cores: usize,
    /// Size of a ring.
    pub(crate) ring_bytes: usize,
    /// Maximum bytes of a frame to copy.
    pub(crate) snap_bytes: usize,
    /// Records also when programs are notified.
    #[serde(default)]
    pub(crate) notifications: bool,
    /// Filter as instructions of classic BPF; empty for all frames.
    pub(crate) filter: Vec<(u16, u8, u8, u32)>,
}

/// Facts about captures of this server.
pub(crate) fn info(server: &impl Controllable) -> Result<CaptureInfo, Failure> {
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    Ok(CaptureInfo {
        cores: server.core_count(),
        is_ip: server.medium()? == Medium::Ip,
        has_programs: server.has_programs(),
        drop_reasons: DropReason::ALL.iter().map(|reason| reason.name().to_owned()).collect(),
        pid: std::process::id(),
        program,
    })
}

/// Captures that run, each with a thread that waits for the end of its reader.
#[derive(Default)]
pub(crate) struct CaptureSessions(Vec<(UnixStream, JoinHandle<()>)>);

impl CaptureSessions {
    /// Begins a capture for the reader at `stream`.
    ///
    /// # Errors
    /// When the request is invalid or a core refuses it; then no capture runs.
    pub(crate) fn start<S: Controllable>(
        &mut self,
        stream: &UnixStream,
        server: &Arc<S>,
        settings: CaptureSettings,
        memory: Option<OwnedFd>,
    ) -> Result<(), Failure> {
        static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

        let CaptureSettings { cores, ring_bytes, snap_bytes, notifications, filter } = settings;
        self.0.retain(|(_, thread)| !thread.is_finished());
        let instruction = |(code, jt, jf, k)| FilterInstruction { code, jt, jf, k };
        let program: Vec<_> = filter.into_iter().map(instruction).collect();
        let filter = (!program.is_empty()).then(|| CaptureFilter::new(program)).transpose()?;
        if cores != server.core_count() {
            return Err("the number of network cores has changed: try again".into());
        }
        let memory = memory.ok_or("the request comes without shared memory")?;
        let layout = CaptureLayout::new(cores, ring_bytes)?;
        let memory = Arc::new(Region::open(memory, layout.words())?);
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let request = CaptureRequest { number, filter, snap_bytes, notifications, memory, layout };
        let (kept, mut waited) = (stream.try_clone()?, stream.try_clone()?);
        waited.set_read_timeout(None)?;
        if let Err(error) = server.start_capture(&request) {
            server.end_capture(number);
            return Err(error.into());
        }
        let ended = Arc::clone(server);
        let thread = std::thread::Builder::new().name("capture".to_owned()).spawn(move || {
            // The reader sends nothing more: this returns when the reader has gone, or at the end
            // of the server.
            let _ = waited.read(&mut [0]);
            ended.end_capture(number);
            // The memory is unmapped here, not on a network core.
            drop(request);
        });
        match thread {
            Ok(thread) => {
                self.0.push((kept, thread));
                Ok(())
            }
            Err(error) => {
                server.end_capture(number);
                Err(error.into())
            }
        }
    }
}

impl Drop for CaptureSessions {
    fn drop(&mut self) {
        for (stream, thread) in self.0.drain(..) {
            // The thread wakes up; the reader may have gone already.
            let _ = stream.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }
}
