//! Test cases of a flood: a service with a given work per packet, or a DNS server.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tidegate_load::QuerySet;

use crate::error::LabError;
use crate::testbed::dns::ZoneFile;
use crate::testbed::dns::servers::{self, Server, ServerKind, Setup};
use crate::testbed::flood::{
    FloodSource, FloodTestbed, GoodputMeter, KERNEL_ADDRESS, PREFIX_BITS, Receiver,
    TIDEGATE_ADDRESS,
};
use crate::testbed::folder;
use crate::testbed::load::flood::{Flood, MAX_FRAMES};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::sysctl::SysctlOverride;

/// Network stack of a service, with its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The kernel's sockets, with this receive work.
    Kernel(ReceiveWork),
    /// Tidegate on AF_XDP in one of its modes: index into [`MODES`].
    Tidegate(usize),
    /// A loop of the laboratory that only receives, on AF_XDP.
    Raw,
}

/// A mode of Tidegate: its name in results, and its `serve` flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceMode {
    /// The name.
    pub name: &'static str,
    pub(crate) flags: &'static [&'static str],
}

/// The mode that Tidegate's figures refer to.
pub const DEFAULT_MODE: &str = "polled+feedback";

/// Tidegate's modes. Without feedback, and with a CPU share, the stack runs on a thread of its
/// own: inside the application's own calls neither would make a difference.
pub const MODES: [ServiceMode; 7] = [
    ServiceMode { name: "interrupt", flags: &["--mode", "interrupt"] },
    ServiceMode { name: "moderated", flags: &["--mode", "moderated"] },
    ServiceMode { name: "napi", flags: &["--mode", "napi"] },
    ServiceMode {
        name: "polled",
        flags: &["--mode", "polled", "--feedback", "false", "--network-thread"],
    },
    ServiceMode { name: DEFAULT_MODE, flags: &["--mode", "polled", "--feedback", "true"] },
    ServiceMode {
        name: "polled+share",
        flags: &["--mode", "polled", "--cpu-share-percent", "50", "--network-thread"],
    },
    ServiceMode { name: "dedicated", flags: &["--mode", "dedicated"] },
];

impl Transport {
    /// Name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel(work) => work.kernel_name(),
            Self::Tidegate(mode) => MODES[mode].name,
            Self::Raw => "raw",
        }
    }

    /// All transports.
    pub fn all() -> impl Iterator<Item = Self> {
        let kernels = [ReceiveWork::Timer].into_iter().chain(ReceiveWork::KERNEL);
        let modes = (0..MODES.len()).map(Self::Tidegate);
        kernels.map(Self::Kernel).chain(modes).chain([Self::Raw])
    }

    /// The kernel's sockets with all work on the server's core, as with Tidegate, in softirqs by a
    /// timer.
    pub fn kernel() -> Self {
        Self::Kernel(ReceiveWork::Timer)
    }

    /// Tidegate in its default mode.
    pub fn tidegate() -> Self {
        let at = MODES.iter().position(|mode| mode.name == DEFAULT_MODE);
        at.map_or(Self::kernel(), Self::Tidegate)
    }

    fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Kernel(work) => work,
            Self::Tidegate(mode) => match MODES[mode].name {
                "interrupt" => ReceiveWork::Interrupt,
                "moderated" | "napi" => ReceiveWork::Timer,
                _ => ReceiveWork::Server,
            },
            Self::Raw => ReceiveWork::Server,
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Kernel(work) => work.serve_flags(),
            Self::Raw => &[],
            Self::Tidegate(mode) => MODES[mode].flags,
        }
    }
}

impl std::str::FromStr for Transport {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        if text == "kernel" {
            return Ok(Self::kernel());
        }
        Self::all().find(|transport| transport.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::all().map(Self::name).collect();
            LabError::Config(format!("unknown transport {text:?}; available: {}", names.join(", ")))
        })
    }
}

/// Server under flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestCase {
    /// A service that works for `work_ns` on each packet and sends no replies.
    Service {
        /// The network stack of the service.
        transport: Transport,
        /// Work per packet, in nanoseconds.
        work_ns: u64,
    },
    /// A DNS server.
    Dns {
        /// The server.
        kind: ServerKind,
        /// The receive work of its device.
        receive_work: ReceiveWork,
    },
}

