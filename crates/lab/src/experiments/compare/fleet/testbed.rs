//! Testbed of a fleet: clients, an attacker, a router with BIRD, and servers that announce the same
//! addresses to it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::error::LabError;
use crate::testbed::dns::ZoneFile;
use crate::testbed::folder;
use crate::testbed::netns::{Namespace, VethEnd, run_to_end};
use crate::testbed::process::{ServerProcess, log_to};
use crate::testbed::programs;

/// Number of servers.
pub(super) const SERVERS: usize = 3;
/// Addresses of the service, one of each family.
pub(super) const SERVICE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 53);
pub(super) const SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);
/// Source addresses of the clients, of each family.
const CLIENT_SOURCES: u16 = 8;
/// Network of the attacker's sources, to which the router sends nothing.
const ATTACKER_NETWORK: &str = "198.18.0.0/15";
/// Numbers of the networks behind the router: the attacker's, the clients', then the servers'.
const ATTACKER_NETWORK_NUMBER: u8 = 0;
const CLIENT_NETWORK_NUMBER: u8 = 1;
const FIRST_SERVER_NETWORK: u8 = 2;

/// Limit of the wait for routes.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(60);

/// Service that the servers run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FleetService {
    /// `tidegate serve dns`, UDP and TCP.
    Dns,
    /// `tidegate serve echo` with this work for each datagram, and admission control.
    Echo { work_ns: u64 },
}

impl FleetService {
    pub(super) fn port(self) -> u16 {
        match self {
            Self::Dns => 53,
            Self::Echo { .. } => 7,
        }
    }

    /// Addresses of the service with its port.
    pub(super) fn targets(self) -> Vec<SocketAddr> {
        let addresses = [IpAddr::V4(SERVICE_V4), IpAddr::V6(SERVICE_V6)];
        addresses.map(|address| SocketAddr::new(address, self.port())).to_vec()
    }
}

/// The fleet. Its processes end on drop, before their namespaces.
pub(super) struct Fleet {
    pub(super) members: Vec<Member>,
    router_daemon: Option<ServerProcess>,
    service: FleetService,
    pub(super) client: Namespace,
    /// Device of the attacker, behind the router.
    pub(super) attacker: VethEnd,
    /// Hardware address of the router on the attacker's link.
    pub(super) attacker_gateway: [u8; 6],
    router: Namespace,
    zone: ZoneFile,
    folder: TempDir,
    server_core: usize,
    router_core: usize,
}

/// A server of the fleet.
pub(super) struct Member {
    announcer: Option<ServerProcess>,
    server: Option<ServerProcess>,
    daemon: Option<ServerProcess>,
    namespace: Namespace,
    device: String,
    network: u8,
    /// Control socket of the server.
    control: PathBuf,
    /// Socket for `tidegate drain`.
    socket: PathBuf,
    /// File with the counters of the server.
    pub(super) counters: PathBuf,
    bird: PathBuf,
    log: PathBuf,
}

fn address_v4(network: u8, end: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 80, network, end)
}

fn address_v6(network: u8, end: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd80, network.into(), 0, 0, 0, 0, 0, end.into())
}

/// Ends of a network's addresses: the router, the kernel of a server, its stack, the first client.
const ROUTER_END: u8 = 1;
const KERNEL_END: u8 = 2;
const STACK_END: u8 = 3;
const FIRST_CLIENT_END: u8 = 10;

impl Member {
    /// Address of this server alone.
    pub(super) fn own_address(&self) -> Ipv4Addr {
        address_v4(self.network, STACK_END)
    }
}

/// Addresses of the clients.
pub(super) fn client_sources() -> Vec<IpAddr> {
    let ends = (0..CLIENT_SOURCES).map(|number| FIRST_CLIENT_END + number as u8);
    ends.flat_map(|end| {
        let network = CLIENT_NETWORK_NUMBER;
        [IpAddr::V4(address_v4(network, end)), IpAddr::V6(address_v6(network, end))]
    })
    .collect()
}

