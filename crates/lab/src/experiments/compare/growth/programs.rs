//! Processor time of a network core for a message, with one attached program and with many that have
//! the same load together.
//!
//! The daemon runs in this process with its network core on core 1. A thread on core 0 is the host at
//! the other end of an in-memory link and all programs, in turn, so that a machine of two cores has
//! room for them. The core sleeps as soon as it has no work: its processor time is that of the
//! messages.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate::{IdleConfig, Net, NetConfig, UdpSocket};
use tidegate_device::mem::{self, MemConfig, MemDevice};
use tidegate_load::Addressing;
use tidegate_load::neighbour::{self, NeighbourEvent};
use tidegate_load::template::{FrameTemplate, sum};
use tidegate_service::Geometry;
use tidegate_service::daemon::{AttachConfig, Daemon};

use crate::error::LabError;
use crate::testbed::cpu::{self, ThreadTime};
use crate::testbed::folder;

/// Messages on their way at a time, of all programs together.
pub(super) const IN_FLIGHT: usize = 256;
const MESSAGE_BYTES: usize = 64;
const FIRST_PORT: u16 = 7_000;
const DRIVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const DAEMON_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// Time without an echo after which a message counts as lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(5);

/// Attached program: an echo server.
struct Program {
    socket: UdpSocket,
    _net: Net,
}

/// Daemon with attached programs, and the host at the other end of its link.
pub(super) struct ProgramsTestbed {
    driver: MemDevice,
    programs: Vec<Program>,
    /// Message to each program.
    frames: Vec<Vec<u8>>,
    addressing: Addressing,
    /// Program of the next message.
    next: usize,
    core_time: ThreadTime,
    daemon: Daemon,
    _folder: TempDir,
}

impl ProgramsTestbed {
    pub(super) fn new(count: usize, core: usize) -> Result<Self, LabError> {
        let folder = folder::private()?;
        let failed = || LabError::io("the daemon of the experiment failed");
        let config = MemConfig::default().macs([DRIVER_MAC, DAEMON_MAC]).capacity(2 * IN_FLIGHT);
        let (driver, device) = mem::wire(&config).map_err(failed())?;
        let path = folder.path().join("daemon.sock");
        let attach = AttachConfig::new(
            path.clone(),
            Geometry { sockets: 1, tcp_bytes: 1 << 16, udp_bytes: 1 << 18 },
        );
        let (started, thread) = mpsc::channel();
        let begin = move || {
            // The receiver takes the first thread only.
            let _ = started.send(rustix::thread::gettid());
            cpu::pin_this_thread(core).map_err(io::Error::other)
        };
        let no_idle_time =
            IdleConfig::default().spin_ns(0).pause_ns(0).max_gap_ns(0).max_linger_ns(0);
        let address = "10.0.0.2/24".parse().map_err(LabError::io_other("no address"))?;
        let net = NetConfig::new(device).address(address).idle(no_idle_time).seed([7; 16]);
        let daemon = Daemon::start(net, attach, begin, Arc::new(|_: &str| {}));
        let daemon = daemon.map_err(LabError::io_other("cannot start a daemon"))?;
        let thread = thread.recv().map_err(LabError::io_other("the network core did not start"))?;
        let mut programs = Vec::new();
        for index in 0..count {
            let net = Net::attach(&path, "growth").map_err(failed())?;
            let local = SocketAddr::new([10, 0, 0, 2].into(), FIRST_PORT + index as u16);
            let socket = UdpSocket::bind(&net, local).map_err(failed())?;
            socket.set_nonblocking(true).map_err(failed())?;
            programs.push(Program { socket, _net: net });
        }
        let addressing = Addressing {
            source_mac: DRIVER_MAC,
            target_mac: DAEMON_MAC,
            source: IpAddr::from([10, 0, 0, 1]),
            source_count: 1,
            first_port: 40_000,
            port_count: 1,
            target: SocketAddr::new([10, 0, 0, 2].into(), FIRST_PORT),
        };
        let frames =
            (0..count).map(|index| frame(&addressing, FIRST_PORT + index as u16)).collect();
        let core_time = ThreadTime::of(thread);
        let _folder = folder;
        Ok(Self { driver, programs, frames, addressing, next: 0, core_time, daemon, _folder })
    }

    /// Passes `messages` messages to the programs in turn and back, and returns the network core's
    /// processor time for each, in nanoseconds.
    pub(super) fn measure(&mut self, messages: u64) -> Result<f64, LabError> {
        // The first message is answered when the neighbour is known.
        self.exchange(1)?;
        self.exchange(messages / 4)?;
        let before = self.core_time.ns()?;
        self.exchange(messages)?;
        Ok((self.core_time.ns()? - before) as f64 / messages as f64)
    }

    fn exchange(&mut self, messages: u64) -> Result<(), LabError> {
        let (mut sent, mut echoed) = (0, 0);
        let mut last_echo = Instant::now();
        while echoed < messages {
            let free = IN_FLIGHT as u64 - (sent - echoed);
            let burst = free.min(messages - sent) as usize;
            for ahead in 0..burst {
                self.driver.stage(ahead, &self.frames[self.next]);
                self.next = (self.next + 1) % self.frames.len();
            }
            self.driver.flush(burst);
            sent += burst as u64;
            self.serve()?;
            let received = self.receive();
            echoed += received;
            if received > 0 {
                last_echo = Instant::now();
            } else if last_echo.elapsed() > LOSS_TIMEOUT {
                return Err(self.loss_error(sent - echoed));
            }
        }
        Ok(())
    }

    #[cold]
    fn loss_error(&self, lost: u64) -> LabError {
        let mut drops = self.daemon.report().map(|report| report.drops).unwrap_or_default();
        drops.retain(|(_, count)| *count > 0);
        let what = format!("{lost} messages to attached programs are lost; dropped: {drops:?}");
        LabError::Config(what)
    }

    /// Lets every program echo what it has.
    fn serve(&self) -> Result<(), LabError> {
        self.programs.iter().try_for_each(|program| {
            match program.socket.exchange_in_place(|request| Some(request.len)) {
                Err(error) if error.kind() != ErrorKind::WouldBlock => {
                    Err(LabError::io("an attached program failed")(error))
                }
                _ => Ok(()),
            }
        })
    }

    /// Takes the echoes, and answers what the daemon asks about its neighbour.
    fn receive(&mut self) -> u64 {
        let Self { driver, addressing, .. } = self;
        let (mut echoed, mut replies) = (0, Vec::new());
        driver.receive_bytes(IN_FLIGHT, |bytes| {
            match neighbour::parse(bytes, addressing, addressing.target.ip()) {
                Some(NeighbourEvent::Reply(frame)) => replies.push(frame),
                Some(NeighbourEvent::Resolved(_)) => {}
                // The daemon also announces its address.
                None => echoed += u64::from(is_ipv4(bytes)),
            }
        });
        for reply in replies {
            driver.stage(0, &reply);
            driver.flush(1);
        }
        echoed
    }
}

fn is_ipv4(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[8, 0])
}

/// Message to a port.
fn frame(addressing: &Addressing, port: u16) -> Vec<u8> {
    let target = SocketAddr::new(addressing.target.ip(), port);
    let template = FrameTemplate::new(&Addressing { target, ..addressing.clone() });
    let payload = [0x7e; MESSAGE_BYTES];
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(payload);
    template.write_headers(0, &mut frame, sum(&payload));
    frame
}
