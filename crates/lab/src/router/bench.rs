//! The router on its bench: a flood from the left, counted on the right.
//!
//! One core sends. The other does all the rest: the receive work of the
//! router's devices, the router, the screen, and at the far end the kernel's
//! first look at what was forwarded, by which it drops it.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::site::{LEFT_V4, ROUTER_RIGHT, RouterSite};
use crate::cpu::{self, CoreTicks};
use crate::error::LabError;
use crate::livelock::Measured;
use crate::load::Addressing;
use crate::load::flood::{self, Flood};
use crate::load::responder::Responder;
use crate::process::Process;

/// Where the flood goes: an address of the right network that only the
/// [`Responder`] answers for.
const SINK: &str = "10.7.2.9";
const SINK_PORT: u16 = 9;
/// Nobody's: the kernel drops frames to it at its first look.
const NOBODY_MAC: [u8; 6] = [2, 0xf1, 0x00, 0xd0, 0, 2];
const FLOWS: u16 = 64;
const FIRST_PORT: u16 = 20_000;
/// As many polls without work before an interrupt as can be told.
const NEVER: &str = "2147483647";
/// The nice value of programs that are measured beside the router.
const NICE: &str = "-10";
/// Verdicts of one message: less than the low-water mark of the queue, so that
/// the screen is never idle while they are sent.
const SCREEN_BATCH: &str = "8";
/// What is sent until so many packets have come through, and how long to wait.
const FIRST_RATE_PPS: f64 = 1000.0;
const FIRST_PACKETS: u64 = 20;
const FORWARDS_WITHIN: Duration = Duration::from_secs(10);
/// What the paper's packets carried.
const PAYLOAD: &[u8] = &[0x7e; 4];

/// A router to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The flags of `tidegate route`, besides the ports.
    pub(super) flags: Vec<String>,
    /// Whether each packet interrupts; else the router polls, and a timer
    /// interrupts when it does not.
    pub(super) interrupts: bool,
    /// Whether each packet is shown to a screen.
    pub(super) screen: bool,
}

/// The namespaces, and the cores.
pub(super) struct Bench {
    pub(super) site: RouterSite,
    pub(super) server_core: usize,
    pub(super) load_core: usize,
    _sink: Responder,
}

impl Bench {
    pub(super) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let site = RouterSite::new()?;
        let sink = Addressing {
            source_mac: NOBODY_MAC,
            target_mac: site.right_mac,
            source: address(SINK)?,
            sources: 1,
            first_port: SINK_PORT,
            ports: 1,
            target: (address(ROUTER_RIGHT[0])?, 0).into(),
        };
        let sink = Responder::new(&site.right, &sink, load_core)?;
        Ok(Self { site, server_core, load_core, _sink: sink })
    }

    /// Lets the devices' receive work run on the router's core, before all
    /// else: what interrupts do. The router runs, so that they have NAPI
    /// contexts.
    fn interrupt_on_server_core(&self) -> Result<(), LabError> {
        for device in [&self.site.left_device, &self.site.right_device] {
            self.site.router.write_device_file(device, "threaded", "1")?;
            let threads = cpu::napi_threads(device);
            if threads.is_empty() {
                return Err(LabError::Config(format!("{device} has no NAPI thread")));
            }
            for thread in threads {
                cpu::pin_process(thread, self.server_core)?;
                cpu::run_as_interrupt(thread)?;
            }
        }
        Ok(())
    }

    /// An idle device would ask for an interrupt again, which on veth comes on
    /// the sender's core. Instead a timer looks after it, on the core that
    /// polled it last. The router runs, and puts the setting back at its end.
    fn never_interrupt_load_core(&self) -> Result<(), LabError> {
        for device in [&self.site.left_device, &self.site.right_device] {
            self.site.router.write_device_file(device, "threaded", "0")?;
            self.site.router.write_device_file(device, "napi_defer_hard_irqs", NEVER)?;
        }
        Ok(())
    }

    fn flood(&self) -> Result<Flood, LabError> {
        let addressing = Addressing {
            source_mac: self.site.left.mac,
            target_mac: self.site.left_mac,
            source: address(LEFT_V4)?,
            sources: 1,
            first_port: FIRST_PORT,
            ports: FLOWS,
            target: (address(SINK)?, SINK_PORT).into(),
        };
        let payloads = std::iter::repeat_n(PAYLOAD, usize::from(FLOWS));
        let frames = flood::frames(&addressing, payloads);
        let mut flood = Flood::new(&self.site.left, &frames, self.load_core)?;
        flood.lose_as_a_card();
        Ok(flood)
    }
}

/// A router that runs, and the flood that is about to hit it.
pub(super) struct Running<'a> {
    // Dropped first: a router that is flooded may not hear that it is to end.
    flood: Flood,
    router: Process,
    _screen: Option<Process>,
    bench: &'a Bench,
    _folder: TempDir,
}

