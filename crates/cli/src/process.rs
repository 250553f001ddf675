//! This process: the ready line for its parent, the stop flag, and the scheduling priority.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Failure;

/// Prints the ready line, by which the parent process knows that the server is serving.
pub(crate) fn print_ready(
    name: &str,
    addresses: &[SocketAddr],
    backend: &str,
) -> std::io::Result<()> {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready: {name} on {} by {backend}", addresses.join(", "))?;
    out.flush()
}

/// Returns a flag that is set on SIGINT, on SIGTERM, or after `duration` seconds.
pub(crate) fn stop_flag(duration: Option<f64>) -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the process at once.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    if let Some(seconds) = duration {
        let limit = Duration::try_from_secs_f64(seconds)
            .map_err(|_| format!("--duration {seconds}: give a number of seconds above 0"))?;
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            stop.store(true, Ordering::Relaxed);
        });
    }
    Ok(stop)
}

/// Nice increment for the highest priority of a thread without real-time scheduling.
const NICE_INCREMENT: i32 = -20;

/// Raises the scheduling priority of the calling thread: the thread that decides about drops is
/// needed most when the machine is busiest. Missing permission is ignored.
pub(crate) fn raise_priority() {
    let _ = rustix::process::nice(NICE_INCREMENT);
}