impl TestCase {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service { transport, .. } => transport.name(),
            Self::Dns { kind: ServerKind::TidegateXdp, .. } => "serve dns",
            Self::Dns { kind, .. } => kind.name(),
        }
    }

    /// Work per packet in microseconds; `None` for a DNS server, whose work is its own.
    pub fn work_us(self) -> Option<f64> {
        match self {
            Self::Service { work_ns, .. } => Some(work_ns as f64 / 1e3),
            Self::Dns { .. } => None,
        }
    }

    /// Context that does the receive work of the server's device.
    pub fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Service { transport, .. } => transport.receive_work(),
            Self::Dns { receive_work, .. } => receive_work,
        }
    }

    fn receiver(self) -> Receiver {
        match self {
            Self::Service { transport: Transport::Kernel(_), .. } => Receiver::Kernel,
            Self::Dns { kind, .. } if kind.is_on_kernel_sockets() => Receiver::Kernel,
            _ => Receiver::Server,
        }
    }
}

/// The zone of the DNS servers, and the queries for it.
pub(crate) struct Zone {
    zone_file: ZoneFile,
    pub(crate) queries: QuerySet,
}

impl Zone {
    /// Writes a zone with as many names as there are frames.
    pub(crate) fn write() -> Result<Self, LabError> {
        let zone_file = ZoneFile::write(MAX_FRAMES as u64 / 2)?;
        let queries = zone_file.queries();
        Ok(Self { zone_file, queries })
    }
}

/// Process under flood; ended on drop.
enum RunningServer {
    Service(ServerProcess),
    Dns(Server),
}

/// A running server, and the flood prepared for it.
pub(crate) struct FloodedServer {
    // Dropped first: a flooded server may not receive the request to stop.
    pub(crate) flood: Flood,
    pub(crate) meter: GoodputMeter,
    pub(crate) target: SocketAddr,
    server: RunningServer,
    _folder: TempDir,
    _busy_poll: Vec<SysctlOverride>,
}

impl FloodedServer {
    /// Starts `test_case` on the testbed. The service ends by itself after `limit`, so that no
    /// process of raised priority runs for ever.
    pub(crate) fn start(
        test_case: TestCase,
        testbed: &FloodTestbed,
        zone: Option<&Zone>,
        limit: Duration,
    ) -> Result<Self, LabError> {
        let kind = match test_case {
            TestCase::Service { transport, work_ns } => {
                let flood_source = FloodSource::OneHost;
                let service =
                    EchoService { transport, work_ns, sink: true, flags: &[], flood_source };
                return service.start(testbed, limit);
            }
            TestCase::Dns { kind, .. } => kind,
        };
        let zone = zone.ok_or_else(|| LabError::Config("no zone for the DNS server".into()))?;
        let folder = new_folder()?;
        testbed.prepare(test_case.receiver())?;
        let busy_poll = test_case.receive_work().program_settings()?;
        let server = Server::start(kind, &zone.setup(folder.path(), testbed), &testbed.pair.b)?;
        let target = server.target;
        let payloads = (0..zone.queries.len()).map(|index| zone.queries.get(index).0);
        let work = test_case.receive_work();
        let flood = testbed.flood(FloodSource::OneHost, target, payloads, work)?;
        Ok(Self {
            flood,
            meter: GoodputMeter::TransmittedFrames,
            target,
            server: RunningServer::Dns(server),
            _folder: folder,
            _busy_poll: busy_poll,
        })
    }
}

impl FloodedServer {
    /// Checks that the server has not ended by itself: its goodput would be 0 for no reason of its
    /// stack.
    ///
    /// # Errors
    /// If it has.
    pub(crate) fn check_running(&mut self) -> Result<(), LabError> {
        match &mut self.server {
            RunningServer::Service(process) => process.check_running(),
            RunningServer::Dns(server) => server.check_running(),
        }
    }
}

fn new_folder() -> Result<TempDir, LabError> {
    folder::private()
}

impl Zone {
    /// Writes the queries in the format of dnsperf and kxdpgun.
    pub(crate) fn write_queries(&self, folder: &Path) -> Result<PathBuf, LabError> {
        self.zone_file.write_queries(folder)
    }

    pub(crate) fn setup(&self, folder: &Path, testbed: &FloodTestbed) -> Setup {
        Setup {
            folder: folder.to_path_buf(),
            origin: self.zone_file.origin().to_owned(),
            zone_file: self.zone_file.path(),
            kernel_address: KERNEL_ADDRESS.into(),
            own_address: TIDEGATE_ADDRESS.into(),
            extra_own_addresses: Vec::new(),
            query_log: None,
            flags: Vec::new(),
            prefix: PREFIX_BITS,
            core: testbed.server_core,
        }
    }
}

