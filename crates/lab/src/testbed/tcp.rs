//! Testbed of the TCP experiments: servers on the kernel and on Tidegate.
//!
//! Core 1 serves and does all receive work of the server's device; core 0 generates the load. The
//! frames on the veth pair have at most 1,514 bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tidegate_load::{
    LinkKind, SpinningConfig, SpinningReport, TcpLoadConfig, TcpLoadReport, load_tcp_with_hook,
    load_udp_spinning,
};

use crate::error::LabError;
use crate::testbed::cpu::{CoreTicks, CoreUsage};
use crate::testbed::netns::{Namespace, VethConfig, VethPair};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;

/// Address of the client's kernel stack, for a load on kernel sockets.
const KERNEL_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const KERNEL_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const TIDEGATE_SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
const KERNEL_CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);
const KERNEL_SERVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2);
const TIDEGATE_SERVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 3);
const PREFIX_BITS_V6: u8 = 64;
/// First source address of a load on Tidegate.
const TIDEGATE_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 16, 1);
const PREFIX_BITS: u8 = 16;
pub(crate) const ECHO_PORT: u16 = 7;
/// Port without a server.
const CLOSED_PORT: u16 = 1;
/// Maximum time until IPv6 works on a new link.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);

/// Program that serves on the kernel's sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelProgram {
    /// With epoll; sleeps while idle.
    Epoll,
    /// With epoll, and never sleeps.
    Spin,
    /// With `io_uring`.
    Uring,
}

impl KernelProgram {
    fn name(self) -> &'static str {
        match self {
            Self::Epoll => "epoll",
            Self::Spin => "spin",
            Self::Uring => "io-uring",
        }
    }

    fn serve_flags(self) -> &'static [&'static str] {
        match self {
            Self::Epoll => &[],
            Self::Spin => &["--spin"],
            Self::Uring => &["--io-uring"],
        }
    }
}

/// Address family of a client and its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Address of the server on its stack, and the prefix length.
    fn server(self, on_kernel: bool) -> (IpAddr, u8) {
        match (self, on_kernel) {
            (Self::V4, true) => (KERNEL_SERVER.into(), PREFIX_BITS),
            (Self::V4, false) => (TIDEGATE_SERVER.into(), PREFIX_BITS),
            (Self::V6, true) => (KERNEL_SERVER_V6.into(), PREFIX_BITS_V6),
            (Self::V6, false) => (TIDEGATE_SERVER_V6.into(), PREFIX_BITS_V6),
        }
    }
}

/// TCP server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerKind {
    /// Kernel sockets.
    Kernel(KernelProgram, ReceiveWork),
    /// Tidegate on AF_XDP. With few clients its device has interrupts, as with
    /// [`ReceiveWork::Softirq`]; with many it polls.
    TidegateXdp,
    /// Tidegate on AF_XDP, polling only.
    TidegateDedicated,
    /// Tidegate on the device that it chooses by itself.
    TidegateDefault,
    /// Tidegate on AF_PACKET, with this receive work of the kernel.
    TidegatePacket(ReceiveWork),
}

impl ServerKind {
    /// Ways of the kernel, among which its best is.
    pub(crate) const KERNEL: [Self; 10] = {
        use KernelProgram::{Epoll, Spin, Uring};
        use ReceiveWork::{BusyPoll, Softirq, Steered, Suspended, Thread};
        [
            Self::Kernel(Epoll, Softirq),
            Self::Kernel(Spin, Softirq),
            Self::Kernel(Uring, Softirq),
            Self::Kernel(Epoll, Steered),
            Self::Kernel(Spin, Steered),
            Self::Kernel(Uring, Steered),
            Self::Kernel(Epoll, Thread),
            Self::Kernel(Uring, Thread),
            Self::Kernel(Epoll, BusyPoll),
            Self::Kernel(Epoll, Suspended),
        ]
    };

    /// The same for streams one way: the server with `io_uring` serves echo only.
    pub(crate) fn kernel_stream_servers() -> Vec<Self> {
        let is_uring = |kind: &Self| matches!(kind, Self::Kernel(KernelProgram::Uring, _));
        Self::KERNEL.into_iter().filter(|kind| !is_uring(kind)).collect()
    }

    pub(crate) fn name(self) -> String {
        match self {
            // `kernel-rps`: the program, then the receive work.
            Self::Kernel(program, work) => {
                let work = work.kernel_name().trim_start_matches("kernel");
                format!("kernel-{}{work}", program.name())
            }
            Self::TidegateXdp => "tidegate-xdp".to_owned(),
            Self::TidegateDedicated => "tidegate-xdp-dedicated".to_owned(),
            Self::TidegateDefault => "tidegate".to_owned(),
            Self::TidegatePacket(_) => "tidegate-packet".to_owned(),
        }
    }

    pub(crate) fn is_kernel(self) -> bool {
        matches!(self, Self::Kernel(..))
    }

    fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Kernel(_, work) | Self::TidegatePacket(work) => work,
            Self::TidegateXdp | Self::TidegateDedicated | Self::TidegateDefault => {
                ReceiveWork::Server
            }
        }
    }
}

/// Veth pair and two cores.
pub(crate) struct TcpTestbed {
    /// Load in `a`, server in `b`.
    pair: VethPair,
    server_core: usize,
    load_core: usize,
}

/// Running server.
pub(crate) struct RunningServer {
    pub(crate) process: ServerProcess,
    pub(crate) target: SocketAddr,
}

/// Report of a load, with the usage of both cores.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TcpMeasurement {
    pub(crate) load: TcpLoadReport,
    pub(crate) server_core: CoreUsage,
    pub(crate) load_core: CoreUsage,
}

impl TcpTestbed {
    pub(crate) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let config = VethConfig {
            a: vec![
                format!("{KERNEL_CLIENT}/{PREFIX_BITS}"),
                format!("{KERNEL_CLIENT_V6}/{PREFIX_BITS_V6}"),
            ],
            b: vec![
                format!("{KERNEL_SERVER}/{PREFIX_BITS}"),
                format!("{KERNEL_SERVER_V6}/{PREFIX_BITS_V6}"),
            ],
        };
        Ok(Self { pair: VethPair::as_on_a_wire(&config)?, server_core, load_core })
    }

    /// Waits until IPv6 works on the link, for loads by it.
    pub(crate) fn wait_for_ipv6(&self) -> Result<(), LabError> {
        // The first neighbour solicitation of a new link is lost, and the second comes a second later.
        // A closed port refuses the connection then.
        let closed_port = SocketAddr::new(KERNEL_SERVER_V6.into(), CLOSED_PORT);
        let connect = || TcpStream::connect_timeout(&closed_port, LINK_TIMEOUT);
        self.pair.a.namespace.enter(connect).map(drop)
    }

    /// Namespace of the servers.
    pub(crate) fn server_namespace(&self) -> &Namespace {
        &self.pair.b.namespace
    }

    /// Starts `serve echo --tcp` with additional flags.
    pub(crate) fn start(
        &self,
        server_kind: ServerKind,
        flags: &[&str],
    ) -> Result<RunningServer, LabError> {
        self.start_echo(server_kind, Family::V4, &[&["--tcp"], flags].concat())
    }

    /// Starts `serve echo` with additional flags, at the address of `family`.
    pub(crate) fn start_echo(
        &self,
        server_kind: ServerKind,
        family: Family,
        flags: &[&str],
    ) -> Result<RunningServer, LabError> {
        let end = &self.pair.b;
        self.place_receive_work(server_kind.receive_work())?;
        let mut command = end.namespace.command_on_core(self.server_core, programs::tidegate()?);
        command.args(["serve", "echo", "--listen", &ECHO_PORT.to_string(), "--json"]);
        command.args(["--cpu", &self.server_core.to_string()]);
        let (address, prefix_bits) = family.server(server_kind.is_kernel());
        let cidr = format!("{address}/{prefix_bits}");
        let on_device = ["--iface", &end.device, "--address", &cidr];
        match server_kind {
            ServerKind::Kernel(program, work) => {
                command.args(["--io", "kernel", "--address", &cidr]);
                command.args(program.serve_flags()).args(work.serve_flags())
            }
            ServerKind::TidegateXdp => command.args(["--io", "xdp"]).args(on_device),
            ServerKind::TidegateDedicated => {
                command.args(["--io", "xdp", "--mode", "dedicated"]).args(on_device)
            }
            ServerKind::TidegateDefault => command.args(on_device),
            ServerKind::TidegatePacket(_) => command.args(["--io", "packet"]).args(on_device),
        };
        command.args(flags);
        let mut process = ServerProcess::start(&server_kind.name(), &mut command)?;
        process.wait_for_first_line()?;
        Ok(RunningServer { process, target: SocketAddr::new(address, ECHO_PORT) })
    }

    fn place_receive_work(&self, receive_work: ReceiveWork) -> Result<(), LabError> {
        let end = &self.pair.b;
        ReceiveWork::reset(end)?;
        end.ethtool(&["gro", if receive_work.needs_napi() { "on" } else { "off" }])?;
        receive_work.place(end, self.server_core)
    }

    /// Starts a server that is no part of Tidegate, at an address of `family` that the kernel does not
    /// have: `program` on the server's core, with `arguments` beside those of the device.
    pub(crate) fn start_peer(
        &self,
        name: &str,
        program: &Path,
        receive_work: ReceiveWork,
        family: Family,
        arguments: &[&str],
    ) -> Result<RunningServer, LabError> {
        let end = &self.pair.b;
        self.place_receive_work(receive_work)?;
        let (address, prefix_bits) = family.server(false);
        let mut command = end.namespace.command_on_core(self.server_core, program);
        command.args(["--iface", &end.device, "--address", &format!("{address}/{prefix_bits}")]);
        command.args(["--port", &ECHO_PORT.to_string()]).args(arguments);
        let mut process = ServerProcess::start(name, &mut command)?;
        process.wait_for_first_line()?;
        Ok(RunningServer { process, target: SocketAddr::new(address, ECHO_PORT) })
    }

    /// Turns offloads on or off. With offloads, unsegmented segments with unfilled checksums pass
    /// the veth pair, as between offloading NICs or on one machine.
    pub(crate) fn set_offload(&self, on: bool) -> Result<(), LabError> {
        let on = if on { "on" } else { "off" };
        [&self.pair.a, &self.pair.b]
            .into_iter()
            .try_for_each(|end| end.ethtool(&["tx", on, "tso", on, "gso", on]))
    }

    /// Turns GRO on at both ends, for as long as the server that was started last runs.
    pub(crate) fn coalesce(&self) -> Result<(), LabError> {
        [&self.pair.a, &self.pair.b].into_iter().try_for_each(|end| end.ethtool(&["gro", "on"]))
    }

    /// Returns the configuration of a load on the load core, through `link`.
    pub(crate) fn load_config(&self, server: &RunningServer, link: LinkKind) -> TcpLoadConfig {
        let defaults = TcpLoadConfig::new(link, server.target);
        let on_tidegate = link != LinkKind::Kernel;
        TcpLoadConfig {
            interface: on_tidegate.then(|| self.pair.a.device.clone()),
            source: on_tidegate.then_some(TIDEGATE_CLIENT.into()),
            prefix_len: PREFIX_BITS,
            core: Some(self.load_core),
            ..defaults
        }
    }

    pub(crate) fn measure(&self, config: &TcpLoadConfig) -> Result<TcpMeasurement, LabError> {
        self.measure_with(config, || Ok(()))
    }

    /// Like [`TcpTestbed::measure`]; calls `on_open` when all connections are established and
    /// before any data is sent.
    pub(crate) fn measure_with(
        &self,
        config: &TcpLoadConfig,
        on_open: impl FnOnce() -> Result<(), LabError> + Send,
    ) -> Result<TcpMeasurement, LabError> {
        let end = &self.pair.a;
        // Replies are received on the core that sent the requests.
        let receives_by_rps = config.link == LinkKind::Kernel;
        end.set_rps(if receives_by_rps { std::slice::from_ref(&self.load_core) } else { &[] })?;
        end.namespace.enter(|| {
            let mut before = None;
            let load = load_tcp_with_hook(config, || {
                on_open()?;
                before = Some(self.ticks()?);
                Ok::<_, LabError>(())
            })?;
            let after = self.ticks()?;
            let before = before.unwrap_or(after);
            Ok(TcpMeasurement {
                load,
                server_core: after.0.since(before.0),
                load_core: after.1.since(before.1),
            })
        })?
    }

    /// Runs a UDP load of a client on kernel sockets that never sleeps, on the load core.
    pub(crate) fn measure_udp(
        &self,
        config: &SpinningConfig,
    ) -> Result<(SpinningReport, CoreUsage), LabError> {
        let end = &self.pair.a;
        end.set_rps(&[self.load_core])?;
        end.namespace.enter(|| {
            let before = self.ticks()?;
            let report = load_udp_spinning(config)?;
            Ok((report, self.ticks()?.0.since(before.0)))
        })?
    }

    /// Core of the load.
    pub(crate) fn load_core(&self) -> usize {
        self.load_core
    }

    pub(crate) fn ticks(&self) -> Result<(CoreTicks, CoreTicks), LabError> {
        Ok((CoreTicks::read(self.server_core)?, CoreTicks::read(self.load_core)?))
    }
}

/// Configuration that the TCP experiments share.
#[derive(Clone, Copy, Debug)]
pub struct TcpLabConfig {
    /// Duration of each measurement, in seconds.
    pub seconds: f64,
    /// Number of repetitions of all measurements; the median counts.
    pub repeats: usize,
    /// Use the sizes of the paper instead of those for this machine.
    pub full: bool,
    /// Measure only the points that the figures need.
    pub few_points: bool,
}

impl Default for TcpLabConfig {
    fn default() -> Self {
        Self { seconds: 2.0, repeats: 5, full: false, few_points: false }
    }
}

impl TcpLabConfig {
    /// Reduces times and repetitions for a quick run.
    pub fn quick(self) -> Self {
        Self { seconds: 0.5, repeats: 1, few_points: true, ..self }
    }
}

/// Returns the core that serves and the core that generates the load.
///
/// # Errors
/// When the machine has fewer than two cores.
pub(crate) fn choose_cores() -> Result<(usize, usize), LabError> {
    if crate::testbed::cpu::available_cores() < 2 {
        return Err(LabError::Config("this experiment needs two cores".to_owned()));
    }
    Ok((1, 0))
}
