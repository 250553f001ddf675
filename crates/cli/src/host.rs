//! How a server lives on the network: the flags that `serve` commands share.

use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tidegate::gate::{self, Settings};
use tidegate::port::capture::{Capture, CaptureConfig};
use tidegate::port::fault::{Fault, FaultConfig, Faults};
use tidegate::port::packet::PacketConfig;
use tidegate::port::tap::TapConfig;
use tidegate::port::trace::Trace;
use tidegate::port::xdp::{BusyPoll, Mode, XdpConfig};
use tidegate::{FrameSize, IpCidr, MacAddr, NetConfig, PortConfig, Route};

use crate::Failure;
use crate::config::{Section, Text};

/// Buffers of 64 KiB where none are asked for.
const LARGE_FRAMES: u32 = 1024;

/// Where packets come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PortKind {
    /// AF_XDP: fastest; takes only what it was told to
    Xdp,
    /// AF_PACKET: needs no BPF; own address only
    Packet,
    /// A TAP device, made if it is missing
    Tap,
    /// Kernel sockets: the same server without Tidegate, to compare
    Kernel,
}

/// Section `[host]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct HostOptions {
    /// Where packets come from [default: xdp]
    #[arg(long, value_enum, value_name = "KIND")]
    port: Option<PortKind>,
    /// The network interface
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
    /// Packets for each busy poll of the card's queue; 0 leaves it to interrupts [default: 64]
    #[arg(long, value_name = "PACKETS")]
    busy_poll: Option<u16>,
    /// Let the kernel cut and merge TCP segments; with --port packet or tap
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
        self.port.unwrap_or(PortKind::Xdp)
    }

    /// Keeps this thread on the chosen processor.
    pub(crate) fn pin(&self) -> Result<(), Failure> {
        self.cpu.map_or(Ok(()), pin_to)
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

    /// The stack that the flags describe.
    pub(crate) fn net_config(&self, gate: &Settings) -> Result<NetConfig, Failure> {
        if self.address.is_empty() && !self.shared {
            return Err("no address: give --address ADDRESS/BITS for one of Tidegate's own, or \
                        --shared to serve on the kernel's"
                .into());
        }
        let port = self.port_config(gate.config())?;
        let mut config = NetConfig::new(port).hugepages(!self.no_hugepages).gate(gate.clone());
        if self.shared {
            config = config.shared();
        }
        for &Text(address) in &self.address {
            config = config.address(address);
        }
        for &gateway in &self.gateway {
            let any = if gateway.is_ipv4() {
                IpAddr::from(Ipv4Addr::UNSPECIFIED)
            } else {
                Ipv6Addr::UNSPECIFIED.into()
            };
            let prefix = IpCidr::new(any, 0)?;
            config = config.route(Route { prefix, gateway: Some(gateway) });
        }
        for route in &self.route {
            config = config.route(parse_route(route)?);
        }
        if let Some(Text(mac)) = self.mac {
            config = config.mac(mac);
        }
        if let Some(vlan) = self.vlan {
            config = config.vlan(vlan);
        }
        if self.segmentation {
            config = config.frames(self.frames.unwrap_or(LARGE_FRAMES), FrameSize::K64);
        } else if let Some(frames) = self.frames {
            config = config.frames(frames, FrameSize::K2);
        }
        self.wrap(config)
    }

    fn port_config(&self, gate: &gate::Config) -> Result<PortConfig, Failure> {
        let segmentation = self.segmentation;
        if segmentation && !matches!(self.port_kind(), PortKind::Packet | PortKind::Tap) {
            return Err(
                "--segmentation is for --port packet and --port tap: AF_XDP passes frames \
                        as they are on the wire"
                    .into(),
            );
        }
        let iface =
            || self.iface.clone().ok_or("no interface: give --iface NAME; `ip link` lists them");
        Ok(match self.port_kind() {
            PortKind::Xdp => {
                let mut xdp = XdpConfig::new(iface()?);
                xdp.mode = self.xdp_mode.map(Mode::from).unwrap_or_default();
                xdp.queues = (!self.queue.is_empty()).then(|| self.queue.clone());
                let polls = matches!(gate.mode, gate::Mode::Polled | gate::Mode::Dedicated);
                if gate.mode == gate::Mode::Moderated {
                    // The rings of the kernel are powers of two.
                    let descriptors = gate.descriptors.next_power_of_two();
                    xdp.rings.receive = descriptors;
                    xdp.rings.fill = descriptors;
                }
                xdp.busy_poll = match self.busy_poll {
                    Some(0) => None,
                    // The other modes are about the card's interrupts.
                    _ if !polls => None,
                    Some(budget) => Some(BusyPoll { budget, ..BusyPoll::default() }),
                    None => Some(BusyPoll::default()),
                };
                xdp.into()
            }
            PortKind::Packet => PacketConfig { segmentation, ..PacketConfig::new(iface()?) }.into(),
            PortKind::Tap => TapConfig { segmentation, ..TapConfig::new(iface()?) }.into(),
            PortKind::Kernel => return Err("kernel sockets are no port".into()),
        })
    }

    /// Puts faults next to the wire, then the capture, then the trace, so that
    /// the last two show what the stack sees.
    fn wrap(&self, mut config: NetConfig) -> Result<NetConfig, Failure> {
        if let Some(text) = &self.fault {
            let faults = parse_faults(text)?;
            config = config.wrap(Box::new(move |port| {
                let port = Fault::new(port, faults)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Ok(Box::new(port))
            }));
        }
        if let Some(path) = &self.capture {
            let file =
                File::create(path).map_err(|error| format!("{}: {error}", path.display()))?;
            config = config.wrap(Box::new(move |port| {
                let file = BufWriter::new(file);
                let port =
                    Capture::new(port, file, CaptureConfig::default()).map_err(io::Error::other)?;
                Ok(Box::new(port))
            }));
        }
        if self.trace {
            config = config.wrap(Box::new(|port| Ok(Box::new(Trace::new(port, io::stderr())))));
        }
        Ok(config)
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

/// `loss=0.01,corruption=0.001,seed=7`: the same faults in both directions.
fn parse_faults(text: &str) -> Result<FaultConfig, Failure> {
    let error = |part: &str| {
        format!(
            "--fault {part:?}: expected NAME=PROBABILITY with loss, duplication, reordering or \
             corruption, or seed=NUMBER, separated by commas"
        )
    };
    let (mut faults, mut seed) = (Faults::default(), 0);
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
    Ok(FaultConfig { seed, receive: faults, transmit: faults })
}

pub(crate) fn parse_route(text: &str) -> Result<Route, Failure> {
    let error = || format!("--route {text}: expected PREFIX=GATEWAY, as 10.0.0.0/8=192.0.2.1");
    let (prefix, gateway) = text.split_once('=').ok_or_else(error)?;
    let prefix = prefix.parse().map_err(|_| error())?;
    let gateway = Some(gateway.parse().map_err(|_| error())?);
    Ok(Route { prefix, gateway })
}
