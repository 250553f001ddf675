//! Thread that repeats a health check.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use tidegate::Net;

use super::event::Event;
use crate::control;
use crate::health_check::{HealthCheck, KernelTransport};

/// Name of this process among the daemon's programs.
const ATTACHED_NAME: &str = "tidegate-announce";

/// Way of a check to the service.
#[derive(Clone, Debug)]
pub(super) enum CheckWay {
    Kernel,
    /// Control socket of the server.
    Control(PathBuf),
    /// Socket of the daemon.
    Daemon(PathBuf),
}

/// Health check to repeat.
pub(super) struct CheckWatch {
    /// Number of the check, in its events.
    pub(super) index: usize,
    pub(super) check: HealthCheck,
    pub(super) address: IpAddr,
    pub(super) way: CheckWay,
    pub(super) interval: Duration,
    pub(super) timeout: Duration,
}

impl CheckWatch {
    /// Starts the thread. It ends when nobody receives its events any more.
    pub(super) fn start(self, events: Sender<Event>) -> io::Result<()> {
        let run = move || {
            let mut attached = None;
            loop {
                let began = Instant::now();
                let result = self.run_once(&mut attached);
                if events.send(Event::Checked(self.index, result)).is_err() {
                    return;
                }
                thread::sleep(self.interval.saturating_sub(began.elapsed()));
            }
        };
        thread::Builder::new().name("check".to_owned()).spawn(run).map(drop)
    }

    /// `attached` keeps the attachment to the daemon from check to check.
    fn run_once(&self, attached: &mut Option<Net>) -> Result<(), String> {
        let Self { check, address, timeout, .. } = self;
        match &self.way {
            CheckWay::Kernel => check.run(&KernelTransport, *address, *timeout),
            CheckWay::Control(socket) => control::check_service(socket, check, *address, *timeout),
            CheckWay::Daemon(socket) => {
                let net = attached.take().map_or_else(|| Net::attach(socket, ATTACHED_NAME), Ok);
                let net = net.map_err(|error| format!("{}: {error}", socket.display()))?;
                // After a failure another daemon may be at the socket.
                check.run(&net, *address, *timeout)?;
                *attached = Some(net);
                Ok(())
            }
        }
    }
}
