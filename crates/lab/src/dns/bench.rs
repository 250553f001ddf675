//! The bench that servers are measured on: a zone, a wire, two cores.

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

use super::servers::{Server, ServerKind, Setup};
use crate::cpu::{self, CoreTicks, CoreUse};
use crate::error::LabError;
use crate::load::{LinkKind, LoadConfig, LoadReport, QuerySet, load_dns};
use crate::netns::{VethConfig, VethPair};

const LOAD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
const PREFIX: u8 = 24;
/// The zone is the same on every machine and in every run.
const SEED: u64 = 1;

/// A zone, a wire and the cores at its ends.
pub struct Bench {
    /// The namespaces: load in `a`, servers in `b`.
    pub pair: VethPair,
    /// What every server is given.
    pub setup: Setup,
    /// The questions, one for each name of the zone.
    pub queries: QuerySet,
    /// The core that sends.
    pub load_core: usize,
    /// What load is sent through.
    pub link: LinkKind,
    zone: ZoneOnDisk,
}

/// What was measured at one load.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The load's own result.
    pub load: LoadReport,
    /// The core that serves.
    pub server_core: CoreUse,
    /// The core that sends.
    pub load_core: CoreUse,
}

/// A synthetic zone in a file of its own, gone on drop.
pub struct ZoneOnDisk {
    zone: SyntheticZone,
    folder: TempDir,
}

impl ZoneOnDisk {
    /// Writes a zone of `names` names.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(names: u64) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder for files"))?;
        // Servers that give up root must still read the zone.
        open_to_all(folder.path())?;
        let zone = SyntheticZone { origin: "bench.example".into(), names, seed: SEED };
        let written = Self { zone, folder };
        write(&written.file(), |out| written.zone.write_zone(out))?;
        Ok(written)
    }

    /// The folder that it is in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The zone file.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("zone")
    }

    /// The name of the zone.
    pub fn origin(&self) -> &str {
        &self.zone.origin
    }

    /// One question for each name, with EDNS.
    pub fn queries(&self) -> QuerySet {
        let mut queries = QuerySet::default();
        for index in 0..self.zone.names {
            let question = self.zone.question(index);
            queries.push(question.name.wire(), question.rtype, true);
        }
        queries
    }
}

impl Bench {
    /// Writes a zone of `names` names with a question for each, and joins two
    /// namespaces.
    ///
    /// # Errors
    /// When namespaces cannot be made or files not be written.
    pub fn new(
        names: u64,
        server_core: usize,
        load_core: usize,
        link: LinkKind,
    ) -> Result<Self, LabError> {
        let zone = ZoneOnDisk::write(names)?;
        let config = VethConfig { a: Vec::new(), b: vec![format!("{KERNEL_ADDRESS}/{PREFIX}")] };
        let pair = VethPair::new(&config)?;
        let setup = Setup {
            folder: zone.folder().to_path_buf(),
            origin: zone.origin().to_owned(),
            zone_file: zone.file(),
            kernel_address: KERNEL_ADDRESS.into(),
            own_address: OWN_ADDRESS.into(),
            more_own: Vec::new(),
            prefix: PREFIX,
            core: server_core,
        };
        Ok(Self { pair, setup, queries: zone.queries(), load_core, link, zone })
    }

