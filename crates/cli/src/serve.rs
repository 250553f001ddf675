//! `tidegate serve`: a server on Tidegate, or on kernel sockets to compare.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use tidegate::{Distribution, Net, ReadersConfig, TcpListener, TcpOptions, UdpSocket};
use tidegate_apps::dns::{self, DnsConfig, ZoneSource};
use tidegate_apps::embedded::serve_both;
use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};
use tidegate_apps::kernel_streams::serve_kernel_streams;
use tidegate_apps::readers::{serve_kernel_readers, serve_readers};
use tidegate_apps::streams::{StreamService, serve_streams};
use tidegate_apps::work::Work;
use tidegate_apps::{MessageLimits, Responder, ServeCounters};

use crate::Failure;
use crate::config::{self, Section};
use crate::control::Control;
use crate::gate::GateOptions;
use crate::guard::be_urgent;
use crate::host::{HostOptions, PortKind, pin_to};
use crate::http::HttpCommand;
use crate::report::ServeReport;

/// The longest datagram on kernel sockets: an echo of a whole Ethernet frame.
const MAX_DATAGRAM_BYTES: usize = 2048;

/// Connections that may wait to be accepted.
const TCP_BACKLOG: usize = 4096;

/// Servers.
#[derive(Subcommand)]
pub(crate) enum Serve {
    /// An authoritative DNS server
    Dns(Box<DnsCommand>),
    /// A UDP or TCP server that sends back what it gets
    Echo(Box<EchoCommand>),
    /// An HTTP/1.1 server for static files, with a small API
    Http(Box<HttpCommand>),
}

/// Flags of `serve dns`.
#[derive(Args)]
pub(crate) struct DnsCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    dns: DnsOptions,
}

/// Flags of `serve echo`.
#[derive(Args)]
pub(crate) struct EchoCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    echo: EchoOptions,
}

#[derive(Args)]
pub(crate) struct Common {
    #[command(flatten)]
    host: HostOptions,
    #[command(flatten)]
    gate: GateOptions,
    /// When not everything can be taken, known sources go before strangers; section
    /// [admission] of the configuration file says more
    #[arg(long, help_heading = "Receive scheduling")]
    admission: bool,
    /// Take what the flags leave open from this TOML file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Threads that read and answer, each with a queue of its own; two and more
    /// need a thread besides that runs the stack, and get it
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Readers")]
    readers: usize,
    /// Keep the readers on these processors, in turn; what runs the stack stays on --cpu
    #[arg(long, value_name = "CPU", value_delimiter = ',', help_heading = "Readers")]
    reader_cpus: Vec<usize>,
    /// Which reader gets a datagram [default: flow]
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Readers")]
    distribution: Option<DistributionName>,
    /// Give each reader a kernel socket of its own on the same address
    /// (SO_REUSEPORT); with --port kernel
    #[arg(long, help_heading = "Readers")]
    reuse_port: bool,
    /// Listen on this Unix socket for `tidegate ctl`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Stop after so many seconds; otherwise at SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,
    /// Print the counters at the end as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep the counters in this file: requests, answers, oversized, unsent, 64 bits each
    #[arg(long, value_name = "FILE")]
    counters: Option<PathBuf>,
}

/// Which reader gets a datagram.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum DistributionName {
    /// The same for all datagrams of one peer
    Flow,
    /// Each in turn
    RoundRobin,
    /// The one with the fewest waiting
    LeastLoaded,
}

impl From<DistributionName> for Distribution {
    fn from(name: DistributionName) -> Self {
        match name {
            DistributionName::Flow => Self::FlowHash,
            DistributionName::RoundRobin => Self::RoundRobin,
            DistributionName::LeastLoaded => Self::LeastLoaded,
        }
    }
}

/// The most threads that may read.
const MOST_READERS: usize = 1024;

/// Section `[dns]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct DnsOptions {
    /// A zone file, as FILE or as ORIGIN=FILE; may be given several times
    #[arg(long, value_name = "[ORIGIN=]FILE")]
    zone: Vec<String>,
    /// The UDP port to serve [default: 53]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// The largest answer in bytes, whatever the client offers [default: 1232]
    #[arg(long, value_name = "BYTES")]
    max_udp_bytes: Option<u16>,
    /// Serve no TCP
    #[arg(long)]
    no_tcp: bool,
    /// TCP connections at the same time; one more ends the longest idle [default: 1024]
    #[arg(long, value_name = "COUNT")]
    tcp_connections: Option<usize>,
    /// TCP connections of one address at the same time [default: 64]
    #[arg(long, value_name = "COUNT")]
    tcp_per_address: Option<usize>,
    /// How long a TCP connection may be idle [default: 10]
    #[arg(long, value_name = "SECONDS")]
    tcp_idle_timeout: Option<u64>,
}

