//! How a server lives on the network: the flags that `serve` commands share.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tidegate::gate::Settings;
use tidegate::host::{HostConfig, HostError, HostPort};
use tidegate::port::xdp::Mode;
use tidegate::{IpCidr, MacAddr, NetConfig};

use crate::Failure;
use crate::config::{Section, Text};

/// Where packets come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    /// A port of Tidegate's.
    Own(HostPort),
    /// Kernel sockets.
    Kernel,
}

impl FromStr for PortKind {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        match text {
            "kernel" => Ok(Self::Kernel),
            _ => text.parse().map(Self::Own),
        }
    }
}

impl fmt::Display for PortKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(port) => port.fmt(f),
            Self::Kernel => f.write_str("kernel"),
        }
    }
}

/// Section `[host]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct HostOptions {
    /// Where packets come from [default: xdp]
    ///
    /// xdp: AF_XDP, fastest; takes only what it was told to.
    /// packet: AF_PACKET, needs no BPF; own address only.
    /// tap: a TAP device, made if it is missing.
    /// dpdk:DEVICE: a device of DPDK's, by its PCI address or as net_tap0,iface=NAME;
    /// arguments for DPDK may follow after a space.
    /// kernel: kernel sockets, the same server without Tidegate, to compare.
    #[arg(long, value_name = "KIND", verbatim_doc_comment)]
    port: Option<Text<PortKind>>,
    /// The network interface; not with DPDK
    #[arg(long, short, value_name = "NAME")]
    iface: Option<String>,
    /// An address of Tidegate's own, with its prefix; may be given several times
    #[arg(long, short, value_name = "ADDRESS/BITS")]
    address: Vec<Text<IpCidr>>,
    /// Live on the kernel's addresses: only the served ports move to Tidegate
    #[arg(long, conflicts_with_all = ["address", "gateway", "route", "mac"])]
    shared: bool,
    /// A default gateway, one for each family
    #[arg(long, value_name = "ADDRESS")]
    gateway: Vec<IpAddr>,
    /// A route, as PREFIX=GATEWAY; may be given several times
    #[arg(long, value_name = "PREFIX=GATEWAY")]
    route: Vec<String>,
    /// The hardware address to use with an own address [default: the interface's]
    #[arg(long, value_name = "MAC")]
    mac: Option<Text<MacAddr>>,
    /// Be in this VLAN (802.1Q)
    #[arg(long, value_name = "ID")]
    vlan: Option<u16>,
    /// How to attach to the interface [default: auto: native, else generic]
    #[arg(long, value_enum, value_name = "MODE")]
    xdp_mode: Option<XdpMode>,
    /// A receive queue to serve; may be given several times [default: all]
    #[arg(long, value_name = "QUEUE")]
    queue: Vec<u32>,
    /// How many queues of a DPDK device to open in each direction [default: 1]
    #[arg(long, value_name = "COUNT")]
    queues: Option<NonZeroU16>,
    /// Packets for each busy poll of the card's queue; 0 leaves it to interrupts [default: 64]
    #[arg(long, value_name = "PACKETS")]
    busy_poll: Option<u16>,
    /// Let the kernel or the device cut TCP segments; with --port packet, tap or dpdk
    #[arg(long)]
    segmentation: bool,
    /// Packet buffers [default: 8192; 1024, of 64 KiB, with --segmentation]
    #[arg(long, value_name = "COUNT")]
    frames: Option<u32>,
    /// Do not try to get hugepages
    #[arg(long)]
    no_hugepages: bool,
    /// Run on this processor only
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Write every frame to this capture file
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Print every frame on standard error
    #[arg(long)]
    trace: bool,
    /// Damage traffic on purpose: loss=P,duplication=P,reordering=P,corruption=P,seed=N
    #[arg(long, value_name = "FAULTS")]
    fault: Option<String>,
}

impl Section for HostOptions {
    const NAME: &'static str = "host";
}

/// How to attach an XDP program.
#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum XdpMode {
    /// Native, else generic
    Auto,
    /// In the driver
    Native,
    /// In the kernel's generic receive path: every interface has it
    Generic,
}

impl From<XdpMode> for Mode {
    fn from(mode: XdpMode) -> Self {
        match mode {
            XdpMode::Auto => Mode::Auto,
            XdpMode::Native => Mode::Native,
            XdpMode::Generic => Mode::Generic,
        }
    }
}

impl HostOptions {
    pub(crate) fn port_kind(&self) -> PortKind {
        self.port.clone().map_or(PortKind::Own(HostPort::Xdp), |port| port.0)
    }

    /// Whether it lives on the kernel's addresses.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Keeps this thread on the chosen processor.
    pub(crate) fn pin(&self) -> Result<(), Failure> {
        self.pin_beside(0)
    }

    /// As [`HostOptions::pin`], so many processors further.
    pub(crate) fn pin_beside(&self, further: usize) -> Result<(), Failure> {
        self.cpu.map_or(Ok(()), |cpu| pin_to(cpu + further))
    }

    /// What the server binds: every address of the stack, by family.
    pub(crate) fn wildcards(&self, port: u16) -> Vec<SocketAddr> {
        let any = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
        let has = |family: IpAddr| {
            let is_family = |own: &Text<IpCidr>| own.0.address().is_ipv4() == family.is_ipv4();
            self.shared || self.address.iter().any(is_family)
        };
        any.into_iter().filter(|&any| has(any)).map(|any| SocketAddr::new(any, port)).collect()
    }

    /// What the server binds on kernel sockets: the given addresses, else all.
    pub(crate) fn kernel_addresses(&self, port: u16) -> Vec<SocketAddr> {
        if self.address.is_empty() {
            let any = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
            return any.map(|any| SocketAddr::new(any, port)).into();
        }
        self.address.iter().map(|own| SocketAddr::new(own.0.address(), port)).collect()
    }

    /// Whether nothing is said but the processor.
    pub(crate) fn is_only_cpu(&self) -> Result<bool, Failure> {
        let others = Self { cpu: None, ..self.clone() };
        Ok(serde_json::to_value(others)? == serde_json::to_value(Self::default())?)
    }

    /// The flags as the library takes them.
    pub(crate) fn host_config(&self) -> Result<HostConfig, Failure> {
        Ok(serde_json::from_value(serde_json::to_value(self)?)?)
    }

    /// The stack that the flags describe.
    pub(crate) fn net_config(&self, gate: &Settings) -> Result<NetConfig, Failure> {
        Ok(self.host_config()?.net_config(gate)?)
    }
}

/// Keeps this thread, and those that it starts, on one processor.
pub(crate) fn pin_to(cpu: usize) -> Result<(), Failure> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(format!("--cpu {cpu}: there is no such processor").into());
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|error| format!("--cpu {cpu}: {error}; `nproc` says how many there are"))?;
    Ok(())
}
