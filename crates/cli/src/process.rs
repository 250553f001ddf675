//! This process: its start, the ready line for its parent, the stop flag, and the scheduling
//! priority, and a secret seed.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::Net;

use crate::Failure;
use crate::metrics::{MetricsListener, MetricsOption, MetricsServer, MetricsSource};
use crate::reload::{ReloadPart, ReloadSignal, ReloadThread};
use crate::sandbox::{Obstacle, Sandbox, UserOption};
use crate::server_watch::ServerWatch;
use crate::service_manager;

/// Prints the ready line, by which the parent process knows that this process serves.
pub(crate) fn print_ready_line(line: fmt::Arguments<'_>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready: {line}")?;
    out.flush()
}

/// Prints the ready line, and notifies the service manager.
pub(crate) fn announce_ready(line: fmt::Arguments<'_>) -> std::io::Result<()> {
    print_ready_line(line)?;
    service_manager::notify_ready();
    Ok(())
}

/// Announces that a server serves on these addresses.
pub(crate) fn announce_server(
    name: &str,
    addresses: &[SocketAddr],
    backend: &str,
) -> std::io::Result<()> {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    announce_ready(format_args!("{name} on {} by {backend}", addresses.join(", ")))
}

/// Flag that is set on SIGINT, on SIGTERM, or at a time limit.
pub(crate) struct StopSignal {
    flag: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl StopSignal {
    /// Registers the signals. `duration` is the time limit in seconds, from now on.
    pub(crate) fn register(duration: Option<f64>) -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // A second signal ends the process at once.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        let deadline = duration.map(|seconds| {
            let limit = Duration::try_from_secs_f64(seconds).ok();
            limit
                .and_then(|limit| Instant::now().checked_add(limit))
                .ok_or_else(|| format!("--duration {seconds}: give a number of seconds above 0"))
        });
        Ok(Self { flag, deadline: deadline.transpose()? })
    }

    /// The flag.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Starts the thread that waits for the time limit, if there is one.
    pub(crate) fn start_timer(self) {
        let Self { flag, deadline: Some(deadline) } = self else { return };
        std::thread::spawn(move || {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            flag.store(true, Ordering::Relaxed);
        });
    }
}

/// Returns the flag of a [`StopSignal`] whose timer runs.
pub(crate) fn stop_flag(duration: Option<f64>) -> Result<Arc<AtomicBool>, Failure> {
    let signal = StopSignal::register(duration)?;
    let flag = signal.flag();
    signal.start_timer();
    Ok(flag)
}

/// Start of a server: what it needs while it still has privileges, and what has to wait until it
/// has none.
pub(crate) struct Startup {
    pub(crate) sandbox: Sandbox,
    reload: ReloadSignal,
    stop: StopSignal,
    metrics: Option<MetricsListener>,
}

impl Startup {
    /// Looks up the user of the server, and registers its signals. To be called before the thread
    /// is pinned to a processor.
    pub(crate) fn begin(
        user: &UserOption,
        obstacle: Option<Obstacle>,
        duration: Option<f64>,
        metrics: &MetricsOption,
    ) -> Result<Self, Failure> {
        let sandbox = user.sandbox(obstacle)?;
        let reload = ReloadSignal::register(sandbox.clone())?;
        let stop = StopSignal::register(duration)?;
        Ok(Self { sandbox, reload, stop, metrics: metrics.bind()? })
    }

    /// Flag that is set when the server is to end.
    pub(crate) fn stop(&self) -> Arc<AtomicBool> {
        self.stop.flag()
    }

    /// Gives up the privileges of a server that is ready. Reloads these parts at SIGHUP, watches the
    /// stacks, and serves the metrics of `source`, for as long as the returned value lives.
    pub(crate) fn finish(
        self,
        parts: Vec<ReloadPart>,
        stacks: &[Net],
        source: impl MetricsSource,
    ) -> Result<ServerThreads, Failure> {
        self.sandbox.enter()?;
        self.stop.start_timer();
        let background = self.reload.background();
        let reload = self.reload.start_thread()?;
        reload.serve(parts);
        let serve = |listener: MetricsListener| listener.serve(source, background.clone());
        let metrics = self.metrics.map(serve).transpose()?;
        let watch = ServerWatch::start(stacks.to_vec(), background)?;
        Ok(ServerThreads { _reload: reload, _watch: watch, _metrics: metrics })
    }
}

/// Threads beside a server, which end with this value, as does the service.
pub(crate) struct ServerThreads {
    _reload: ReloadThread,
    _watch: ServerWatch,
    _metrics: Option<MetricsServer>,
}

impl Drop for ServerThreads {
    fn drop(&mut self) {
        service_manager::notify_stopping();
    }
}

/// Nice increment for the highest priority of a thread without real-time scheduling.
const NICE_INCREMENT: i32 = -20;

/// Raises the scheduling priority of the calling thread: the thread that decides about drops is
/// needed most when the machine is busiest. Missing permission is ignored.
pub(crate) fn raise_priority() {
    let _ = rustix::process::nice(NICE_INCREMENT);
}

/// Returns a secret seed. The standard library seeds `RandomState` from system randomness.
pub(crate) fn secret_seed() -> [u8; 16] {
    let half = || u128::from(RandomState::new().hash_one(0));
    (half() << 64 | half()).to_le_bytes()
}