impl DnsOptions {
    /// What TCP connections may cost; `None` when there are none.
    fn streams(&self) -> Option<MessageLimits> {
        let defaults = MessageLimits::default();
        let seconds = |seconds: u64| Duration::from_secs(seconds.max(1));
        (!self.no_tcp).then(|| MessageLimits {
            connections: self.tcp_connections.unwrap_or(defaults.connections).max(1),
            per_address: self.tcp_per_address.unwrap_or(defaults.per_address).max(1),
            idle_timeout: self.tcp_idle_timeout.map_or(defaults.idle_timeout, seconds),
        })
    }
}

impl Section for DnsOptions {
    const NAME: &'static str = "dns";
}

/// Section `[echo]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct EchoOptions {
    /// The port to serve [default: 7]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Work on each datagram for about so long; measured once at the start
    #[arg(long, value_name = "NANOSECONDS")]
    work_ns: Option<u64>,
    /// Answer nothing
    #[arg(long)]
    sink: bool,
    /// Serve TCP instead of UDP
    #[arg(long)]
    tcp: bool,
    /// With --tcp: send bytes as fast as they are taken, and read none
    #[arg(long, conflicts_with = "sink")]
    source: bool,
    /// With --tcp and --port kernel: never sleep
    #[arg(long)]
    spin: bool,
}

impl Section for EchoOptions {
    const NAME: &'static str = "echo";
}

impl Serve {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Serve::Dns(command) => {
                let DnsCommand { common, dns } = *command;
                let options = config::over(dns, common.config.as_deref())?;
                let server = load_zones(&options)?;
                let port = options.listen.unwrap_or(53);
                common.serve("dns", port, server, options.streams())
            }
            Serve::Http(command) => command.run(),
            Serve::Echo(command) => {
                let EchoCommand { common, echo } = *command;
                let options = config::over(echo, common.config.as_deref())?;
                if options.source && !options.tcp {
                    return Err("--source is for streams: give --tcp as well".into());
                }
                if options.tcp {
                    return common.serve_tcp_echo(&options);
                }
                // On the processor that will do the work.
                config::over(common.host.clone(), common.config.as_deref())?.pin()?;
                let began = Instant::now();
                let now_ns = || began.elapsed().as_nanos() as u64;
                let turns = Work::turns_for(options.work_ns.unwrap_or(0), now_ns);
                let work = Work::new(turns, options.sink);
                common.serve("echo", options.listen.unwrap_or(7), work, None)
            }
        }
    }
}

fn load_zones(options: &DnsOptions) -> Result<dns::Server, Failure> {
    if options.zone.is_empty() {
        return Err("no zone to serve: give --zone ORIGIN=FILE".into());
    }
    let mut config = DnsConfig {
        zones: options.zone.iter().map(|zone| zone_source(zone)).collect(),
        hash_seed: RandomState::new().hash_one(std::process::id()),
        ..DnsConfig::default()
    };
    if let Some(bytes) = options.max_udp_bytes {
        config.max_udp_bytes = bytes.into();
    }
    let began = Instant::now();
    let server = dns::Server::load(&config)?;
    for warning in server.warnings() {
        eprintln!("{warning}");
    }
    let (zones, names) = (server.zone_count(), server.name_count());
    eprintln!("loaded {names} names in {zones} zones in {:.2} s", began.elapsed().as_secs_f64());
    Ok(server)
}

/// `ORIGIN=FILE`, or `FILE` alone when the file says its origin itself.
fn zone_source(text: &str) -> ZoneSource {
    match text.split_once('=') {
        Some((origin, path)) => ZoneSource { origin: Some(origin.to_owned()), path: path.into() },
        None => ZoneSource { origin: None, path: text.into() },
    }
}

impl Common {
    /// Section `[host]` and its flags.
    pub(crate) fn host(&self) -> Result<HostOptions, Failure> {
        config::over(self.host.clone(), self.config.as_deref())
    }