impl<'a> Running<'a> {
    /// Starts a router; it ends by itself after `limit`, so that nothing that
    /// runs before all others runs for ever.
    pub(super) fn start(
        shape: &Shape,
        bench: &'a Bench,
        limit: Duration,
    ) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder for files"))?;
        let limit = format!("{:.1}", limit.as_secs_f64());
        let core = bench.server_core.to_string();
        let socket = folder.path().join("screen");
        let screen = if shape.screen {
            let rules = folder.path().join("rules");
            std::fs::write(&rules, RULES).map_err(LabError::file(&rules))?;
            let mut command = bench.program(bench.this_program()?);
            command.arg("screen").arg("--rules").arg(&rules).arg("--listen").arg(&socket);
            command.args(["--batch", SCREEN_BATCH, "--duration", &limit]);
            let mut screen = Process::start("screen", &mut command)?;
            screen.wait_for_line()?;
            Some(screen)
        } else {
            None
        };
        let program = bench.this_program()?;
        let mut command = bench.site.router.command_on_core(bench.server_core, program);
        command.arg("route").args(bench.site.port_flags("xdp")).args(&shape.flags);
        command.args(["--json", "--realtime", "--cpu", &core, "--duration", &limit]);
        if shape.screen {
            command.arg("--screen").arg(&socket);
        }
        let mut router = Process::start("route", &mut command)?;
        router.wait_for_line()?;
        if shape.interrupts {
            bench.interrupt_on_server_core()?;
        } else {
            bench.never_interrupt_load_core()?;
        }
        let flood = bench.flood()?;
        let mut running = Self { flood, router, _screen: screen, bench, _folder: folder };
        running.wait_until_it_forwards()?;
        Ok(running)
    }

    /// The first packets wait until the router knows its neighbours.
    fn wait_until_it_forwards(&mut self) -> Result<(), LabError> {
        let (before, began) = (self.bench.site.right.received()?, Instant::now());
        self.flood.set_rate(Some(FIRST_RATE_PPS))?;
        while self.bench.site.right.received()? < before + FIRST_PACKETS {
            if began.elapsed() > FORWARDS_WITHIN {
                return Err(LabError::Config("the router forwards nothing".into()));
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.flood.set_rate(Some(0.0))
    }

    /// The router's process.
    pub(super) fn pid(&self) -> u32 {
        self.router.pid()
    }

    /// Offers a load and measures what is forwarded. `meanwhile` is called at
    /// the beginning and at the end.
    pub(super) fn measure(
        &mut self,
        rate_pps: Option<f64>,
        warm_up: Duration,
        time: Duration,
        mut meanwhile: impl FnMut() -> Result<(), LabError>,
    ) -> Result<Measured, LabError> {
        self.flood.set_rate(rate_pps)?;
        thread::sleep(warm_up);
        let before = self.read()?;
        meanwhile()?;
        thread::sleep(time);
        let after = self.read()?;
        meanwhile()?;
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Ok(Measured {
            offered_pps: (after.sent - before.sent) as f64 / seconds,
            goodput_pps: (after.forwarded - before.forwarded) as f64 / seconds,
            server_core: after.server_core.since(before.server_core),
            load_core: after.load_core.since(before.load_core),
        })
    }

    fn read(&mut self) -> Result<Reading, LabError> {
        Ok(Reading {
            forwarded: self.bench.site.right.received()?,
            at: Instant::now(),
            sent: self.flood.sent()?,
            server_core: CoreTicks::read(self.bench.server_core)?,
            load_core: CoreTicks::read(self.bench.load_core)?,
        })
    }
}

struct Reading {
    at: Instant,
    sent: u64,
    forwarded: u64,
    server_core: CoreTicks,
    load_core: CoreTicks,
}

/// A dozen rules, the last of which lets the flood pass.
const RULES: &str = r#"
default = "deny"
[[rule]]
action = "deny"
source = "192.0.2.0/24"
[[rule]]
action = "deny"
source = "198.51.100.0/24"
[[rule]]
action = "deny"
source = "203.0.113.0/24"
[[rule]]
action = "deny"
destination = "10.7.2.66"
[[rule]]
action = "allow"
protocol = "tcp"
destination-port = 80
[[rule]]
action = "allow"
protocol = "tcp"
destination-port = 443
[[rule]]
action = "allow"
protocol = "icmp"
[[rule]]
action = "allow"
source = "10.7.1.0/24"
protocol = "udp"
destination-port = "1-1023"
"#;

impl Bench {
    fn this_program(&self) -> Result<PathBuf, LabError> {
        std::env::current_exe().map_err(LabError::io("cannot find this program"))
    }

    /// A command that will run an ordinary program on the router's core. It
    /// comes before what else runs on this machine, so that this disturbs the
    /// measurement less; the router comes before both.
    pub(super) fn program(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.site.router.command_on_core(self.server_core, "nice");
        command.args(["-n", NICE]).arg(program);
        command
    }
}

pub(super) fn check_cores(server_core: usize, load_core: usize) -> Result<(), LabError> {
    if cpu::cores() < 2 || server_core == load_core {
        return Err(LabError::Config(format!(
            "one core must route and another send; there are {} to choose from",
            cpu::cores()
        )));
    }
    Ok(())
}

fn address(text: &str) -> Result<std::net::IpAddr, LabError> {
    text.parse().map_err(|_| LabError::Config(format!("{text:?} is no address")))
}
