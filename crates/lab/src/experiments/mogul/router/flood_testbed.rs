//! Testbed of the router: a flood from the left, counted on the right.
//!
//! One core sends. The other core does all other work: the receive work of the router's devices,
//! the router, the packet filter, and at the far end the kernel's drop of forwarded packets at its
//! first check.

use std::ffi::OsStr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate_load::Addressing;

use super::kernel_forwarding::{Cores, KernelForwarding, KernelWay};
use super::testbed::{LEFT_V4, ROUTER_RIGHT, RouterTestbed};
use crate::error::LabError;
use crate::testbed::cpu::{self, CoreTicks};
use crate::testbed::flood::FloodMeasurement;
use crate::testbed::folder;
use crate::testbed::load::arp_responder::ArpResponder;
use crate::testbed::load::flood::{self, Flood};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;

/// Destination of the flood: an address of the right network for which only the [`ArpResponder`]
/// answers.
const SINK_ADDRESS: &str = "10.7.2.9";
const SINK_PORT: u16 = 9;
/// Unused MAC address: the kernel drops frames to this address at its first check.
const UNUSED_MAC: [u8; 6] = [2, 0xf1, 0x00, 0xd0, 0, 2];
const FLOW_COUNT: u16 = 64;
const FIRST_SOURCE_PORT: u16 = 20_000;
/// Polls without work before an interrupt is enabled (`napi_defer_hard_irqs`): the maximum value.
const MAX_DEFERRED_POLLS: &str = "2147483647";
/// Nice value of ordinary processes that are measured together with the router.
const NICE_VALUE: &str = "-10";
/// Verdicts in one message: fewer than the low-water mark of the queue, so that the packet filter
/// is never idle while verdicts are sent.
const FILTER_BATCH_VERDICTS: &str = "8";
/// Send rate until the first packets have been forwarded, their number, and the time limit.
const FIRST_RATE_PPS: f64 = 1000.0;
const FIRST_PACKETS: u64 = 20;
const FORWARDING_TIMEOUT: Duration = Duration::from_secs(10);
/// Payload of the paper's packets.
const PAYLOAD: &[u8] = &[0x7e; 4];

/// Configuration of a router to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RouterSetup {
    /// Flags of `tidegate route`, besides the devices.
    pub(super) flags: Vec<String>,
    /// True: each packet interrupts. False: the router polls, and a timer interrupts while the
    /// router does not poll.
    pub(super) uses_interrupts: bool,
    /// True when each packet is checked by the packet filter.
    pub(super) uses_filter: bool,
}

/// Namespaces and cores of the experiment.
pub(super) struct FloodTestbed {
    pub(super) hosts: RouterTestbed,
    pub(super) server_core: usize,
    pub(super) load_core: usize,
    _sink: ArpResponder,
}