impl Fleet {
    /// Starts the router and the servers, and waits until the router has a route to each.
    pub(super) fn start(
        service: FleetService,
        server_core: usize,
        router_core: usize,
    ) -> Result<Self, LabError> {
        let (router, client) = (create_namespace("router")?, create_namespace("client")?);
        let attacker = create_namespace("attacker")?;
        let folder = folder::readable()?;
        let zone = ZoneFile::write(1000)?;
        prepare_router(&router)?;
        connect(&router, &client, "client", CLIENT_NETWORK_NUMBER)?;
        for source in client_sources() {
            add_address(&client, "client", source)?;
        }
        connect(&router, &attacker, "attacker", ATTACKER_NETWORK_NUMBER)?;
        // A flood needs a NAPI context at the other end of its link, which GRO gives a veth.
        set_offloads(&router, "r-attacker", &["gro", "on"])?;
        let attacker = VethEnd { mac: [0; 6], device: "attacker".to_owned(), namespace: attacker };
        let attacker_gateway = hardware_address(&router, "r-attacker")?;
        let mut fleet = Self {
            members: Vec::new(),
            router_daemon: None,
            service,
            client,
            attacker,
            attacker_gateway,
            router,
            zone,
            folder,
            server_core,
            router_core,
        };
        let mut sessions = String::new();
        for number in 0..SERVERS {
            let member = fleet.create_member(number)?;
            sessions += &router_session(number, member.network);
            fleet.members.push(member);
        }
        fleet.start_router(&sessions)?;
        for number in 0..SERVERS {
            fleet.start_routing(number)?;
            fleet.start_server(number)?;
            fleet.start_announcer(number)?;
        }
        fleet.wait_for_routes(SERVERS)?;
        Ok(fleet)
    }

    fn create_member(&self, number: usize) -> Result<Member, LabError> {
        let namespace = create_namespace(&format!("server{number}"))?;
        let network = FIRST_SERVER_NETWORK + number as u8;
        let device = format!("server{number}");
        connect(&self.router, &namespace, &device, network)?;
        for address in kernel_addresses(network) {
            add_address(&namespace, &device, address)?;
        }
        let file = |name: &str| self.folder.path().join(format!("{name}{number}"));
        Ok(Member {
            announcer: None,
            server: None,
            daemon: None,
            namespace,
            device,
            network,
            control: file("control"),
            socket: file("announce"),
            counters: file("counters"),
            bird: file("bird"),
            log: file("log"),
        })
    }

    fn start_router(&mut self, sessions: &str) -> Result<(), LabError> {
        let config = format!(
            "router id {};\nprotocol device {{}}\n\
             protocol kernel {{ ipv4 {{ import none; export all; }}; merge paths on; }}\n\
             protocol kernel {{ ipv6 {{ import none; export all; }}; merge paths on; }}\n{sessions}",
            address_v4(CLIENT_NETWORK_NUMBER, ROUTER_END)
        );
        let control = self.folder.path().join("router");
        let daemon = start_bird(&self.router, self.router_core, &control, &config)?;
        self.router_daemon = Some(daemon);
        Ok(())
    }

    /// Starts BIRD on a server, with the lines that `tidegate announce --example` prints.
    fn start_routing(&mut self, number: usize) -> Result<(), LabError> {
        let member = &mut self.members[number];
        let mut example = Command::new(programs::tidegate()?);
        example.args(["announce", "--to", "bird", "--example"]);
        example.args(["--address", &SERVICE_V4.to_string()]);
        example.args(["--address", &SERVICE_V6.to_string()]);
        let example = run_to_end(&mut example, "tidegate")?;
        let config = member_config(member.network, &example);
        member.daemon =
            Some(start_bird(&member.namespace, self.server_core, &member.bird, &config)?);
        Ok(())
    }

    /// Starts the server of a member.
    pub(super) fn start_server(&mut self, number: usize) -> Result<(), LabError> {
        let member = &mut self.members[number];
        let mut command =
            log_to(member.namespace.command_on_core(self.server_core, "sh"), &member.log);
        command.arg(programs::tidegate()?).arg("serve");
        match self.service {
            FleetService::Dns => {
                let zone = format!("{}={}", self.zone.origin(), self.zone.path().display());
                command.args(["dns", "--rate-limit", "0", "--zone", &zone]);
            }
            FleetService::Echo { work_ns } => {
                command.args(["echo", "--work-ns", &work_ns.to_string(), "--admission"]);
            }
        }
        command.args(["--iface", &member.device, "--json", "--frames", "4096"]);
        for (address, bits) in stack_addresses(member.network) {
            command.args(["--address", &format!("{address}/{bits}")]);
        }
        command.args(["--gateway", &address_v4(member.network, ROUTER_END).to_string()]);
        command.args(["--gateway", &address_v6(member.network, ROUTER_END).to_string()]);
        command.arg("--control").arg(&member.control).arg("--counters").arg(&member.counters);
        member.server = Some(ServerProcess::start_logged("server", &mut command, &member.log)?);
        Ok(())
    }