    /// Writes the questions as dnsperf reads them and returns where.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_query_file(&self) -> Result<PathBuf, LabError> {
        let path = self.zone.folder().join("queries");
        let zone = &self.zone.zone;
        write(&path, |out| zone.write_queries(zone.names, out))?;
        Ok(path)
    }

    /// Starts a server and makes its core pay for all that it receives.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(&self, kind: ServerKind) -> Result<Server, LabError> {
        if self.steers() {
            self.steer(kind)?;
        }
        let server = Server::start(kind, &self.setup, &self.pair.b)?;
        if kind == ServerKind::KnotXdp {
            self.poll_on_server_core()?;
        }
        Ok(server)
    }

    /// Whether the server's core can be made to pay for receiving: root of a
    /// user namespace, who has AF_PACKET only, may not write these settings.
    pub fn steers(&self) -> bool {
        self.link == LinkKind::Xdp
    }

    fn steer(&self, kind: ServerKind) -> Result<(), LabError> {
        let end = &self.pair.b;
        // On veth the sender's core does the receiver's work unless it is told
        // otherwise. Kernel sockets: Receive Packet Steering.
        end.set_rps(kind.is_on_kernel_sockets().then_some(self.setup.core))?;
        end.set_deferral(0, 0)?;
        // Knot DNS leaves its XDP program behind.
        end.namespace.ip(&["link", "set", "dev", &end.device, "xdp", "off"]).map(drop)
    }

    /// Makes a timer on the server's core poll the device: what a card's
    /// interrupt with coalescing would do. For XDP programs without busy
    /// polling, which RPS does not help: they run before it.
    fn poll_on_server_core(&self) -> Result<(), LabError> {
        /// Far less than it takes to fill the 256 slots of a veth.
        const POLL_EVERY_NS: u64 = 20_000;
        /// How many polls without work before the device asks for an
        /// interrupt again, which would come on the sender's core.
        const NEVER: u32 = i32::MAX as u32;
        self.pair.b.set_deferral(NEVER, POLL_EVERY_NS)?;
        // The timer stays on the core of the first poll, so that must be the
        // server's: one packet sent from there.
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
            crate::load::load_udp(&config, 6, &mut |_| {}).map(drop)
        })?
    }

    /// The load that all measurements have in common.
    pub fn load_config(&self, server: &Server) -> LoadConfig {
        LoadConfig {
            interface: Some(self.pair.a.device.clone()),
            source: Some(LOAD_ADDRESS.into()),
            core: Some(self.load_core),
            ..LoadConfig::new(self.link, server.target)
        }
    }

    /// Runs a load while the answers' way into the generator's device is taken
    /// off the server's core: its NAPI context has a thread on the load's core.
    /// The thread comes into being when the generator attaches, so somebody has
    /// to wait for it.
    fn answers_on_load_core<T: Send>(
        &self,
        load: impl FnOnce() -> Result<T, LabError>,
    ) -> Result<T, LabError> {
        if !self.steers() {
            return load();
        }
        let end = &self.pair.a;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let placing = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    // Refused as long as there is no NAPI context.
                    if let Ok(threads) = end.set_threaded_napi(self.load_core) {
                        return threads.into_iter().try_for_each(cpu::run_first);
                    }
                    thread::sleep(Duration::from_millis(2));
                }
                Ok(())
            });
            let result = load();
            over.store(true, Ordering::Relaxed);
            placing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            result
        })
    }

    /// Offers a load for `seconds` and measures; `None` is as fast as it goes.
    ///
    /// # Errors
    /// When the load cannot be sent.
    pub fn measure(
        &self,
        server: &Server,
        offered_pps: Option<f64>,
        seconds: f64,
    ) -> Result<Measured, LabError> {
        let config = LoadConfig {
            rate_pps: offered_pps,
            seconds,
            warm_up_seconds: (seconds / 4.0).min(0.5),
            ..self.load_config(server)
        };
        let read = || Ok((CoreTicks::read(self.setup.core)?, CoreTicks::read(self.load_core)?));
        let before: (CoreTicks, CoreTicks) = read()?;
        let load = self.answers_on_load_core(|| {
            let end = &self.pair.a;
            end.namespace.enter(|| load_dns(&config, &self.queries, None, &mut |_| {}))?
        })?;
        let after: (CoreTicks, CoreTicks) = read()?;
        Ok(Measured {
            load,
            server_core: after.0.since(before.0),
            load_core: after.1.since(before.1),
        })
    }
}

fn write(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), LabError> {
    let file = File::create(path).map_err(LabError::file(path))?;
    let mut out = BufWriter::new(file);
    content(&mut out).and_then(|()| out.flush()).map_err(LabError::file(path))
}

fn open_to_all(folder: &Path) -> Result<(), LabError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(LabError::file(folder))
}
