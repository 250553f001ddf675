//! What is flooded: a service with so much work per packet, or a DNS server.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use super::bench::{
    Bench, KERNEL_ADDRESS, Meter, OWN_ADDRESS, PREFIX, ReceiveWork, Receiver, Source,
};
use crate::dns::bench::ZoneOnDisk;
use crate::dns::servers::{self, Server, ServerKind, Setup};
use crate::error::LabError;
use crate::load::QuerySet;
use crate::load::flood::{Flood, MAX_FRAMES};
use crate::process::Process;

/// What carries a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The kernel's sockets: the number in the table of its ways.
    Kernel(usize),
    /// Tidegate on AF_XDP, in one of its modes: the number in [`MODES`].
    Tidegate(usize),
}

/// The kernel's sockets by who receives for them: the core that serves in its
/// softirqs, as with any card; the same core in a thread of the NAPI context,
/// which the scheduler holds to its share; the core that sends up to where RPS
/// hands packets over, so that a second core helps.
const KERNELS: [(&str, ReceiveWork); 3] = [
    ("kernel", ReceiveWork::Timer),
    ("kernel-thread", ReceiveWork::Thread),
    ("kernel-rps", ReceiveWork::Steered),
];

/// A mode of Tidegate: its name in the result, the flags of `serve` for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The name.
    pub name: &'static str,
    pub(crate) flags: &'static [&'static str],
}

/// The mode that the figures of Tidegate are about.
pub const DEFAULT_MODE: &str = "polled+feedback";

/// Tidegate's modes. Without feedback and with a share, a thread of its own
/// runs the stack: in the program's own calls neither would make a difference.
pub const MODES: [Mode; 7] = [
    Mode { name: "interrupt", flags: &["--mode", "interrupt"] },
    Mode { name: "moderated", flags: &["--mode", "moderated"] },
    Mode { name: "napi", flags: &["--mode", "napi"] },
    Mode {
        name: "polled",
        flags: &["--mode", "polled", "--feedback", "false", "--network-thread"],
    },
    Mode { name: DEFAULT_MODE, flags: &["--mode", "polled", "--feedback", "true"] },
    Mode {
        name: "polled+share",
        flags: &["--mode", "polled", "--cpu-share-percent", "50", "--network-thread"],
    },
    Mode { name: "dedicated", flags: &["--mode", "dedicated"] },
];

impl Carrier {
    /// The name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel(way) => KERNELS[way].0,
            Self::Tidegate(mode) => MODES[mode].name,
        }
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let kernels = (0..KERNELS.len()).map(Self::Kernel);
        kernels.chain((0..MODES.len()).map(Self::Tidegate))
    }

    /// The kernel's sockets where the core that serves does all the work, as it
    /// does for Tidegate.
    pub fn kernel() -> Self {
        Self::Kernel(0)
    }

    /// Tidegate as it is by default.
    pub fn tidegate() -> Self {
        let at = MODES.iter().position(|mode| mode.name == DEFAULT_MODE);
        at.map_or(Self::kernel(), Self::Tidegate)
    }

    fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Kernel(way) => KERNELS[way].1,
            Self::Tidegate(mode) => match MODES[mode].name {
                "interrupt" => ReceiveWork::Interrupt,
                "moderated" | "napi" => ReceiveWork::Timer,
                _ => ReceiveWork::Server,
            },
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Kernel(_) => &[],
            Self::Tidegate(mode) => MODES[mode].flags,
        }
    }
}

impl std::str::FromStr for Carrier {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        Self::all().find(|carrier| carrier.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::all().map(Self::name).collect();
            LabError::Config(format!("{text:?} is none of {}", names.join(", ")))
        })
    }
}

pub(crate) fn this_program() -> Result<PathBuf, LabError> {
    std::env::current_exe().map_err(LabError::io("cannot find this program"))
}

/// What is flooded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A service that works so long on each packet and answers none.
    Service {
        /// What carries it.
        carrier: Carrier,
        /// The work for each packet, in nanoseconds.
        work_ns: u64,
    },
    /// A DNS server.
    Dns(ServerKind),
}

impl Subject {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service { carrier, .. } => carrier.name(),
            Self::Dns(ServerKind::TidegateXdp) => "serve dns",
            Self::Dns(kind) => kind.name(),
        }
    }

    /// The work for each packet, in microseconds; of a DNS server it is its own.
    pub fn work_us(self) -> Option<f64> {
        match self {
            Self::Service { work_ns, .. } => Some(work_ns as f64 / 1e3),
            Self::Dns(_) => None,
        }
    }

    fn receiver(self) -> Receiver {
        match self {
            Self::Service { carrier: Carrier::Kernel(_), .. } => Receiver::Kernel,
            Self::Dns(kind) if kind.is_on_kernel_sockets() => Receiver::Kernel,
            _ => Receiver::Server,
        }
    }
}

/// The zone that DNS servers serve, and the questions.
pub(crate) struct Zone {
    on_disk: ZoneOnDisk,
    pub(crate) queries: QuerySet,
}

impl Zone {
    /// A zone with as many names as there are frames.
    pub(crate) fn write() -> Result<Self, LabError> {
        let on_disk = ZoneOnDisk::write(MAX_FRAMES as u64 / 2)?;
        let queries = on_disk.queries();
        Ok(Self { on_disk, queries })
    }
}