    /// Starts the announcer of a member.
    pub(super) fn start_announcer(&mut self, number: usize) -> Result<(), LabError> {
        let port = self.service.port();
        let check = match self.service {
            FleetService::Dns => format!("dns:{}", self.zone.origin()),
            // The echo server has no TCP port: its answer to a query is the query.
            FleetService::Echo { .. } => format!("udp:{port}"),
        };
        let member = &mut self.members[number];
        let mut command =
            log_to(member.namespace.command_on_core(self.server_core, "sh"), &member.log);
        command.arg(programs::tidegate()?).args(["announce", "--to", "bird", "--bird"]);
        command.arg(&member.bird).args(["--check", &check, "--interval", "0.2", "--rise", "2"]);
        for address in [IpAddr::V4(SERVICE_V4), IpAddr::V6(SERVICE_V6)] {
            command.args(["--address", &address.to_string()]);
        }
        command.arg("--control").arg(&member.control).arg("--socket").arg(&member.socket);
        member.announcer =
            Some(ServerProcess::start_logged("announce", &mut command, &member.log)?);
        Ok(())
    }

    /// Kills the server of a member by SIGKILL.
    pub(super) fn kill_server(&mut self, number: usize) {
        kill(self.members[number].server.take());
    }

    /// Kills the announcer of a member by SIGKILL.
    pub(super) fn kill_announcer(&mut self, number: usize) {
        kill(self.members[number].announcer.take());
    }

    /// Withdraws the addresses of a member, or announces them again.
    pub(super) fn drain(&self, number: usize, undo: bool) -> Result<(), LabError> {
        let mut command = Command::new(programs::tidegate()?);
        command.args(["drain", "--wait", "0", "--socket"]).arg(&self.members[number].socket);
        if undo {
            command.arg("--undo");
        }
        run_to_end(&mut command, "tidegate").map(drop)
    }

