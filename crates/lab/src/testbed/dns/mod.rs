//! Testbed for DNS servers: a zone, a veth pair, a core for the server and one for the load.

pub mod servers;
pub(crate) mod tools;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde::Serialize;
use tempfile::TempDir;
use tidegate_apps::dns::synthetic::SyntheticZone;
use tidegate_load::{LinkKind, LoadConfig, LoadReport, QuerySet, load_dns};

use crate::error::LabError;
use crate::testbed::cpu::{self, CoreTicks, CoreUsage};
use crate::testbed::dns::servers::{Server, ServerKind, Setup};
use crate::testbed::dns::tools::{DnsTool, DnsToolRates, DnsToolRun};
use crate::testbed::folder;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::sysctl::SysctlOverride;

const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// Address of the kernel's stack at the end of the load.
const TOOL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const TIDEGATE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
const PREFIX_BITS: u8 = 24;
/// Seed of the synthetic zone: the zone is the same on every machine and in every run.
const ZONE_SEED: u64 = 1;

/// Testbed: a zone, a veth pair, and the cores of server and load generator.
pub struct DnsTestbed {
    /// The namespaces: load in `a`, servers in `b`.
    pub pair: VethPair,
    /// Setup common to all servers.
    pub setup: Setup,
    /// DNS queries, one for each name of the zone.
    pub queries: QuerySet,
    /// Core of the load generator.
    pub load_core: usize,
    /// Kind of link that the load generator sends through.
    pub link: LinkKind,
    zone: ZoneFile,
}

/// Running server, with the settings of the machine that it needs.
pub struct DnsService {
    server: Server,
    _busy_poll: Vec<SysctlOverride>,
}

impl std::ops::Deref for DnsService {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DnsService {
    /// Stops the server and returns the counters that Tidegate's server prints on exit.
    pub fn stop(self) -> Option<serde_json::Value> {
        self.server.stop()
    }
}

/// Measurement at one offered load.
#[derive(Clone, Debug, Serialize)]
pub struct DnsMeasurement {
    /// Report of the load generator.
    pub load: LoadReport,
    /// Usage of the server's core.
    pub server_core: CoreUsage,
    /// Usage of the load generator's core.
    pub load_core: CoreUsage,
}

/// Synthetic zone in a temporary folder; deleted on drop.
pub struct ZoneFile {
    zone: SyntheticZone,
    folder: TempDir,
}

impl ZoneFile {
    /// Writes a synthetic zone of `names` names.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(name_count: u64) -> Result<Self, LabError> {
        let folder = folder::private()?;
        // Servers that drop root privileges must still be able to read the zone.
        make_world_readable(folder.path())?;
        let zone = SyntheticZone { origin: "bench.example".into(), name_count, seed: ZONE_SEED };
        let written = Self { zone, folder };
        write_file(&written.path(), |out| written.zone.write_zone(out))?;
        Ok(written)
    }

    /// Folder of the zone file.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the zone file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("zone")
    }

    /// Origin of the zone.
    pub fn origin(&self) -> &str {
        &self.zone.origin
    }

    /// Writes the queries in dnsperf's format to `folder` and returns the path of the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_queries(&self, folder: &Path) -> Result<PathBuf, LabError> {
        let path = folder.join("queries");
        write_file(&path, |out| self.zone.write_queries(self.zone.name_count, out))?;
        Ok(path)
    }

    /// DNS queries with EDNS, one for each name of the zone.
    pub fn queries(&self) -> QuerySet {
        let mut queries = QuerySet::default();
        for index in 0..self.zone.name_count {
            let question = self.zone.question(index);
            queries.push(question.name.wire(), question.rtype, true);
        }
        queries
    }
}

