//! What this process tells whoever started it, when it ends, and how urgent it
//! is.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Failure;

/// Tells whoever started us that it is served from now on.
pub(crate) fn ready(name: &str, addresses: &[SocketAddr], path: &str) -> std::io::Result<()> {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready: {name} on {} by {path}", addresses.join(", "))?;
    out.flush()
}

/// Set when the command is to end: by SIGINT, by SIGTERM, or by time.
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

/// As urgent as a program that is not real-time can be.
const NICE: i32 = -20;

/// Makes the calling thread urgent: who decides what is dropped is needed when
/// the machine is busiest. Without the right to it, it works too.
pub(crate) fn be_urgent() {
    let _ = rustix::process::nice(NICE);
}
