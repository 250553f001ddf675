//! Watches the process of a service, by its control socket: its life, and what its gate refuses.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use super::event::Event;
use crate::control;

/// Interval of the attempts to reach a service that has ended.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Service to watch.
pub(super) struct ServiceWatch {
    pub(super) socket: PathBuf,
    /// Classes of admission that hold known traffic.
    pub(super) classes: Vec<String>,
    /// Share of the known packets, in percent, from which the gate counts as refusing them.
    pub(super) refused_percent: u64,
    pub(super) interval: Duration,
}

/// Packets of the known classes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct KnownPackets {
    admitted: u64,
    refused: u64,
}

impl ServiceWatch {
    /// Starts the thread. It ends when nobody receives its events any more.
    pub(super) fn start(self, events: Sender<Event>) -> io::Result<()> {
        thread::Builder::new().name("service".to_owned()).spawn(move || self.run(&events)).map(drop)
    }

    fn run(self, events: &Sender<Event>) {
        let mut is_running = None;
        loop {
            match Process::behind(&self.socket) {
                Ok(process) => {
                    let event = Event::ServiceRuns(process.pid);
                    if is_running != Some(true) && events.send(event).is_err() {
                        return;
                    }
                    is_running = Some(true);
                    if self.follow(&process, events).is_err() {
                        return;
                    }
                    // A successor may have taken over: then the next attempt finds it.
                }
                Err(error) => {
                    if is_running != Some(false)
                        && events.send(Event::ServiceEnded(error.to_string())).is_err()
                    {
                        return;
                    }
                    is_running = Some(false);
                    thread::sleep(RETRY_INTERVAL);
                }
            }
        }
    }

    /// Reports what the gate refuses, until the process ends. Fails when nobody receives the events.
    fn follow(&self, process: &Process, events: &Sender<Event>) -> Result<(), ()> {
        let mut last: Option<KnownPackets> = None;
        while !process.has_ended_within(self.interval) {
            // A control socket that does not answer says nothing about what is refused.
            let Ok(state) = control::query(&self.socket) else { continue };
            let packets = known_packets(&state, &self.classes);
            if let Some(last) = last.replace(packets) {
                let is_refusing = is_refusing(last, packets, self.refused_percent);
                events.send(Event::Refusal(is_refusing)).map_err(drop)?;
            }
        }
        Ok(())
    }
}

/// Sums of the classes' counters in the state that a control socket reports.
fn known_packets(state: &Value, classes: &[String]) -> KnownPackets {
    let mut packets = KnownPackets::default();
    for class in classes {
        let counter = |name: &str| state["gate"]["classes"][class][name].as_u64().unwrap_or(0);
        packets.admitted += counter("admitted");
        let refused = ["refused_closed", "refused_rate", "refused_source_share"];
        packets.refused += refused.into_iter().map(counter).sum::<u64>();
    }
    packets
}

/// True if of the packets since `last` at least this share was refused.
fn is_refusing(last: KnownPackets, now: KnownPackets, percent: u64) -> bool {
    let refused = now.refused.saturating_sub(last.refused);
    let admitted = now.admitted.saturating_sub(last.admitted);
    refused > 0 && refused * 100 >= percent * (refused + admitted)
}

/// Process that listens on a socket.
struct Process {
    pid: u32,
    descriptor: OwnedFd,
}

impl Process {
    fn behind(socket: &std::path::Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let pid = socket_peercred(&stream)?.pid;
        let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid: Pid::as_raw(Some(pid)) as u32, descriptor })
    }

    /// Waits; returns true as soon as the process has ended.
    fn has_ended_within(&self, time: Duration) -> bool {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut descriptors = [PollFd::new(&self.descriptor, PollFlags::IN)];
        // An interrupted wait is a short wait.
        poll(&mut descriptors, Some(&time)).is_ok_and(|ready| ready > 0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn known_classes_are_added_up() {
        let class = json!({"admitted": 90, "refused_closed": 1, "refused_rate": 2, "refused_source_share": 7});
        let state =
            json!({"gate": {"classes": {"trusted": class, "known": class, "unknown": class}}});
        let classes = ["trusted", "known", "absent"].map(str::to_owned);
        assert_eq!(known_packets(&state, &classes), KnownPackets { admitted: 180, refused: 20 });
        assert_eq!(known_packets(&json!({}), &classes), KnownPackets::default());
    }

    #[test]
    fn refusal_is_a_share_of_the_new_packets() {
        let packets = |admitted, refused| KnownPackets { admitted, refused };
        let last = packets(1000, 1000);
        assert!(is_refusing(last, packets(1095, 1005), 5));
        assert!(!is_refusing(last, packets(1096, 1004), 5));
        assert!(!is_refusing(last, last, 5), "nothing arrived");
        assert!(!is_refusing(last, packets(0, 0), 5), "counters of a successor");
    }

    #[test]
    fn process_behind_a_socket_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        assert!(Process::behind(&path).is_err());
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let process = Process::behind(&path).unwrap();
        assert_eq!(process.pid, std::process::id());
        assert!(!process.has_ended_within(Duration::ZERO));
    }
}
