//! Network options of a server: the flags that the servers and the daemon share.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use clap::builder::TypedValueParser;
use serde::{Deserialize, Serialize};
use tidegate::device::fault::{FaultConfig, FaultRates};
use tidegate::device::xdp::AttachMode;
use tidegate::gate::Settings;
use tidegate::host::{HostConfig, HostConfigError, HostDevice};
use tidegate::{AddressProbe, IpCidr, MacAddr, NetConfig, Route};

use crate::choices::choices;
use crate::config::{AsText, Section};
use crate::{Failure, numa};

/// Packet source and sink of a server: the value of `--io`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum IoKind {
    /// Device that Tidegate drives.
    Device(HostDevice),
    /// Kernel sockets, without Tidegate.
    Kernel,
}

impl FromStr for IoKind {
    type Err = HostConfigError;

    fn from_str(text: &str) -> Result<Self, HostConfigError> {
        match text {
            "kernel" => Ok(Self::Kernel),
            _ => text.parse().map(Self::Device),
        }
    }
}

impl fmt::Display for IoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => device.fmt(f),
            Self::Kernel => f.write_str("kernel"),
        }
    }
}

/// Address of a stack with the prefix length of its network. Without the prefix length no peer
/// would be a neighbour, and no reply would have a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnAddress(IpCidr);

impl FromStr for OwnAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address: IpCidr = text.parse().map_err(|error| format!("{error}"))?;
        if text.contains('/') {
            return Ok(Self(address));
        }
        let bits = if address.address().is_ipv4() { 24 } else { 64 };
        Err(format!("the prefix length of its network is missing: give it as {text}/{bits}"))
    }
}

