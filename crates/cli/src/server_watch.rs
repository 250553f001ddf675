//! Thread that watches a running server: its drops, and its life for the service manager.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

use tidegate::Net;

use crate::background::BackgroundThread;
use crate::drop_log::{CHECK_INTERVAL, DropLog};
use crate::service_manager::Watchdog;

/// Thread that keeps the [`DropLog`] of a server's stacks, and sends the messages of its
/// [`Watchdog`]. Dropping it ends the thread.
pub(crate) struct ServerWatch {
    end: Option<Sender<()>>,
    /// `None` for a server with nothing to watch.
    thread: Option<JoinHandle<()>>,
}

impl ServerWatch {
    /// Starts the thread for these stacks; none for a server on kernel sockets.
    pub(crate) fn start(nets: Vec<Net>, background: BackgroundThread) -> std::io::Result<Self> {
        let watchdog = Watchdog::of_this_process();
        if nets.is_empty() && watchdog.is_none() {
            return Ok(Self { end: None, thread: None });
        }
        let interval = watchdog.as_ref().map_or(CHECK_INTERVAL, Watchdog::interval);
        let interval = interval.min(CHECK_INTERVAL);
        let (end, ended) = channel();
        let watch = move || {
            background.apply();
            let mut drop_log = DropLog::new();
            let logs = |drop_log: &DropLog| !nets.is_empty() && !drop_log.is_complete();
            while (watchdog.is_some() || logs(&drop_log))
                && ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout)
            {
                // Waits while a stack hangs: then the service manager gets no message.
                for net in &nets {
                    drop_log.check(&net.counters().drops());
                }
                watchdog.iter().for_each(Watchdog::notify);
            }
        };
        let thread = std::thread::Builder::new().name("watch".to_owned()).spawn(watch)?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for ServerWatch {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
