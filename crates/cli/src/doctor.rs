//! `tidegate doctor`: checks of this machine and its interfaces, with a remedy for each deficit.

mod dpdk;

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;
use serde::Serialize;
use tidegate_device::capabilities::{self, RequiredCapabilities};
use tidegate_device::interface_settings::{LeftBehind, restore_left_behind};
use tidegate_device::netlink::{self, Interface};
use tidegate_device::topology::Topology;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{CoreNodes, DaemonReport};

use crate::output::print_line;
use crate::{Failure, numa, run};

/// Recommended minimum of file descriptors per process. Each connection of a daemon or of an
/// attached application takes a descriptor in the application.
const MIN_FILE_DESCRIPTORS: u64 = 16_384;

/// Size of the packet buffers that AF_XDP pins by default, in bytes.
const PINNED_BYTES: u64 = 16 << 20;

/// Flags of `doctor`.
#[derive(Args)]
pub(crate) struct Doctor {
    /// Check only this network interface [default: all]
    #[arg(long, short, value_name = "NAME")]
    iface: Option<String>,
    /// Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

/// Result of one check.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Good,
    /// Works, but not at its best.
    Fair,
    /// Does not work.
    Missing,
}

/// One check and its result.
#[derive(Serialize)]
pub(crate) struct Finding {
    subject: String,
    verdict: Verdict,
    what: String,
    /// Command or change that improves the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn new(subject: &str, verdict: Verdict, what: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), verdict, what: what.into(), remedy: None }
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

impl Doctor {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let findings = match &self.iface {
            Some(name) => findings(&[Interface::by_name(name)?], &self.socket)?,
            None => all_findings(&self.socket)?,
        };
        if self.json {
            print_line!("{}", serde_json::to_string_pretty(&findings)?)?;
            return Ok(());
        }
        for finding in &findings {
            let mark = match finding.verdict {
                Verdict::Good => "ok  ",
                Verdict::Fair => "fair",
                Verdict::Missing => "NO  ",
            };
            print_line!("{mark} {:<12} {}", finding.subject, finding.what)?;
            if let Some(remedy) = &finding.remedy {
                print_line!("     {:<12} -> {remedy}", "")?;
            }
        }
        Ok(())
    }
}

/// Returns the checks of the machine and of every interface.
pub(crate) fn all_findings(socket: &Path) -> Result<Vec<Finding>, Failure> {
    findings(&Interface::all()?, socket)
}

fn findings(interfaces: &[Interface], socket: &Path) -> Result<Vec<Finding>, Failure> {
    let mut findings = machine_findings();
    findings.extend(dpdk::findings());
    findings.extend([library(), daemon(socket)]);
    findings.extend(left_behind());
    for interface in interfaces.iter().filter(|interface| !interface.loopback) {
        check_interface(interface, &mut findings)?;
    }
    Ok(findings)
}

/// Returns the checks that do not depend on an interface.
fn machine_findings() -> Vec<Finding> {
    let mut findings = vec![kernel()];
    findings.extend(privileges());
    findings.extend([locked_memory(), hugepages(), cpus(), nodes(), file_descriptors()]);
    findings
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 11) {
        Finding::new("kernel", Verdict::Good, format!("Linux {release}: AF_XDP and busy polling"))
    } else {
        Finding::new("kernel", Verdict::Missing, format!("Linux {release} is too old for --io xdp"))
            .remedy("use --io packet, or Linux 5.11 or newer")
    }
}

/// Checks the capabilities for each kind of packet I/O.
fn privileges() -> Vec<Finding> {
    let kinds =
        [RequiredCapabilities::XDP, RequiredCapabilities::PACKET, RequiredCapabilities::TAP];
    let finding = |required: RequiredCapabilities| {
        let (user, missing) = (required.user, required.missing());
        if missing.is_empty() {
            return Finding::new("privileges", Verdict::Good, format!("sufficient for {user}"));
        }
        let what = format!("{user} lacks {}", capabilities::names(missing));
        Finding::new("privileges", Verdict::Missing, what).remedy(format!(
            "sudo tidegate ..., or: sudo setcap {}+ep $(command -v tidegate); without either: \
             unshare -rn, then --io packet or tap",
            capabilities::file_capabilities(required.set)
        ))
    };
    kinds.map(finding).into()
}