impl fmt::Display for OwnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Section `[host]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct HostOptions {
    /// Packet I/O [default: auto]
    ///
    /// auto: AF_XDP, or AF_PACKET if another process holds AF_XDP on the interface.
    /// xdp: AF_XDP, fastest; redirects only the traffic of its own addresses or served ports.
    /// packet: AF_PACKET, beside other programs on the interface; needs no BPF with --address, and
    /// Linux 6.6 with --shared.
    /// tap: a TAP device, created if it does not exist.
    /// dpdk:DEVICE: a DPDK device, by PCI address or as net_tap0,iface=NAME;
    /// EAL arguments for DPDK may follow after a space.
    /// rdma:DEVICE: a network of its own over an RDMA NIC, as rxe0 or mlx5_0/2.
    /// kernel: kernel sockets; the same server without Tidegate, for comparison.
    #[arg(long, alias = "port", value_name = "KIND", verbatim_doc_comment)]
    #[serde(alias = "port")]
    io: Option<AsText<IoKind>>,
    /// Network interface; not with DPDK and RDMA
    #[arg(long, short, value_name = "NAME")]
    iface: Option<String>,
    /// IP address of the stack, with its prefix length; may be repeated
    #[arg(long, short, value_name = "ADDRESS/BITS")]
    address: Vec<AsText<OwnAddress>>,
    /// Share the host's IP addresses; only the served ports are redirected
    #[arg(long, conflicts_with_all = ["address", "gateway", "route", "mac", "probe"])]
    shared: bool,
    /// Default gateway, at most one per address family
    #[arg(long, value_name = "ADDRESS")]
    gateway: Vec<IpAddr>,
    /// Static route, as PREFIX=GATEWAY; may be repeated
    #[arg(long, value_name = "PREFIX=GATEWAY")]
    route: Vec<String>,
    /// MAC address to use with --address [default: the interface's]
    #[arg(long, value_name = "MAC")]
    mac: Option<AsText<MacAddr>>,
    /// Check that no other host uses an --address [default: quick]
    #[arg(long, value_parser = address_probes(), value_name = "PROBE")]
    probe: Option<AsText<AddressProbe>>,
    /// VLAN id (802.1Q) of all traffic [default: untagged]
    #[arg(long, value_name = "ID")]
    vlan: Option<u16>,
    /// XDP attach mode [default: auto]
    #[arg(long, value_parser = attach_modes(), value_name = "MODE")]
    xdp_mode: Option<AsText<AttachMode>>,
    /// Receive queue to serve; may be repeated [default: all]
    #[arg(long, value_name = "QUEUE")]
    queue: Vec<u32>,
    /// Number of queues to open in each direction of a DPDK device [default: one for each network
    /// core; a memif has one]
    #[arg(long, value_name = "COUNT")]
    queues: Option<NonZeroU16>,
    /// Maximum number of packets per busy poll of a receive queue; 0 uses interrupts instead
    /// [default: 64]
    #[arg(long, value_name = "PACKETS")]
    busy_poll: Option<u16>,
    /// Offload TCP segmentation (TSO) to the kernel or the device; with --io packet, tap or dpdk
    #[arg(long)]
    segmentation: bool,
    /// Number of packet buffers [default: 8192; 1024, of 64 KiB, with --segmentation]
    #[arg(long, value_name = "COUNT")]
    frames: Option<u32>,
    /// Use ordinary pages instead of hugepages
    #[arg(long)]
    no_hugepages: bool,
    /// Pin to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Write every frame to this capture file
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Print every frame to standard error
    #[arg(long)]
    trace: bool,
    /// Inject faults, as probabilities: loss=P,duplication=P,reordering=P,corruption=P,seed=N
    #[arg(long, value_name = "FAULTS")]
    fault: Option<String>,
}

impl Section for HostOptions {
    const NAME: &'static str = "host";
}

/// XDP attach modes by name.
pub(crate) fn attach_modes() -> impl TypedValueParser<Value = AsText<AttachMode>> {
    let choice = |mode: AttachMode, help| (mode.name(), AsText(mode), help);
    choices([
        choice(AttachMode::Auto, "Native if the driver supports it, else generic"),
        choice(AttachMode::Native, "In the driver"),
        choice(
            AttachMode::Generic,
            "In the kernel's generic receive path, which every interface has",
        ),
    ])
}

/// Ways to check own addresses, by name.
pub(crate) fn address_probes() -> impl TypedValueParser<Value = AsText<AddressProbe>> {
    let choice = |probe: AddressProbe, help| (probe.name(), AsText(probe), help);
    choices([
        choice(
            AddressProbe::Quick,
            "Three probes in 0.14 s; the addresses are used meanwhile, and given up if claimed",
        ),
        choice(
            AddressProbe::Rfc,
            "As RFC 5227 and RFC 4862 say: the addresses are used after up to 7 s",
        ),
        choice(AddressProbe::Off, "No probe"),
    ])
}

impl HostOptions {
    pub(crate) fn io_kind(&self) -> IoKind {
        self.io.clone().map_or(IoKind::Device(HostDevice::Auto), |port| port.0)
    }

    /// Returns true if the server shares the host's IP addresses.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Returns the name of the device, as the metrics have it.
    pub(crate) fn device_name(&self) -> String {
        match (self.io_kind(), &self.iface) {
            (_, Some(iface)) => iface.clone(),
            (IoKind::Device(HostDevice::Dpdk(config)), None) => config.device,
            (IoKind::Device(HostDevice::Rdma(config)), None) => config.device,
            (_, None) => String::new(),
        }
    }

    /// Returns the interface whose addresses the server shares with the host, if it does.
    pub(crate) fn shared_interface(&self) -> Option<&str> {
        self.iface.as_deref().filter(|_| self.shared)
    }

    /// Pins the calling thread to the processor of `--cpu`, or lets it run near the card only.
    pub(crate) fn pin(&self) -> Result<(), Failure> {
        self.pin_with_offset(0)
    }

    /// Pins the calling thread to the processor `offset` places after that of `--cpu`, if given;
    /// otherwise lets it run near the card only.
    pub(crate) fn pin_with_offset(&self, offset: usize) -> Result<(), Failure> {
        if self.cpu.is_none() {
            numa::stay_near(self.iface.as_deref());
        }
        self.pin_to_given(offset)
    }

    /// As [`HostOptions::pin_with_offset`], but without `--cpu` nothing changes: for a program that
    /// is not Tidegate's own.
    pub(crate) fn pin_to_given(&self, offset: usize) -> Result<(), Failure> {
        let Some(cpu) = self.cpu else { return Ok(()) };
        numa::warn_if_remote(self.iface.as_deref(), cpu + offset);
        pin_to(cpu + offset)
    }

    /// Returns the addresses that the server binds on Tidegate: the wildcard of each address
    /// family that the stack has.
    pub(crate) fn wildcard_addresses(&self, port: u16) -> Vec<SocketAddr> {
        let any = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
        let has = |family: IpAddr| {
            let is_family =
                |own: &AsText<OwnAddress>| own.0.0.address().is_ipv4() == family.is_ipv4();
            self.shared || self.address.iter().any(is_family)
        };
        any.into_iter().filter(|&any| has(any)).map(|any| SocketAddr::new(any, port)).collect()
    }

    /// Returns the addresses that the server binds on kernel sockets: those of `--address`, else
    /// both wildcards.
    pub(crate) fn kernel_addresses(&self, port: u16) -> Vec<SocketAddr> {
        if self.address.is_empty() {
            let any = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
            return any.map(|any| SocketAddr::new(any, port)).into();
        }
        self.address.iter().map(|own| SocketAddr::new(own.0.0.address(), port)).collect()
    }

    /// Returns the error of a stack that has served, with the interface and a remedy.
    pub(crate) fn explain(&self, error: io::Error) -> Failure {
        match &self.iface {
            Some(iface) => format!(
                "interface {iface} has failed: {error}; was it removed or taken down? `ip link \
                 show {iface}` shows its state"
            )
            .into(),
            None => error.into(),
        }
    }

    /// Returns true if no option but the processor is set.
    pub(crate) fn is_unset_except_cpu(&self) -> Result<bool, Failure> {
        let others = Self { cpu: None, ..self.clone() };
        Ok(serde_json::to_value(others)? == serde_json::to_value(Self::default())?)
    }

    /// Returns the host configuration that the flags describe.
    pub(crate) fn host_config(&self) -> Result<HostConfig, Failure> {
        let routes = self.route.iter().map(|route| parse_route(route));
        let mut host = HostConfig::default();
        host.io = match self.io_kind() {
            IoKind::Device(device) => device,
            // Not a device; the error lists the devices.
            kernel @ IoKind::Kernel => kernel.to_string().parse()?,
        };
        host.iface = self.iface.clone();
        host.addresses = self.address.iter().map(|address| address.0.0).collect();
        host.shared = self.shared;
        host.gateways = self.gateway.clone();
        host.routes = routes.collect::<Result<_, _>>()?;
        host.mac = self.mac.map(|mac| mac.0);
        host.vlan = self.vlan;
        host.probe = self.probe.map(|probe| probe.0).unwrap_or_default();
        host.xdp_mode = self.xdp_mode.map(|mode| mode.0).unwrap_or_default();
        host.queues = self.queue.clone();
        host.queue_count = self.queues;
        host.busy_poll = self.busy_poll;
        host.segmentation = self.segmentation;
        host.frames = self.frames;
        host.no_hugepages = self.no_hugepages;
        host.capture = self.capture.clone();
        host.trace = self.trace;
        host.faults = self.fault.as_deref().map(parse_faults).transpose()?;
        Ok(host)
    }

    /// Checks the flags without opening anything.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.host_config()?.check().map_err(with_flags)
    }

    /// Returns the stack configuration that the flags describe.
    pub(crate) fn net_config(&self, gate: &Settings) -> Result<NetConfig, Failure> {
        let config = self.host_config()?.net_config(gate).map_err(with_flags)?;
        if self.io_kind() != IoKind::Device(HostDevice::Auto) {
            return Ok(config);
        }
        Ok(config.wrap(Box::new(|device| {
            let capabilities = device.capabilities();
            if capabilities.kind == "packet" {
                tracing::info!("using AF_PACKET: {}", capabilities.detail);
            }
            Ok(device)
        })))
    }
}

/// Returns the error of a host configuration in terms of flags.
fn with_flags(error: HostConfigError) -> Failure {
    match error {
        HostConfigError::NoAddress => "no address: give --address ADDRESS/BITS for a separate \
                                       address, or --shared to share the kernel's addresses"
            .into(),
        HostConfigError::NoInterface => {
            "no interface: give --iface NAME; `ip link` lists them".into()
        }
        HostConfigError::Address { address, problem } => {
            format!("--address {address}: {problem}").into()
        }
        HostConfigError::Gateway { gateway, problem } => {
            format!("--gateway or --route to {gateway}: {problem}").into()
        }
        HostConfigError::TooFewFrames(frames) => {
            format!("--frames {frames}: too few to fill the rings of a device; give at least 64")
                .into()
        }
        HostConfigError::SegmentationOnXdp => {
            "--segmentation needs --io packet, --io tap or --io dpdk: AF_XDP and RDMA pass frames \
             as they are on the wire"
                .into()
        }
        HostConfigError::QueueCountWithoutDpdk => {
            "--queues needs --io dpdk:DEVICE; with --io xdp use --queue".into()
        }
        HostConfigError::InterfaceWithDpdk(iface) => format!(
            "--iface {iface}: with DPDK name the device in --io dpdk:DEVICE, as \
             --io dpdk:net_af_packet0,iface={iface}"
        )
        .into(),
        HostConfigError::InterfaceWithRdma(iface) => {
            format!("--iface {iface}: with RDMA name the device in --io rdma:DEVICE only").into()
        }
        error => error.into(),
    }
}

/// Parses the value of `--fault`, as `loss=0.01,corruption=0.001,seed=7`. The faults apply to
/// both directions.
fn parse_faults(text: &str) -> Result<FaultConfig, Failure> {
    let error = |part: &str| {
        format!(
            "--fault {part:?}: expected NAME=PROBABILITY with loss, duplication, reordering or \
             corruption, or seed=NUMBER, separated by commas"
        )
    };
    let (mut faults, mut seed) = (FaultRates::default(), 0);
    for part in text.split(',') {
        let (name, value) = part.split_once('=').ok_or_else(|| error(part))?;
        if name == "seed" {
            seed = value.parse().map_err(|_| error(part))?;
            continue;
        }
        let probability = match name {
            "loss" => &mut faults.loss,
            "duplication" => &mut faults.duplication,
            "reordering" => &mut faults.reordering,
            "corruption" => &mut faults.corruption,
            _ => return Err(error(part).into()),
        };
        *probability = value.parse().map_err(|_| error(part))?;
    }
    Ok(FaultConfig::default().seed(seed).receive(faults).transmit(faults))
}

/// Parses the value of `--route`, as `10.0.0.0/8=192.0.2.1`.
///
/// # Errors
/// When `text` is not `PREFIX=GATEWAY`.
pub(crate) fn parse_route(text: &str) -> Result<Route, Failure> {
    let error = || format!("--route {text}: expected PREFIX=GATEWAY, as 10.0.0.0/8=192.0.2.1");
    let (prefix, gateway) = text.split_once('=').ok_or_else(error)?;
    let prefix = prefix.parse().map_err(|_| error())?;
    let gateway = Some(gateway.parse().map_err(|_| error())?);
    Ok(Route { prefix, gateway })
}

/// Pins the calling thread, and the threads that it starts, to one processor.
pub(crate) fn pin_to(cpu: usize) -> Result<(), Failure> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(format!("--cpu {cpu}: there is no such processor").into());
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| {
        format!("--cpu {cpu}: {error}; `nproc` prints the number of processors")
    })?;
    Ok(())
}