impl FloodTestbed {
    pub(super) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let hosts = RouterTestbed::as_on_a_wire()?;
        let sink = Addressing {
            source_mac: UNUSED_MAC,
            target_mac: hosts.right_mac,
            source: parse_address(SINK_ADDRESS)?,
            source_count: 1,
            first_port: SINK_PORT,
            port_count: 1,
            target: (parse_address(ROUTER_RIGHT[0])?, 0).into(),
        };
        let sink = ArpResponder::new(&hosts.right, &sink, load_core)?;
        Ok(Self { hosts, server_core, load_core, _sink: sink })
    }

    /// Runs the receive work of the devices on the router's core, with priority over all other
    /// threads, as interrupts would. The router must be running, so that the devices have NAPI
    /// contexts.
    fn pin_receive_work_to_server_core(&self) -> Result<(), LabError> {
        for device in [&self.hosts.left_device, &self.hosts.right_device] {
            self.hosts.router.write_device_file(device, "threaded", "1")?;
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

    /// Keeps an idle device from enabling its interrupt, which on veth fires on the sender's core.
    ///
    /// A timer polls the device instead, on the core that polled the device last. The router must
    /// be running; it restores the setting when it exits.
    fn keep_interrupts_off_load_core(&self) -> Result<(), LabError> {
        for device in [&self.hosts.left_device, &self.hosts.right_device] {
            self.hosts.router.write_device_file(device, "threaded", "0")?;
            self.hosts.router.write_device_file(
                device,
                "napi_defer_hard_irqs",
                MAX_DEFERRED_POLLS,
            )?;
        }
        Ok(())
    }

    /// A flood to the sink, sent from `core`.
    pub(super) fn flood_from(&self, core: usize) -> Result<Flood, LabError> {
        let addressing = Addressing {
            source_mac: self.hosts.left.mac,
            target_mac: self.hosts.left_mac,
            source: parse_address(LEFT_V4)?,
            source_count: 1,
            first_port: FIRST_SOURCE_PORT,
            port_count: FLOW_COUNT,
            target: (parse_address(SINK_ADDRESS)?, SINK_PORT).into(),
        };
        let payloads = std::iter::repeat_n(PAYLOAD, usize::from(FLOW_COUNT));
        let frames = flood::frames(&addressing, payloads);
        Flood::new(&self.hosts.left, &frames, core)
    }
}

/// Running router, with the flood that will be sent to the router.
pub(super) struct RunningRouter<'a> {
    // Dropped first: a flooded router may not process its termination request.
    flood: Flood,
    router: Router<'a>,
    testbed: &'a FloodTestbed,
}

/// Forwarder of the packets.
enum Router<'a> {
    /// `tidegate route`.
    Tidegate(Box<RouterProcess>),
    /// Linux.
    Kernel(KernelForwarding<'a>),
}

/// `tidegate route` with its packet filter and their folder.
struct RouterProcess {
    process: ServerProcess,
    _filter: Option<ServerProcess>,
    _folder: TempDir,
}

impl<'a> RunningRouter<'a> {
    /// Starts a router that exits by itself after `limit`, so that a process with priority over
    /// all others does not run forever.
    pub(super) fn start(
        setup: &RouterSetup,
        testbed: &'a FloodTestbed,
        limit: Duration,
    ) -> Result<Self, LabError> {
        let folder = folder::private()?;
        let limit = format!("{:.1}", limit.as_secs_f64());
        let core = testbed.server_core.to_string();
        let socket = folder.path().join("filter");
        let filter = if setup.uses_filter {
            let rules = folder.path().join("rules");
            std::fs::write(&rules, FILTER_RULES).map_err(LabError::file(&rules))?;
            let mut command = testbed.nice_command(programs::tidegate()?);
            command.arg("filter").arg("--rules").arg(&rules).arg("--listen").arg(&socket);
            command.args(["--batch", FILTER_BATCH_VERDICTS, "--duration", &limit]);
            // The folder of the socket is root's, as is the router below.
            command.args(["--user", "root"]);
            let mut filter = ServerProcess::start("filter", &mut command)?;
            filter.wait_for_first_line()?;
            Some(filter)
        } else {
            None
        };
        let executable = programs::tidegate()?;
        let mut command = testbed.hosts.router.command_on_core(testbed.server_core, executable);
        command.arg("route").args(testbed.hosts.device_flags("xdp")).args(&setup.flags);
        command.args(["--json", "--realtime", "--cpu", &core, "--duration", &limit]);
        command.args(["--user", "root"]);
        if setup.uses_filter {
            command.arg("--filter").arg(&socket);
        }
        let mut process = ServerProcess::start("route", &mut command)?;
        process.wait_for_first_line()?;
        if setup.uses_interrupts {
            testbed.pin_receive_work_to_server_core()?;
        } else {
            testbed.keep_interrupts_off_load_core()?;
        }
        let router = RouterProcess { process, _filter: filter, _folder: folder };
        Self::begin(Router::Tidegate(Box::new(router)), testbed)
    }

    /// Starts Linux's own forwarding instead of a router.
    pub(super) fn start_kernel(
        way: KernelWay,
        testbed: &'a FloodTestbed,
    ) -> Result<Self, LabError> {
        let cores = Cores { server: testbed.server_core, load: testbed.load_core };
        let new_flood = |core| testbed.flood_from(core);
        let forwarding = KernelForwarding::start(&testbed.hosts, way, cores, new_flood)?;
        Self::begin(Router::Kernel(forwarding), testbed)
    }