    /// A stack and its listeners, for a server of streams that one thread runs.
    pub(crate) fn open_streams(
        self,
        what: &str,
        port: u16,
        options: TcpOptions,
    ) -> Result<StreamServer, Failure> {
        let host = self.host()?;
        let gate = config::over(self.gate, self.config.as_deref())?;
        let settings = gate.settings()?;
        if self.readers > 1 {
            return Err(format!("--readers is for UDP: {what} is served by one thread").into());
        }
        host.pin()?;
        let stop = stop_flag(self.duration)?;
        let mut config = host.net_config(&settings)?;
        let classes = self.config.as_deref().map(config::admission).transpose()?.flatten();
        if self.admission || classes.is_some() {
            be_urgent();
            config = config.admission(classes.unwrap_or_default());
        }
        let net = Net::open(config.own_thread(gate.network_thread()))?;
        let addresses = host.wildcards(port);
        let bind = |&address| TcpListener::bind_with(&net, address, TCP_BACKLOG, options);
        let listeners = addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        let control = self.control.as_deref().map(|path| Control::listen(path, &net));
        let control = control.transpose()?;
        Ok(StreamServer { net, listeners, addresses, stop, _control: control })
    }

    /// Streams on Tidegate, or on kernel sockets to compare.
    fn serve_tcp_echo(self, echo: &EchoOptions) -> Result<(), Failure> {
        let port = echo.listen.unwrap_or(7);
        let service = match echo {
            EchoOptions { source: true, .. } => StreamService::Source,
            EchoOptions { sink: true, .. } => StreamService::Sink,
            _ => StreamService::Echo,
        };
        let json = self.json;
        let served = ServeCounters::new();
        let host = self.host()?;
        if host.port_kind() == PortKind::Kernel {
            host.pin()?;
            let stop = stop_flag(self.duration)?;
            let addresses = host.kernel_addresses(port);
            let ready = || ready("echo", &addresses, "kernel sockets");
            serve_kernel_streams(&addresses, service, echo.spin, &stop, &served, ready)?;
            return ServeReport::kernel("echo", &served).print(json);
        }
        if echo.spin {
            return Err("--spin is for --port kernel: on Tidegate give --mode dedicated".into());
        }
        let options = TcpOptions { no_delay: true, ..TcpOptions::default() };
        let server = self.open_streams("TCP echo", port, options)?;
        server.ready("echo")?;
        let StreamServer { net, listeners, stop, .. } = &server;
        serve_streams(net, listeners, service, stop, &served)?;
        ServeReport::tidegate("echo", &served, net).print(json)
    }

    fn serve(
        self,
        name: &str,
        port: u16,
        mut responder: impl Responder + Clone + Send,
        streams: Option<MessageLimits>,
    ) -> Result<(), Failure> {
        self.check_readers()?;
        let has_reader_threads = self.has_reader_threads();
        let begin = |number| pin_reader(&self.reader_cpus, number);
        let host = config::over(self.host, self.config.as_deref())?;
        let gate = config::over(self.gate, self.config.as_deref())?;
        let settings = gate.settings()?;
        host.pin()?;
        let stop = stop_flag(self.duration)?;
        let own = ServeCounters::new();
        let served = match &self.counters {
            Some(path) => ServeCounters::in_file(path)
                .map_err(|error| format!("{}: {error}", path.display()))?,
            None => &own,
        };
        let report = if host.port_kind() == PortKind::Kernel {
            let addresses = host.kernel_addresses(port);
            let options = KernelOptions { reuse_port: self.reuse_port, ..Default::default() };
            let bind_all = || {
                let bind = |&address| KernelSocket::bind(address, &options);
                addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()
            };
            let sets = if self.reuse_port { self.readers } else { 1 };
            let sets = (0..sets).map(|_| bind_all()).collect::<Result<Vec<_>, _>>()?;
            ready(name, &addresses, "kernel sockets")?;
            if has_reader_threads {
                let responders = vec![responder; self.readers];
                serve_kernel_readers(&sets, responders, MAX_DATAGRAM_BYTES, begin, &stop, served)?;
            } else {
                serve_kernel(&sets[0], &mut responder, MAX_DATAGRAM_BYTES, &stop, served)?;
            }
            ServeReport::kernel(name, served)
        } else {
            let mut config = host.net_config(&settings)?;
            let classes = self.config.as_deref().map(config::admission).transpose()?.flatten();
            if self.admission || classes.is_some() {
                be_urgent();
                config = config.admission(classes.unwrap_or_default());
            }
            let net = Net::open(config.own_thread(gate.network_thread() || has_reader_threads))?;
            let addresses = host.wildcards(port);
            let bind = |&address| UdpSocket::bind_one_family(&net, address);
            let sockets = addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
            let listen = |&address| {
                TcpListener::bind_with(&net, address, TCP_BACKLOG, TcpOptions::default())
            };
            let of_streams = addresses.iter().filter(|_| streams.is_some());
            let listeners = of_streams.map(listen).collect::<Result<Vec<_>, _>>()?;
            let limits = streams.unwrap_or_default();
            let control = self.control.as_deref().map(|path| Control::listen(path, &net));
            let _control = control.transpose()?;
            let capabilities = net.capabilities();
            let path = format!("{} ({})", capabilities.kind, capabilities.detail);
            ready(name, &addresses, &path)?;
            let stop = &*stop;
            if has_reader_threads {
                let distribution = self.distribution.map(Into::into).unwrap_or_default();
                let config = ReadersConfig { distribution, ..ReadersConfig::default() };
                let mut for_streams = responder.clone();
                let readers = vec![responder; self.readers];
                std::thread::scope(|scope| {
                    let (net, listeners) = (&net, &listeners);
                    let streams = (!listeners.is_empty()).then(|| {
                        scope.spawn(move || {
                            let responder = &mut for_streams;
                            serve_both(net, &[], listeners, limits, responder, stop, served)
                        })
                    });
                    let result = serve_readers(&sockets, readers, config, begin, stop, served);
                    // They end together, also by an error.
                    stop.store(true, Ordering::Relaxed);
                    let streams = streams.map_or(Ok(Ok(())), std::thread::ScopedJoinHandle::join);
                    result.and(streams.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                })?;
            } else {
                let responder = &mut responder;
                serve_both(&net, &sockets, &listeners, limits, responder, stop, served)?;
            }
            ServeReport::tidegate(name, served, &net)
        };
        report.print(self.json)
    }
}

impl Common {
    /// Whether readers have threads of their own, which a single one has if it
    /// is told where to run.
    fn has_reader_threads(&self) -> bool {
        self.readers > 1 || !self.reader_cpus.is_empty()
    }

