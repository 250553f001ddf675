//! Log of the daemon. A thread of its own writes the lines: standard error may be a pipe that nobody
//! reads or a slow disk, applications cause lines, and no network core may wait for either.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Log sink: receives one line for each event of an application.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Maximum number of lines that wait for the sink. More are lost, and counted.
const MAX_WAITING_LINES: usize = 1024;
/// Maximum wait for the sink at the end of the daemon.
const MAX_END_TIME: Duration = Duration::from_secs(1);

/// Writer of the lines that wait.
pub(super) struct LogWriter {
    sink: Log,
    lines: Receiver<String>,
    lost: Arc<AtomicU64>,
}

/// Running writer. Waits when dropped until all lines are written, if no [`Log`] is left.
pub(super) struct RunningWriter(Mutex<Receiver<()>>);

/// Log that never waits, and the writer that passes its lines to `sink`.
pub(super) fn without_waiting(sink: Log) -> (Log, LogWriter) {
    let (sender, lines) = sync_channel::<String>(MAX_WAITING_LINES);
    let lost = Arc::new(AtomicU64::new(0));
    let writer = LogWriter { sink, lines, lost: Arc::clone(&lost) };
    let log = move |line: &str| {
        if sender.try_send(line.to_owned()).is_err() {
            lost.fetch_add(1, Ordering::Relaxed);
        }
    };
    (Arc::new(log), writer)
}

impl LogWriter {
    /// Starts the thread, which ends when no [`Log`] is left.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn start(self) -> io::Result<RunningWriter> {
        let (running, has_ended) = channel();
        let run = move || {
            let Self { sink, lines, lost } = self;
            let _running = running;
            for line in lines {
                sink(&line);
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    sink(&format!("{lost} lines of this log were lost: too many at a time"));
                }
            }
        };
        std::thread::Builder::new().name("tidegate-log".to_owned()).spawn(run)?;
        Ok(RunningWriter(Mutex::new(has_ended)))
    }
}

impl Drop for RunningWriter {
    fn drop(&mut self) {
        // Nothing is sent: the other end is dropped with the thread.
        let ended = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(MAX_END_TIME);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sink_that_blocks_delays_nobody() {
        let (open, gate) = channel::<()>();
        let (gate, written) = (Mutex::new(gate), Arc::new(Mutex::new(Vec::new())));
        let lines = Arc::clone(&written);
        let sink = move |line: &str| {
            // Blocks until the other end is dropped.
            let _ = gate.lock().unwrap().recv();
            lines.lock().unwrap().push(line.to_owned());
        };
        let (log, writer) = without_waiting(Arc::new(sink));
        let running = writer.start().unwrap();
        let lost = 100;
        // The writer may have taken one line already.
        for number in 0..=MAX_WAITING_LINES + lost {
            log(&format!("line {number}"));
        }
        drop((open, log));
        // The writer ends when all lines are written.
        let _ = running.0.lock().unwrap().recv();
        let written = written.lock().unwrap();
        assert_eq!(written[0], "line 0");
        let lost = written.iter().find(|line| line.contains("lines of this log were lost"));
        assert!(lost.is_some(), "{} lines", written.len());
        assert!(written.len() > MAX_WAITING_LINES);
    }
}