/// UDP port of the services.
pub(crate) const SERVICE_PORT: u16 = 7;

/// An echo service, or a sink, with work per packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EchoService<'a> {
    pub(crate) transport: Transport,
    pub(crate) work_ns: u64,
    /// True for a sink, which sends no replies.
    pub(crate) sink: bool,
    /// Further `serve` flags.
    pub(crate) flags: &'a [&'a str],
    /// Source addresses of the flood.
    pub(crate) flood_source: FloodSource,
}

impl EchoService<'_> {
    /// Starts the service, with a flood of minimum-size packets.
    pub(crate) fn start(
        &self,
        testbed: &FloodTestbed,
        limit: Duration,
    ) -> Result<FloodedServer, LabError> {
        let folder = new_folder()?;
        let on_kernel = matches!(self.transport, Transport::Kernel(_));
        testbed.prepare(if on_kernel { Receiver::Kernel } else { Receiver::Server })?;
        let counters = folder.path().join("counters");
        let address: IpAddr =
            if on_kernel { KERNEL_ADDRESS.into() } else { TIDEGATE_ADDRESS.into() };
        let mut command = self.command(testbed, address, limit)?;
        command.arg("--counters").arg(&counters);
        let mut process = ServerProcess::start(self.transport.name(), &mut command)?;
        process.wait_for_first_line()?;
        let target = SocketAddr::new(address, SERVICE_PORT);
        // With headers and trailer, a frame of 64 bytes.
        let payload: &[u8] = &[0x7e; 18];
        let payloads = std::iter::repeat_n(payload, self.flood_source.flow_count());
        let receive_work = self.transport.receive_work();
        let flood = testbed.flood(self.flood_source, target, payloads, receive_work)?;
        let meter = GoodputMeter::CounterFile(counters);
        let server = RunningServer::Service(process);
        Ok(FloodedServer { flood, meter, target, server, _folder: folder, _busy_poll: Vec::new() })
    }

    fn command(
        &self,
        testbed: &FloodTestbed,
        address: IpAddr,
        limit: Duration,
    ) -> Result<Command, LabError> {
        let FloodTestbed { pair, server_core, .. } = testbed;
        let command_on_core = |program| pair.b.namespace.command_on_core(*server_core, program);
        let limit = format!("{:.1}", limit.as_secs_f64());
        if self.transport == Transport::Raw {
            let mut command = command_on_core(programs::laboratory()?);
            command.args(["livelock", "--as-raw-receiver", &pair.b.device, "--seconds", &limit]);
            command.args(["--address", &address.to_string()]);
            return Ok(command);
        }
        let mut command = command_on_core(programs::tidegate()?);
        let io = if matches!(self.transport, Transport::Kernel(_)) { "kernel" } else { "xdp" };
        let listen = SERVICE_PORT.to_string();
        command.args(["serve", "echo", "--json", "--listen", &listen, "--io", io]);
        command.args(["--iface", &pair.b.device, "--address", &format!("{address}/{PREFIX_BITS}")]);
        command.args(["--cpu", &server_core.to_string(), "--duration", &limit]);
        command.args(["--work-ns", &self.work_ns.to_string()]);
        command.args(self.transport.flags()).args(self.flags);
        if self.sink {
            command.arg("--sink");
        }
        Ok(command)
    }
}

/// Checks that the servers of `kinds` are installed.
pub(crate) fn check_installed(kinds: &[ServerKind]) -> Result<(), LabError> {
    kinds.iter().try_for_each(|kind| match kind {
        ServerKind::Knot | ServerKind::KnotXdp => servers::check_installed("knotd", "knot"),
        ServerKind::Nsd => servers::check_installed("nsd", "nsd"),
        _ => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_transport_name() {
        for transport in Transport::all() {
            assert_eq!(transport.name().parse::<Transport>().unwrap(), transport);
        }
        let error = "pulled".parse::<Transport>().unwrap_err().to_string();
        assert!(error.contains("polled+feedback") && error.contains("pulled"), "{error}");
        assert!(MODES.iter().any(|mode| mode.name == DEFAULT_MODE));
    }
}
