//! TCP beside the kernel's: echo in the three scenarios of Farias (2023),
//! bytes one way, many idle connections, a flood of SYN segments.
//!
//! Core 1 serves, with all receive work of the server's device; core 0 makes
//! the load. What goes over the wire are frames of at most 1,514 bytes.

pub mod bulk;
pub mod connections;
pub mod echo;
pub mod syn_flood;

use std::net::{Ipv4Addr, SocketAddr};

use serde::Serialize;

use crate::cpu::{CoreTicks, CoreUse};
use crate::error::LabError;
use crate::livelock::subject::this_program;
use crate::load::{LinkKind, TcpLoadConfig, TcpLoadReport, load_tcp_watched};
use crate::netns::{VethConfig, VethPair};
use crate::process::Process;

/// The kernel's, for a load on kernel sockets.
const KERNEL_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const KERNEL_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const OWN_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
/// The first of the addresses of a load on Tidegate.
const OWN_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 16, 1);
const PREFIX: u8 = 16;
const PORT: u16 = 7;

/// A server of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Subject {
    /// The kernel's sockets with epoll, which sleeps.
    KernelEpoll,
    /// The same, and it never sleeps.
    KernelSpin,
    /// The kernel's sockets with `io_uring`.
    KernelUring,
    /// Tidegate on AF_XDP.
    TidegateXdp,
    /// Tidegate on AF_PACKET.
    TidegatePacket,
}

impl Subject {
    const ALL: [Self; 5] = [
        Self::KernelEpoll,
        Self::KernelSpin,
        Self::KernelUring,
        Self::TidegateXdp,
        Self::TidegatePacket,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::KernelEpoll => "kernel-epoll",
            Self::KernelSpin => "kernel-spin",
            Self::KernelUring => "kernel-io-uring",
            Self::TidegateXdp => "tidegate-xdp",
            Self::TidegatePacket => "tidegate-packet",
        }
    }

    fn is_kernel(self) -> bool {
        matches!(self, Self::KernelEpoll | Self::KernelSpin | Self::KernelUring)
    }
}

/// What makes the receive work run on the server's core, where the server does
/// not do it itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelReceive {
    /// Receive Packet Steering.
    Steering,
    /// A thread for the device, which merges segments (GRO).
    Thread,
}

/// A wire and two cores.
struct Bench {
    /// Load in `a`, servers in `b`.
    pair: VethPair,
    server_core: usize,
    load_core: usize,
}

/// A server that runs.
struct Server {
    process: Process,
    target: SocketAddr,
}

/// What came of a load.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    load: TcpLoadReport,
    server_core: CoreUse,
    load_core: CoreUse,
}