    fn check_readers(&self) -> Result<(), Failure> {
        if self.readers == 0 || self.readers > MOST_READERS {
            return Err(format!("--readers {}: give 1 to {MOST_READERS}", self.readers).into());
        }
        for &cpu in &self.reader_cpus {
            // On a thread of its own, which ends with it.
            let tried = std::thread::spawn(move || {
                pin_to(cpu).map_err(|error| format!("--reader-cpus: {error}"))
            });
            tried.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        let kernel = self.host.port_kind() == PortKind::Kernel;
        if self.reuse_port && !kernel && self.config.is_none() {
            return Err("--reuse-port is for --port kernel: on Tidegate each reader has a queue \
                        of its own without it"
                .into());
        }
        Ok(())
    }
}

/// Takes the calling reader to its processor, if there is a choice of those.
fn pin_reader(cpus: &[usize], number: usize) {
    // Each was tried when the command began.
    if let Some(Err(error)) = cpus.iter().cycle().nth(number).map(|&cpu| pin_to(cpu)) {
        eprintln!("reader {number}: {error}");
    }
}

/// A stack that listens for connections.
pub(crate) struct StreamServer {
    pub(crate) net: Net,
    pub(crate) listeners: Vec<TcpListener>,
    addresses: Vec<SocketAddr>,
    pub(crate) stop: Arc<AtomicBool>,
    _control: Option<Control>,
}

impl StreamServer {
    /// Tells whoever started us that it is served from now on.
    pub(crate) fn ready(&self, name: &str) -> std::io::Result<()> {
        let capabilities = self.net.capabilities();
        let path = format!("{} ({})", capabilities.kind, capabilities.detail);
        ready(name, &self.addresses, &path)
    }
}

/// Tells whoever started us that it is served from now on.
pub(crate) fn ready(name: &str, addresses: &[SocketAddr], path: &str) -> std::io::Result<()> {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready: {name} on {} by {path}", addresses.join(", "))?;
    out.flush()
}

/// Set when the command is to end: by SIGINT, by SIGTERM, or by time.
pub(crate) fn stop_flag(duration: Option<f64>) -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the process at once.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    if let Some(seconds) = duration {
        let limit = Duration::try_from_secs_f64(seconds)
            .map_err(|_| format!("--duration {seconds}: give a number of seconds above 0"))?;
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            stop.store(true, Ordering::Relaxed);
        });
    }
    Ok(stop)
}