    /// Waits until the router has this many routes to the service in each family.
    pub(super) fn wait_for_routes(&mut self, count: usize) -> Result<(), LabError> {
        let began = Instant::now();
        loop {
            let routes = [
                self.route_count("-4", SERVICE_V4.into())?,
                self.route_count("-6", SERVICE_V6.into())?,
            ];
            if routes == [count, count] {
                return Ok(());
            }
            if began.elapsed() > ROUTE_TIMEOUT {
                let log = fs::read_to_string(&self.members[0].log).unwrap_or_default();
                return Err(LabError::Config(format!(
                    "the router has {routes:?} routes to the service, not {count}; log of the first \
                     server: {log}"
                )));
            }
            for member in &mut self.members {
                let processes = [&mut member.daemon, &mut member.server, &mut member.announcer];
                processes.into_iter().flatten().try_for_each(ServerProcess::check_running)?;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn route_count(&self, family: &str, address: IpAddr) -> Result<usize, LabError> {
        let text = self.router.ip(&[family, "route", "show", &address.to_string()])?;
        Ok(text.split_whitespace().filter(|word| *word == "via").count())
    }

    /// Queries in dnsperf's format.
    pub(super) fn write_queries(&self) -> Result<PathBuf, LabError> {
        self.zone.write_queries(self.folder.path())
    }

    /// The zone of the servers.
    pub(super) fn zone(&self) -> &ZoneFile {
        &self.zone
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for member in &mut self.members {
            // In this order nothing is announced that is gone.
            member.announcer = None;
            member.server = None;
            member.daemon = None;
        }
        self.router_daemon = None;
    }
}

fn kill(process: Option<ServerProcess>) {
    let Some(process) = process else { return };
    // The process is reaped on drop, so the id is still valid.
    if let Some(pid) = Pid::from_raw(process.pid() as i32) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Creates a namespace whose devices use their link-local addresses at once. While such an address
/// is still checked for duplicates, a host sends no neighbour solicitation and holds the packets.
fn create_namespace(name: &str) -> Result<Namespace, LabError> {
    let namespace = Namespace::new(name)?;
    let setting = "net.ipv6.conf.default.accept_dad=0";
    run_to_end(namespace.command("sysctl").args(["-qw", setting]), "procps")?;
    Ok(namespace)
}

fn prepare_router(router: &Namespace) -> Result<(), LabError> {
    let settings = [
        "net.ipv4.ip_forward=1",
        "net.ipv6.conf.all.forwarding=1",
        "net.ipv4.conf.all.rp_filter=0",
        "net.ipv4.conf.default.rp_filter=0",
        // By the ports too.
        "net.ipv4.fib_multipath_hash_policy=1",
        "net.ipv6.fib_multipath_hash_policy=1",
    ];
    run_to_end(router.command("sysctl").arg("-qw").args(settings), "procps")?;
    router.ip(&["route", "add", "blackhole", ATTACKER_NETWORK]).map(drop)
}

/// Connects a namespace to the router: its device is `device`, the router's has `r-` before it.
fn connect(
    router: &Namespace,
    namespace: &Namespace,
    device: &str,
    network: u8,
) -> Result<(), LabError> {
    let peer = format!("r-{device}");
    let netns = namespace.name();
    router.ip(&["link", "add", &peer, "type", "veth", "peer", "name", device, "netns", netns])?;
    for (end, name) in [(router, peer.as_str()), (namespace, device)] {
        set_offloads(end, name, &["tx", "off", "tso", "off", "gso", "off", "gro", "off"])?;
        end.ip(&["link", "set", name, "up"])?;
    }
    let (router_v4, router_v6) = (address_v4(network, ROUTER_END), address_v6(network, ROUTER_END));
    add_address(router, &peer, router_v4.into())?;
    add_address(router, &peer, router_v6.into())?;
    // Routes of the kernel's own stack behind the router; they need an address first.
    let first = if network >= FIRST_SERVER_NETWORK { KERNEL_END } else { FIRST_CLIENT_END };
    if network != ATTACKER_NETWORK_NUMBER {
        add_address(namespace, device, address_v4(network, first).into())?;
        add_address(namespace, device, address_v6(network, first).into())?;
        namespace.ip(&["route", "add", "default", "via", &router_v4.to_string()])?;
        namespace.ip(&["-6", "route", "add", "default", "via", &router_v6.to_string()])?;
    }
    Ok(())
}

fn set_offloads(namespace: &Namespace, device: &str, features: &[&str]) -> Result<(), LabError> {
    let mut command = namespace.command("ethtool");
    run_to_end(command.args(["-K", device]).args(features), "ethtool").map(drop)
}

/// Adds an address with the prefix length of its network; one that exists stays.
fn add_address(namespace: &Namespace, device: &str, address: IpAddr) -> Result<(), LabError> {
    let (bits, nodad): (u8, &[&str]) = if address.is_ipv4() { (24, &[]) } else { (64, &["nodad"]) };
    let text = format!("{address}/{bits}");
    let arguments = [&["addr", "replace", text.as_str(), "dev", device], nodad].concat();
    namespace.ip(&arguments).map(drop)
}

fn kernel_addresses(network: u8) -> [IpAddr; 2] {
    [address_v4(network, KERNEL_END).into(), address_v6(network, KERNEL_END).into()]
}

/// Addresses of a server's stack, with the lengths of their prefixes.
fn stack_addresses(network: u8) -> [(IpAddr, u8); 4] {
    [
        (address_v4(network, STACK_END).into(), 24),
        (address_v6(network, STACK_END).into(), 64),
        (SERVICE_V4.into(), 32),
        (SERVICE_V6.into(), 128),
    ]
}

fn hardware_address(namespace: &Namespace, device: &str) -> Result<[u8; 6], LabError> {
    let path = format!("/sys/class/net/{device}/address");
    let text = namespace.enter(|| fs::read_to_string(&path))?.map_err(LabError::file(&path))?;
    let address: tidegate_wire::MacAddr = text
        .trim()
        .parse()
        .map_err(|_| LabError::Config(format!("{path} contains {text:?}, no hardware address")))?;
    Ok(address.0)
}

/// Configuration of the router for one server.
fn router_session(number: usize, network: u8) -> String {
    let (own, server) = (address_v4(network, ROUTER_END), address_v4(network, KERNEL_END));
    format!(
        "protocol bgp server{number} {{\n  local {own} as 65000;\n  neighbor {server} as 65001;\n  \
         connect delay time 1;\n  connect retry time 1;\n  error wait time 1, 2;\n  \
         ipv4 {{ import all; export none; }};\n  ipv6 {{ import all; export none; }};\n}}\n"
    )
}

/// Configuration of a server's BIRD.
fn member_config(network: u8, protocols: &str) -> String {
    let (own, router) = (address_v4(network, KERNEL_END), address_v4(network, ROUTER_END));
    let next_hop = address_v6(network, KERNEL_END);
    format!(
        "router id {own};\nprotocol device {{}}\n{protocols}\
         protocol bgp uplink {{\n  local {own} as 65001;\n  neighbor {router} as 65000;\n  \
         connect delay time 1;\n  connect retry time 1;\n  error wait time 1, 2;\n  \
         ipv4 {{ import none; export where source = RTS_STATIC; }};\n  \
         ipv6 {{ import none; export where source = RTS_STATIC; next hop address {next_hop}; }};\n}}\n"
    )
}

/// Starts BIRD in the foreground, with its control socket at `control`.
fn start_bird(
    namespace: &Namespace,
    core: usize,
    control: &Path,
    config: &str,
) -> Result<ServerProcess, LabError> {
    let file = control.with_extension("conf");
    fs::write(&file, config).map_err(LabError::file(&file))?;
    let mut command = namespace.command_on_core(core, "bird");
    command.arg("-f").arg("-c").arg(&file).arg("-s").arg(control);
    command.arg("-P").arg(control.with_extension("pid"));
    let mut bird = ServerProcess::start("bird", &mut command)?;
    bird.wait_until(|| std::os::unix::net::UnixStream::connect(control).is_ok())?;
    Ok(bird)
}