impl Bench {
    fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let config = VethConfig {
            a: vec![format!("{KERNEL_CLIENT}/{PREFIX}")],
            b: vec![format!("{KERNEL_SERVER}/{PREFIX}")],
        };
        Ok(Self { pair: VethPair::new(&config)?, server_core, load_core })
    }

    /// Starts `serve echo --tcp` with more flags.
    fn start(
        &self,
        subject: Subject,
        receive: KernelReceive,
        flags: &[&str],
    ) -> Result<Server, LabError> {
        let end = &self.pair.b;
        let steers = match subject {
            Subject::TidegateXdp => false,
            _ => receive == KernelReceive::Steering,
        };
        let merges = subject != Subject::TidegateXdp && receive == KernelReceive::Thread;
        end.set_rps(steers.then_some(self.server_core))?;
        end.set_deferral(0, 0)?;
        // Fails where there was no thread.
        let _ = end.set_softirq_napi();
        end.ethtool(&["gro", if merges { "on" } else { "off" }])?;
        if merges {
            end.set_threaded_napi(self.server_core)?;
        }
        let mut command = end.namespace.command_on_core(self.server_core, this_program()?);
        command.args(["serve", "echo", "--tcp", "--listen", &PORT.to_string(), "--json"]);
        command.args(["--cpu", &self.server_core.to_string()]);
        let own = format!("{OWN_SERVER}/{PREFIX}");
        match subject {
            Subject::KernelEpoll => command.args(["--port", "kernel"]),
            Subject::KernelSpin => command.args(["--port", "kernel", "--spin"]),
            Subject::KernelUring => command.args(["--port", "kernel", "--io-uring"]),
            Subject::TidegateXdp => {
                command.args(["--port", "xdp", "--iface", &end.device, "--address", &own])
            }
            Subject::TidegatePacket => {
                command.args(["--port", "packet", "--iface", &end.device, "--address", &own])
            }
        };
        command.args(flags);
        let mut process = Process::start(subject.name(), &mut command)?;
        process.wait_for_line()?;
        let address = if subject.is_kernel() { KERNEL_SERVER } else { OWN_SERVER };
        Ok(Server { process, target: SocketAddr::new(address.into(), PORT) })
    }

    /// Whether segments go over the wire that are not cut, with checksums that
    /// are not filled in: between cards that do that, or on one machine.
    fn set_offload(&self, on: bool) -> Result<(), LabError> {
        let on = if on { "on" } else { "off" };
        [&self.pair.a, &self.pair.b]
            .into_iter()
            .try_for_each(|end| end.ethtool(&["tx", on, "tso", on, "gso", on]))
    }

    /// A load on the load's core, through `link`.
    fn load_config(&self, server: &Server, link: LinkKind) -> TcpLoadConfig {
        let defaults = TcpLoadConfig::new(link, server.target);
        let own = link != LinkKind::Kernel;
        TcpLoadConfig {
            interface: own.then(|| self.pair.a.device.clone()),
            source: own.then_some(OWN_CLIENT.into()),
            prefix: PREFIX,
            core: Some(self.load_core),
            ..defaults
        }
    }

    fn measure(&self, config: &TcpLoadConfig) -> Result<Measured, LabError> {
        self.measure_watched(config, || Ok(()))
    }

    /// As [`Bench::measure`]; calls `opened` when all connections are
    /// established and nothing goes over them yet.
    fn measure_watched(
        &self,
        config: &TcpLoadConfig,
        opened: impl FnOnce() -> Result<(), LabError> + Send,
    ) -> Result<Measured, LabError> {
        let end = &self.pair.a;
        // What comes back is received on the core that asked.
        end.set_rps((config.link == LinkKind::Kernel).then_some(self.load_core))?;
        end.namespace.enter(|| {
            let mut before = None;
            let load = load_tcp_watched(config, || {
                opened()?;
                before = Some(self.ticks()?);
                Ok(())
            })?;
            let after = self.ticks()?;
            let before = before.unwrap_or(after);
            Ok(Measured {
                load,
                server_core: after.0.since(before.0),
                load_core: after.1.since(before.1),
            })
        })?
    }

    fn ticks(&self) -> Result<(CoreTicks, CoreTicks), LabError> {
        Ok((CoreTicks::read(self.server_core)?, CoreTicks::read(self.load_core)?))
    }
}

/// How long to measure, and how often: what the experiments have in common.
#[derive(Clone, Copy, Debug)]
pub struct TcpConfig {
    /// How long each measurement lasts.
    pub seconds: f64,
    /// How often everything is measured; the median counts.
    pub repeats: usize,
    /// The sizes of the paper instead of those for this machine.
    pub full: bool,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { seconds: 2.0, repeats: 5, full: false }
    }
}

impl TcpConfig {
    /// A first look.
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 1, ..self }
    }
}

/// The median of what was measured.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    crate::dns::sweep::median(&values.collect::<Vec<_>>())
}

/// The cores that serve and that make the load.
pub(crate) fn cores() -> Result<(usize, usize), LabError> {
    if crate::cpu::cores() < 2 {
        return Err(LabError::Config("this experiment needs two cores".to_owned()));
    }
    Ok((1, 0))
}