impl DnsTestbed {
    /// Writes a zone of `names` names, builds a query for each, and connects two network
    /// namespaces with a veth pair.
    ///
    /// # Errors
    /// When a namespace cannot be created or a file cannot be written.
    pub fn new(
        names: u64,
        server_core: usize,
        load_core: usize,
        link: LinkKind,
    ) -> Result<Self, LabError> {
        let zone = ZoneFile::write(names)?;
        let config = VethConfig {
            a: vec![format!("{TOOL_ADDRESS}/{PREFIX_BITS}")],
            b: vec![format!("{KERNEL_ADDRESS}/{PREFIX_BITS}")],
        };
        let pair = VethPair::as_on_a_wire(&config)?;
        let setup = Setup {
            folder: zone.folder().to_path_buf(),
            origin: zone.origin().to_owned(),
            zone_file: zone.path(),
            kernel_address: KERNEL_ADDRESS.into(),
            own_address: TIDEGATE_ADDRESS.into(),
            extra_own_addresses: Vec::new(),
            flags: Vec::new(),
            query_log: None,
            prefix: PREFIX_BITS,
            core: server_core,
        };
        Ok(Self { pair, setup, queries: zone.queries(), load_core, link, zone })
    }

    /// Writes the queries in dnsperf's format and returns the path of the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_query_file(&self) -> Result<PathBuf, LabError> {
        self.zone.write_queries(self.zone.folder())
    }

    /// Starts a server whose receive processing is done on its own core: by RPS for kernel sockets,
    /// by a timer for Knot DNS with XDP.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn start(&self, kind: ServerKind) -> Result<DnsService, LabError> {
        self.start_with(
            kind,
            match kind {
                ServerKind::KnotXdp => ReceiveWork::Timer,
                _ if kind.is_on_kernel_sockets() => ReceiveWork::Steered,
                _ => ReceiveWork::Server,
            },
        )
    }

    /// Starts a server with this receive work.
    ///
    /// # Errors
    /// When the server does not start.
    pub(crate) fn start_with(
        &self,
        kind: ServerKind,
        receive_work: ReceiveWork,
    ) -> Result<DnsService, LabError> {
        let end = &self.pair.b;
        if self.can_steer() {
            ReceiveWork::reset(end)?;
            // Knot DNS leaves its XDP program attached.
            end.remove_xdp_program()?;
            let needs_gro = kind.is_on_kernel_sockets() && receive_work.needs_napi();
            end.ethtool(&["gro", if needs_gro { "on" } else { "off" }])?;
        }
        // Tidegate's server has flags of its own for it.
        let busy_poll = match kind {
            ServerKind::TidegateKernel => Vec::new(),
            _ => receive_work.program_settings()?,
        };
        let server = Server::start_with(kind, receive_work, &self.setup, end)?;
        match receive_work {
            ReceiveWork::Timer => self.poll_on_server_core()?,
            // Without root the device cannot be set.
            _ if self.can_steer() => receive_work.place(end, self.setup.core)?,
            _ => {}
        }
        Ok(DnsService { server, _busy_poll: busy_poll })
    }

    /// Runs a packaged program against a server for `seconds`, on the core of the load.
    ///
    /// # Errors
    /// If it fails.
    pub(crate) fn measure_tool(
        &self,
        tool: DnsTool,
        server: &Server,
        rate_pps: f64,
        seconds: f64,
    ) -> Result<DnsToolRates, LabError> {
        let run = DnsToolRun {
            pair: &self.pair,
            cores: &[self.load_core],
            source: TOOL_ADDRESS,
            target: server.target.ip(),
            queries: &self.write_query_file()?,
        };
        // Replies are received on the core of the load.
        self.pair.a.set_rps(&[self.load_core])?;
        let measure = || tool.measure(&run, rate_pps, Duration::from_secs_f64(seconds));
        match tool {
            DnsTool::Kxdpgun => {
                let rates = self.receive_replies_on_load_core(measure);
                // kxdpgun leaves its XDP program attached.
                self.pair.a.remove_xdp_program()?;
                rates
            }
            DnsTool::Dnsperf => measure(),
        }
    }

    /// True if receive processing can be steered to the server's core. Root of a user namespace
    /// may use AF_PACKET only, and may not write the device's settings.
    pub fn can_steer(&self) -> bool {
        self.link == LinkKind::Xdp
    }

    /// Makes a timer on the server's core poll the device, as a NIC's coalesced interrupt would.
    ///
    /// Needed for XDP sockets without busy polling. RPS does not help there: the XDP program
    /// runs before it.
    fn poll_on_server_core(&self) -> Result<(), LabError> {
        ReceiveWork::Timer.place(&self.pair.b, self.setup.core)?;
        // The timer stays on the core of the first poll, which must be the server's: send one
        // packet from that core.
        let core = self.setup.core;
        let device = self.pair.a.device.clone();
        self.pair.a.namespace.enter(|| {
            cpu::pin_this_thread(core)?;
            let config = LoadConfig {
                interface: Some(device),
                source: Some(IpAddr::V4(Ipv4Addr::new(10, 77, 0, 99))),
                requests: Some(1),
                seconds: 0.2,
                drain_seconds: 0.0,
                ports: 1,
                mac: Some("ff:ff:ff:ff:ff:ff".into()),
                ..LoadConfig::new(LinkKind::Packet, (KERNEL_ADDRESS, 9).into())
            };
            tidegate_load::load_udp(&config, 6, &mut |_| {})?;
            Ok(())
        })?
    }

    /// Load configuration common to all measurements.
    pub fn load_config(&self, server: &Server) -> LoadConfig {
        LoadConfig {
            interface: Some(self.pair.a.device.clone()),
            source: Some(CLIENT_ADDRESS.into()),
            core: Some(self.load_core),
            ..LoadConfig::new(self.link, server.target)
        }
    }

    /// Runs a load while replies are received off the server's core: the NAPI context of the
    /// generator's device has a thread on the load's core.
    ///
    /// The kernel creates the NAPI thread when the generator attaches to the device, so a second
    /// thread waits for it and pins it.
    fn receive_replies_on_load_core<T: Send>(
        &self,
        load: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<T, LabError> {
        if !self.can_steer() {
            return load();
        }
        let end = &self.pair.a;
        let is_finished = AtomicBool::new(false);
        thread::scope(|scope| {
            let pinning = scope.spawn(|| {
                while !is_finished.load(Ordering::Relaxed) {
                    // Fails as long as there is no NAPI context.
                    if let Ok(threads) = end.set_threaded_napi(self.load_core) {
                        return threads.into_iter().try_for_each(cpu::raise_above_normal_threads);
                    }
                    thread::sleep(Duration::from_millis(2));
                }
                Ok(())
            });
            let result = load();
            is_finished.store(true, Ordering::Relaxed);
            pinning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            result
        })
    }

    /// Measures for `seconds` at an offered load; `None` sends at the highest rate.
    ///
    /// # Errors
    /// When the load cannot be sent.
    pub fn measure(
        &self,
        server: &Server,
        offered_pps: Option<f64>,
        seconds: f64,
    ) -> Result<DnsMeasurement, LabError> {
        let config = LoadConfig {
            rate_pps: offered_pps,
            seconds,
            warm_up_seconds: (seconds / 4.0).min(0.5),
            ..self.load_config(server)
        };
        let read = || {
            Ok::<_, LabError>((CoreTicks::read(self.setup.core)?, CoreTicks::read(self.load_core)?))
        };
        let before: (CoreTicks, CoreTicks) = read()?;
        let load = self.receive_replies_on_load_core(|| {
            let end = &self.pair.a;
            Ok(end.namespace.enter(|| load_dns(&config, &self.queries, None, &mut |_| {}))??)
        })?;
        let after: (CoreTicks, CoreTicks) = read()?;
        Ok(DnsMeasurement {
            load,
            server_core: after.0.since(before.0),
            load_core: after.1.since(before.1),
        })
    }
}

fn write_file(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), LabError> {
    let file = File::create(path).map_err(LabError::file(path))?;
    let mut out = BufWriter::new(file);
    content(&mut out).and_then(|()| out.flush()).map_err(LabError::file(path))
}

fn make_world_readable(folder: &Path) -> Result<(), LabError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(LabError::file(folder))
}