/// A subject that runs, and the flood that is about to hit it.
pub(crate) struct Running {
    // Dropped first: a server that is flooded may not hear that it is to end.
    pub(crate) flood: Flood,
    pub(crate) meter: Meter,
    pub(crate) target: SocketAddr,
    _server: Box<dyn std::any::Any>,
    _folder: TempDir,
}

impl Running {
    /// Starts `subject` on the bench; it ends by itself after `limit`, so that
    /// nothing that runs before all others runs for ever.
    pub(crate) fn start(
        subject: Subject,
        bench: &Bench,
        zone: Option<&Zone>,
        limit: Duration,
    ) -> Result<Self, LabError> {
        let kind = match subject {
            Subject::Service { carrier, work_ns } => {
                let flooded_by = Source::OneHost;
                let service = Service { carrier, work_ns, sink: true, flags: &[], flooded_by };
                return service.start(bench, limit);
            }
            Subject::Dns(kind) => kind,
        };
        let zone = zone.ok_or_else(|| LabError::Config("there is no zone".into()))?;
        let folder = new_folder()?;
        bench.prepare(subject.receiver())?;
        let server = Server::start(kind, &zone.setup(folder.path(), bench), &bench.pair.b)?;
        let target = server.target;
        let payloads = (0..zone.queries.len()).map(|index| zone.queries.get(index).0);
        let by_timer = subject.receiver() == Receiver::Kernel || kind == ServerKind::KnotXdp;
        let receive_work = if by_timer { ReceiveWork::Timer } else { ReceiveWork::Server };
        let flood = bench.flood(Source::OneHost, target, payloads, receive_work)?;
        Ok(Self {
            flood,
            meter: Meter::Answers,
            target,
            _server: Box::new(server),
            _folder: folder,
        })
    }
}

fn new_folder() -> Result<TempDir, LabError> {
    tempfile::tempdir().map_err(LabError::io("cannot make a folder for files"))
}

impl Zone {
    pub(crate) fn setup(&self, folder: &std::path::Path, bench: &Bench) -> Setup {
        Setup {
            folder: folder.to_path_buf(),
            origin: self.on_disk.origin().to_owned(),
            zone_file: self.on_disk.file(),
            kernel_address: KERNEL_ADDRESS.into(),
            own_address: OWN_ADDRESS.into(),
            more_own: Vec::new(),
            prefix: PREFIX,
            core: bench.server_core,
        }
    }
}

/// The port that services are on.
pub(crate) const SERVICE_PORT: u16 = 7;

/// An echo service, or a sink, with work for each packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Service<'a> {
    pub(crate) carrier: Carrier,
    pub(crate) work_ns: u64,
    /// Whether it answers nothing.
    pub(crate) sink: bool,
    /// More flags of `serve`.
    pub(crate) flags: &'a [&'a str],
    /// Who floods it.
    pub(crate) flooded_by: Source,
}

impl Service<'_> {
    /// Starts it with a flood of the shortest packets that there are.
    pub(crate) fn start(&self, bench: &Bench, limit: Duration) -> Result<Running, LabError> {
        let folder = new_folder()?;
        let kernel = matches!(self.carrier, Carrier::Kernel(_));
        bench.prepare(if kernel { Receiver::Kernel } else { Receiver::Server })?;
        let counters = folder.path().join("counters");
        let end = &bench.pair.b;
        let mut command = end.namespace.command_on_core(bench.server_core, this_program()?);
        let (port, address): (_, IpAddr) =
            if kernel { ("kernel", KERNEL_ADDRESS.into()) } else { ("xdp", OWN_ADDRESS.into()) };
        let listen = SERVICE_PORT.to_string();
        command.args(["serve", "echo", "--json", "--listen", &listen, "--port", port]);
        command.args(["--iface", &end.device, "--address", &format!("{address}/{PREFIX}")]);
        command.args(["--cpu", &bench.server_core.to_string()]);
        command.args(["--work-ns", &self.work_ns.to_string()]);
        command.args(["--duration", &format!("{:.1}", limit.as_secs_f64())]);
        command.arg("--counters").arg(&counters).args(self.carrier.flags()).args(self.flags);
        if self.sink {
            command.arg("--sink");
        }
        let mut process = Process::start(self.carrier.name(), &mut command)?;
        process.wait_for_line()?;
        let target = SocketAddr::new(address, SERVICE_PORT);
        // With its headers and trailer, 64 bytes.
        let payload: &[u8] = &[0x7e; 18];
        let payloads = std::iter::repeat_n(payload, self.flooded_by.flows());
        let receive_work = self.carrier.receive_work();
        let flood = bench.flood(self.flooded_by, target, payloads, receive_work)?;
        let meter = Meter::Counters(counters);
        Ok(Running { flood, meter, target, _server: Box::new(process), _folder: folder })
    }
}

/// Whether the servers of `kinds` are installed.
pub(crate) fn check_installed(kinds: &[ServerKind]) -> Result<(), LabError> {
    kinds.iter().try_for_each(|kind| match kind {
        ServerKind::Knot | ServerKind::KnotXdp => servers::installed("knotd", "knot"),
        ServerKind::Nsd => servers::installed("nsd", "nsd"),
        _ => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_carrier_is_found_by_its_name() {
        for carrier in Carrier::all() {
            assert_eq!(carrier.name().parse::<Carrier>().unwrap(), carrier);
        }
        let error = "pulled".parse::<Carrier>().unwrap_err().to_string();
        assert!(error.contains("polled+feedback") && error.contains("pulled"), "{error}");
        assert!(MODES.iter().any(|mode| mode.name == DEFAULT_MODE));
    }
}