/// Checks the limit of the memory that AF_XDP pins.
fn locked_memory() -> Finding {
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let may_exceed = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if may_exceed || limit >= PINNED_BYTES {
        return Finding::new("memory", Verdict::Good, "AF_XDP can pin its packet buffers");
    }
    let (limit, wanted) = (limit >> 10, PINNED_BYTES >> 10);
    let what = format!("{limit} KiB may be pinned: AF_XDP pins {wanted} KiB");
    Finding::new("memory", Verdict::Fair, what)
        .remedy("ulimit -l unlimited, or add cap_ipc_lock to the capabilities, or use --frames")
}

fn hugepages() -> Finding {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    match free {
        Some(pages) if pages > 0 => {
            Finding::new("hugepages", Verdict::Good, format!("{pages} free, 2 MiB each"))
        }
        Some(_) => Finding::new("hugepages", Verdict::Fair, "none free: ordinary pages are used")
            .remedy("echo 64 | sudo tee /proc/sys/vm/nr_hugepages"),
        None => {
            Finding::new("hugepages", Verdict::Fair, "not supported here: ordinary pages are used")
        }
    }
}

fn cpus() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    if count > 1 {
        Finding::new(
            "processors",
            Verdict::Good,
            format!("{count}: pin Tidegate to one of them with --cpu"),
        )
    } else {
        Finding::new("processors", Verdict::Fair, "one: Tidegate shares it with all applications")
    }
}

fn nodes() -> Finding {
    let topology = Topology::of_machine();
    let what = match topology.nodes().len() {
        0 | 1 => "one node: all memory is local".to_owned(),
        count => format!("{count} nodes: cores and packet memory are put on that of the card"),
    };
    Finding::new("NUMA", Verdict::Good, what)
}

/// Node of an interface's card, on a machine with several.
fn node_of_card(interface: &Interface, topology: &Topology) -> Option<Finding> {
    if !numa::has_several_nodes(topology) {
        return None;
    }
    let name = &interface.name;
    let Some(node) = topology.node_of_interface(name) else {
        let what = "the NUMA node of the card is unknown: memory is on the node of each core";
        return Some(Finding::new(name, Verdict::Fair, what));
    };
    let number = node.number;
    let has_elsewhere = topology.nodes().iter().any(|node| node.free_hugepages > Some(0));
    Some(match node.free_hugepages {
        Some(0) if has_elsewhere => {
            let what = format!("the card is on NUMA node {number}, all hugepages on other nodes");
            Finding::new(name, Verdict::Fair, what).remedy(format!(
                "echo 64 | sudo tee /sys/devices/system/node/node{number}/hugepages/\
                 hugepages-2048kB/nr_hugepages"
            ))
        }
        _ => Finding::new(name, Verdict::Good, format!("the card is on NUMA node {number}")),
    })
}

fn file_descriptors() -> Finding {
    let limits = getrlimit(Resource::Nofile);
    let (soft, hard) = (limits.current.unwrap_or(u64::MAX), limits.maximum.unwrap_or(u64::MAX));
    let what = format!("limit of {soft} file descriptors per process, one for each socket");
    if soft >= MIN_FILE_DESCRIPTORS {
        Finding::new("files", Verdict::Good, what)
    } else if hard > soft {
        Finding::new("files", Verdict::Fair, what).remedy(format!("ulimit -n {hard}"))
    } else {
        Finding::new("files", Verdict::Fair, what).remedy(
            "set LimitNOFILE=1048576 in the systemd unit, or edit /etc/security/limits.conf",
        )
    }
}

/// Restores settings of interfaces that killed processes left changed.
fn left_behind() -> Vec<Finding> {
    let found = restore_left_behind().into_iter().map(|LeftBehind { interface, is_restored }| {
        let what = "a killed process had left interrupts deferred, or GRO limited";
        if is_restored {
            Finding::new(&interface, Verdict::Good, format!("{what}: restored now"))
        } else {
            Finding::new(&interface, Verdict::Fair, what).remedy("sudo tidegate doctor")
        }
    });
    found.collect()
}

/// Checks for the preload library of `tidegate run`.
fn library() -> Finding {
    match run::library() {
        Ok(path) => {
            let what = format!("{} found for `tidegate run`", path.display());
            Finding::new("library", Verdict::Good, what)
        }
        Err(why) => Finding::new("library", Verdict::Missing, why.to_string()).remedy("make build"),
    }
}