    fn begin(router: Router<'a>, testbed: &'a FloodTestbed) -> Result<Self, LabError> {
        let flood = testbed.flood_from(testbed.load_core)?;
        let mut running = Self { flood, router, testbed };
        running.wait_until_forwarding()?;
        Ok(running)
    }

    /// Waits for the first forwarded packets, which are held until the neighbours are resolved.
    fn wait_until_forwarding(&mut self) -> Result<(), LabError> {
        let (before, began) = (self.testbed.hosts.right.rx_packets()?, Instant::now());
        self.flood.set_rate(Some(FIRST_RATE_PPS))?;
        while self.testbed.hosts.right.rx_packets()? < before + FIRST_PACKETS {
            if began.elapsed() > FORWARDING_TIMEOUT {
                return Err(LabError::Config("timed out: the router forwards no packets".into()));
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.flood.set_rate(Some(0.0))
    }

    /// Process identifiers of the router: of the process, or of the kernel's NAPI threads.
    pub(super) fn pids(&self) -> Vec<u32> {
        match &self.router {
            Router::Tidegate(router) => vec![router.process.pid()],
            Router::Kernel(forwarding) => {
                forwarding.napi_threads().into_iter().map(i32::cast_unsigned).collect()
            }
        }
    }

    /// Offers a load and measures the forwarded packets. `on_reading` is called at the beginning
    /// and at the end of the measurement.
    pub(super) fn measure(
        &mut self,
        rate_pps: Option<f64>,
        warm_up: Duration,
        time: Duration,
        mut on_reading: impl FnMut() -> Result<(), LabError>,
    ) -> Result<FloodMeasurement, LabError> {
        self.flood.set_rate(rate_pps)?;
        thread::sleep(warm_up);
        let before = self.read_counters()?;
        on_reading()?;
        thread::sleep(time);
        let after = self.read_counters()?;
        on_reading()?;
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Ok(FloodMeasurement {
            offered_pps: (after.sent - before.sent) as f64 / seconds,
            goodput_pps: (after.forwarded - before.forwarded) as f64 / seconds,
            server_core: after.server_core.since(before.server_core),
            load_core: after.load_core.since(before.load_core),
        })
    }

    fn read_counters(&mut self) -> Result<CounterReading, LabError> {
        Ok(CounterReading {
            forwarded: self.testbed.hosts.right.rx_packets()?,
            at: Instant::now(),
            sent: self.flood.offered()?,
            server_core: CoreTicks::read(self.testbed.server_core)?,
            load_core: CoreTicks::read(self.testbed.load_core)?,
        })
    }
}

struct CounterReading {
    at: Instant,
    sent: u64,
    forwarded: u64,
    server_core: CoreTicks,
    load_core: CoreTicks,
}

/// Eight filter rules, the last of which passes the flood.
const FILTER_RULES: &str = r#"
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

impl FloodTestbed {
    /// Returns a command that runs an ordinary process on the router's core.
    ///
    /// The process has priority over other ordinary processes of this machine, which then disturb
    /// the measurement less; the router has priority over all of them.
    pub(super) fn nice_command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.command("nice");
        command.args(["-n", NICE_VALUE]).arg(program);
        command
    }

    /// Returns a command that runs a process of normal priority on the router's core.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.hosts.router.command_on_core(self.server_core, program)
    }
}

pub(super) fn check_cores(server_core: usize, load_core: usize) -> Result<(), LabError> {
    if cpu::available_cores() < 2 || server_core == load_core {
        return Err(LabError::Config(format!(
            "the router core and the load core must differ; this machine has {} cores",
            cpu::available_cores()
        )));
    }
    Ok(())
}

fn parse_address(text: &str) -> Result<std::net::IpAddr, LabError> {
    text.parse().map_err(|_| LabError::Config(format!("{text:?} is not an IP address")))
}