fn daemon(socket: &Path) -> Finding {
    let path = socket.display();
    match DaemonReport::query(socket) {
        Ok(report) => {
            let what = format!(
                "at {path}: {} applications, {} connections{}",
                report.applications.len(),
                report.connections,
                remote_cores(&report)
            );
            Finding::new("daemon", Verdict::Good, what)
        }
        Err(error) if is_no_daemon(&error) => {
            Finding::new("daemon", Verdict::Fair, format!("no daemon at {path}"))
                .remedy("sudo tidegate daemon --iface NAME --address ADDRESS/PREFIX")
        }
        Err(error) => Finding::new("daemon", Verdict::Missing, format!("at {path}: {error}")),
    }
}

/// Network cores of a daemon that are not on the node of their card or of their memory.
fn remote_cores(report: &DaemonReport) -> String {
    let nodes = report.cores.iter().map(|core| core.nodes).enumerate();
    let differ = |a: Option<usize>, b: Option<usize>| a.zip(b).is_some_and(|(a, b)| a != b);
    let is_remote = |CoreNodes { processor, memory, device }| {
        differ(processor, device) || differ(processor, memory)
    };
    let remote = nodes.filter(|(_, nodes)| is_remote(*nodes)).map(|(core, nodes)| {
        let name = |node: Option<usize>| node.map_or("?".to_owned(), |node| node.to_string());
        format!(
            "; core {core} runs on NUMA node {}, its memory is on {}, the card on {}",
            name(nodes.processor),
            name(nodes.memory),
            name(nodes.device)
        )
    });
    remote.collect()
}

fn is_no_daemon(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn check_interface(interface: &Interface, findings: &mut Vec<Finding>) -> Result<(), Failure> {
    let name = &interface.name;
    let kind = interface.kind.as_deref().unwrap_or("device");
    if !interface.up || !interface.carrier {
        let what = if interface.up { "has no link" } else { "is down" };
        findings.push(
            Finding::new(name, Verdict::Missing, format!("{kind} {what}"))
                .remedy(format!("ip link set dev {name} up")),
        );
    }
    if interface.medium != Some(tidegate_device::Medium::Ethernet) {
        findings.push(Finding::new(name, Verdict::Missing, "is not an Ethernet interface"));
        return Ok(());
    }
    let addresses = netlink::addresses(interface.index)?;
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let what = if addresses.is_empty() {
        "no kernel address on this interface: use --address".to_owned()
    } else {
        format!("--shared would serve these addresses: {}", addresses.join(", "))
    };
    findings.push(Finding::new(name, Verdict::Good, what));
    findings.push(driver(interface, kind));
    findings.extend(node_of_card(interface, &Topology::of_machine()));
    if interface.has_local_peers() {
        let what = format!(
            "{kind}: unfilled checksums and unsegmented TCP of senders on this machine are accepted"
        );
        findings.push(Finding::new(name, Verdict::Good, what));
    }
    if interface.mtu > 1500 {
        let what =
            format!("MTU {}: frames over 1774 bytes do not fit in 2 KiB buffers", interface.mtu);
        findings.push(
            Finding::new(name, Verdict::Fair, what)
                .remedy(format!("ip link set dev {name} mtu 1500")),
        );
    }
    Ok(())
}

/// Reports the known XDP support of the driver. A query of the driver itself would need to
/// attach an XDP program, which this command must not do to a device in use.
fn driver(interface: &Interface, kind: &str) -> Finding {
    const NATIVE: [&str; 25] = [
        "veth",
        "tun",
        "virtio_net",
        "ixgbe",
        "ixgbevf",
        "i40e",
        "ice",
        "igb",
        "igc",
        "iavf",
        "mlx4_en",
        "mlx5_core",
        "bnxt_en",
        "ena",
        "gve",
        "sfc",
        "qede",
        "nfp",
        "thunder-nic",
        "stmmac",
        "dpaa2",
        "mvneta",
        "bonding",
        "hv_netvsc",
        "vmxnet3",
    ];
    let name = &interface.name;
    let link = Path::new("/sys/class/net").join(name).join("device/driver");
    let driver = std::fs::read_link(link).ok();
    let driver = driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    let driver = driver.unwrap_or(kind);
    let queues = interface.receive_queues;
    if NATIVE.contains(&driver) {
        Finding::new(
            name,
            Verdict::Good,
            format!("driver {driver}: native XDP, up to {queues} queues"),
        )
    } else {
        let what = format!("driver {driver}: not known to have native XDP; generic mode works");
        Finding::new(name, Verdict::Fair, what)
            .remedy(format!("tidegate daemon ... --iface {name} --xdp-mode generic"))
    }
}
