//! Common part of all servers: their flags, and their setup on Tidegate or on kernel sockets.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use clap::Args;
use clap::builder::TypedValueParser;
use tidegate::{
    Distribution, Limits, Net, NetConfig, ReadersConfig, TcpListener, TcpOptions, UdpOptions,
    UdpSocket,
};
use tidegate_apps::embedded::serve_udp_and_tcp;
use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};
use tidegate_apps::readers::{serve_kernel_readers, serve_readers};
use tidegate_apps::{
    DurationCounts, KernelBusyPoll, MessageLimits, Responder, ServeCounters, ServeState,
};

use crate::Failure;
use crate::choices::choices;
use crate::config;
use crate::control::{ControlSocket, NetCores};
use crate::core_placement::{check_cores, check_cpus, pin_thread, run_on_cores};
use crate::gate::GateOptions;
use crate::host::{HostOptions, IoKind};
use crate::metrics::{MetricsOption, NetSource, Readings, add_requests, add_service_times};
use crate::process::{ServerThreads, Startup, announce_server, raise_priority};
use crate::reload::{NetSettings, ReloadPart};
use crate::report::ServeReport;
use crate::sandbox::{Obstacle, UserOption};

/// Maximum datagram size on kernel sockets, in bytes: an echo of a whole Ethernet frame.
const MAX_DATAGRAM_BYTES: usize = 2048;

/// Maximum number of connections that wait to be accepted.
const TCP_BACKLOG: usize = 4096;

#[derive(Args)]
pub(crate) struct ServerOptions {
    #[command(flatten)]
    host: HostOptions,
    #[command(flatten)]
    gate: GateOptions,
    /// Admission control: under overload, known sources take precedence; section [admission] of
    /// the configuration file defines the classes
    #[arg(long, help_heading = "Receive scheduling")]
    admission: bool,
    /// Configuration file (TOML). Flags take precedence
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Number of network cores: threads with a stack of their own each, and a receive queue of their
    /// own if the device has as many
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Network cores")]
    pub(crate) cores: usize,
    /// Pin the network cores to these processors, round-robin
    #[arg(long, value_name = "CPU", value_delimiter = ',', help_heading = "Network cores")]
    core_cpus: Vec<usize>,
    /// Number of reader threads, each with its own receive queue; two or more add a thread that
    /// runs the stack
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Readers")]
    readers: usize,
    /// Pin the readers to these processors, round-robin; the stack stays on --cpu
    #[arg(long, value_name = "CPU", value_delimiter = ',', help_heading = "Readers")]
    reader_cpus: Vec<usize>,
    /// Distribution of datagrams among the readers [default: flow]
    #[arg(
        long,
        value_parser = distributions(),
        value_name = "POLICY",
        help_heading = "Readers"
    )]
    distribution: Option<Distribution>,
    /// Give each reader its own kernel socket on the same address (SO_REUSEPORT); with
    /// --io kernel
    #[arg(long, help_heading = "Readers")]
    reuse_port: bool,
    /// Poll the device in the server's own calls instead of softirqs, always or until it is idle;
    /// with --io kernel
    #[arg(
        long,
        value_name = "WHEN",
        value_parser = busy_polls(),
        default_value = "off",
        default_missing_value = "always",
        num_args = 0..=1,
        require_equals = true
    )]
    pub(crate) kernel_busy_poll: KernelBusyPoll,
    /// Receive buffer of each socket in bytes (SO_RCVBUF); with --io kernel, for datagrams
    /// [default: 8388608]
    #[arg(long, value_name = "BYTES")]
    kernel_receive_buffer: Option<usize>,
    #[command(flatten)]
    pub(crate) user: UserOption,
    /// Listen on this Unix socket for `tidegate ctl`, `capture`, `trace`, `ss` and `top`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsOption,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,
    /// Print the final counters as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep the counters in this file, 64 bits each: requests, answers, oversized, unsent
    #[arg(long, value_name = "FILE")]
    counters: Option<PathBuf>,
}

/// Distributions of datagrams among the readers, by name.
fn distributions() -> impl TypedValueParser<Value = Distribution> {
    choices([
        ("flow", Distribution::FlowHash, "All datagrams of one peer to the same reader"),
        ("round-robin", Distribution::RoundRobin, "Round-robin"),
        ("least-loaded", Distribution::LeastLoaded, "The reader with the fewest waiting datagrams"),
    ])
}

/// Ways to busy-poll for kernel sockets, by name.
fn busy_polls() -> impl TypedValueParser<Value = KernelBusyPoll> {
    choices([
        ("off", KernelBusyPoll::Off, "Softirqs receive"),
        (
            "always",
            KernelBusyPoll::Always,
            "The server polls and never sleeps (SO_PREFER_BUSY_POLL)",
        ),
        (
            "until-idle",
            KernelBusyPoll::UntilIdle,
            "The server polls, and sleeps 50 us after the last packet",
        ),
    ])
}

/// Returns the port to serve, `default` if none is given.
///
/// # Errors
/// For port 0: a server needs a port that clients know.
pub(crate) fn nonzero_port(port: Option<u16>, default: u16) -> Result<u16, Failure> {
    match port {
        Some(0) => Err("--listen 0: give the port that clients use, from 1 to 65535".into()),
        port => Ok(port.unwrap_or(default)),
    }
}

/// Returns a secret number. The standard library seeds `RandomState` from system randomness.
pub(super) fn random_u64() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// Returns a secret key.
pub(super) fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random_u64().to_le_bytes());
    bytes[8..].copy_from_slice(&random_u64().to_le_bytes());
    bytes
}

/// Server at work.
struct ServerRun<'a> {
    /// Name in the ready line and in the report.
    name: &'a str,
    /// Addresses that the server binds.
    addresses: &'a [SocketAddr],
    startup: Startup,
    /// Parts that SIGHUP reloads.
    reload: Vec<ReloadPart>,
    /// Counters of requests and replies.
    served: &'static ServeCounters,
    /// Service times of datagrams, if metrics show them.
    durations: Option<&'static DurationCounts>,
    /// Metrics of the service.
    readings: ServiceReadings,
    /// Name of the network interface.
    device: String,
}

type ServiceReadings = Box<dyn Fn(&mut Readings) + Send + Sync>;

/// Maximum number of reader threads.
const MAX_READERS: usize = 1024;

impl ServerOptions {
    /// Returns section `[host]` of the file, overridden by its flags.
    pub(crate) fn host_options(&self) -> Result<HostOptions, Failure> {
        config::merge_file(self.host.clone(), self.config.as_deref())
    }

    /// Opens the stacks and their listeners, for a stream server with a thread for each.
    pub(crate) fn open_stream_server(
        self,
        service: &str,
        port: u16,
        options: TcpOptions,
        limits: Limits,
    ) -> Result<StreamServer, Failure> {
        let host = self.host_options()?;
        let gate = config::merge_file(self.gate.clone(), self.config.as_deref())?;
        let settings = gate.settings()?;
        let startup = self.startup(&host)?;
        self.check_threads()?;
        if self.readers > 1 {
            let advice = "give --cores instead";
            return Err(format!("--readers is for UDP: for {service} {advice}").into());
        }
        host.pin()?;
        let config = self.with_classes(host.net_config(&settings)?.limits(limits))?;
        let config = startup.sandbox.confine(config, &host)?;
        let nets = Net::open_cores(config.own_thread(gate.network_thread()), self.cores)?;
        let addresses = host.wildcard_addresses(port);
        let listeners = listen(&nets, &addresses, options)?;
        let control = self.control.as_deref();
        let control = control.map(|path| ControlSocket::listen(path, NetCores(nets.clone())));
        let control = control.transpose()?;
        let settings = self.net_settings();
        let cpus = self.core_cpus;
        let device = host.device_name();
        Ok(StreamServer { nets, listeners, cpus, addresses, startup, settings, control, device })
    }

    /// Begins the start of the server.
    pub(crate) fn startup(&self, host: &HostOptions) -> Result<Startup, Failure> {
        Startup::begin(&self.user, Obstacle::of(&host.io_kind()), self.duration, &self.metrics)
    }

    /// Checks the options without opening anything.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.check_threads()?;
        let host = self.host_options()?;
        let gate = config::merge_file(self.gate.clone(), self.config.as_deref())?;
        gate.settings()?;
        config::packet_classes(self.admission, self.config.as_deref())?;
        if host.is_unset_except_cpu()? || host.io_kind() == IoKind::Kernel {
            return Ok(());
        }
        host.check()
    }

    /// Flags of the settings that SIGHUP reloads in every server.
    fn net_settings(&self) -> NetSettings {
        NetSettings {
            config: self.config.clone(),
            host_flags: self.host.clone(),
            gate_flags: self.gate.clone(),
            admission_flag: self.admission,
        }
    }

    /// Serves datagrams, and with `stream_limits` also streams of messages, on Tidegate or on
    /// kernel sockets. At SIGHUP `reload` takes the server's own parts from the configuration.
    pub(crate) fn serve(
        self,
        name: &str,
        port: u16,
        responder: impl Responder + Clone + Send,
        stream_limits: Option<MessageLimits>,
        reload: Vec<ReloadPart>,
        readings: impl Fn(&mut Readings) + Send + Sync + 'static,
    ) -> Result<(), Failure> {
        let host = self.host_options()?;
        let startup = self.startup(&host)?;
        self.check_threads()?;
        let gate = config::merge_file(self.gate.clone(), self.config.as_deref())?;
        let settings = gate.settings()?;
        host.pin()?;
        static COUNTERS: ServeCounters = ServeCounters::new();
        let device = host.device_name();
        let served = match &self.counters {
            Some(path) => ServeCounters::create_mapped(path)
                .map_err(|error| format!("{}: {error}", path.display()))?,
            None => &COUNTERS,
        };
        let with_counters = |durations: Option<&'static DurationCounts>| -> ServiceReadings {
            Box::new(move |all| {
                add_requests(all, served);
                if let Some(durations) = durations {
                    add_service_times(all, durations);
                }
                readings(all);
            })
        };
        let report = if host.io_kind() == IoKind::Kernel {
            let addresses = &host.kernel_addresses(port);
            let (durations, readings) = (None, with_counters(None));
            let run =
                ServerRun { name, addresses, startup, reload, served, durations, readings, device };
            self.serve_on_kernel(run, responder)?;
            ServeReport::kernel(name, served)
        } else {
            let addresses = &host.wildcard_addresses(port);
            let config = self.with_classes(host.net_config(&settings)?)?;
            let config = startup.sandbox.confine(config, &host)?;
            let own_thread = gate.network_thread() || self.has_reader_threads();
            let nets = Net::open_cores(config.own_thread(own_thread), self.cores)?;
            let mut reload = reload;
            reload.push(self.net_settings().into_part(NetCores(nets.clone()))?);
            static DURATIONS: LazyLock<DurationCounts> = LazyLock::new(DurationCounts::default);
            let is_timed = self.has_reader_threads() || !nets[0].has_threads();
            let durations = (self.metrics.is_given() && is_timed).then(|| &*DURATIONS);
            let readings = with_counters(durations);
            let run =
                ServerRun { name, addresses, startup, reload, served, durations, readings, device };
            self.serve_on_tidegate(run, &nets, responder, stream_limits, |e| host.explain(e))?;
            ServeReport::tidegate(name, served, &nets)
        };
        report.print(self.json)
    }

    /// Adds the admission classes and the transmit classes, if any. Admission raises the priority of
    /// the process.
    fn with_classes(&self, net: NetConfig) -> Result<NetConfig, Failure> {
        let classes = config::packet_classes(self.admission, self.config.as_deref())?;
        if classes.admission.is_some() {
            raise_priority();
        }
        Ok(classes.add_to(net))
    }

    /// Serves datagrams on kernel sockets until `stop` is set.
    fn serve_on_kernel(
        &self,
        run: ServerRun<'_>,
        mut responder: impl Responder + Clone + Send,
    ) -> Result<(), Failure> {
        let ServerRun { name, addresses, startup, reload, served, readings, device, .. } = run;
        let stop = &*startup.stop();
        let default = KernelOptions::default();
        let options = KernelOptions {
            receive_buffer_bytes: self
                .kernel_receive_buffer
                .unwrap_or(default.receive_buffer_bytes),
            reuse_port: self.reuse_port,
            busy_poll: self.kernel_busy_poll,
        };
        let bind_all = || {
            let bind = |&address| KernelSocket::bind(address, &options);
            addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()
        };
        let set_count = if self.reuse_port { self.readers } else { 1 };
        let sets = (0..set_count).map(|_| bind_all()).collect::<Result<Vec<_>, _>>()?;
        let source = NetSource::new(name, &device, Vec::new(), readings);
        let _reload = startup.finish(reload, &[], source)?;
        announce_server(name, addresses, "kernel sockets")?;
        if self.has_reader_threads() {
            let responders = vec![responder; self.readers];
            let on_start = |number| pin_thread("reader", &self.reader_cpus, number);
            serve_kernel_readers(&sets, responders, MAX_DATAGRAM_BYTES, on_start, stop, served)?;
        } else {
            serve_kernel(&sets[0], &mut responder, MAX_DATAGRAM_BYTES, stop, served)?;
        }
        Ok(())
    }

    /// Serves datagrams, and with `stream_limits` streams of messages, on each stack until `stop`
    /// is set.
    fn serve_on_tidegate(
        &self,
        run: ServerRun<'_>,
        nets: &[Net],
        responder: impl Responder + Clone + Send,
        stream_limits: Option<MessageLimits>,
        explain: impl Fn(std::io::Error) -> Failure,
    ) -> Result<(), Failure> {
        let ServerRun { name, addresses, startup, reload, served, durations, readings, device } =
            run;
        let stop = &*startup.stop();
        let state = ServeState { stop, counters: served, durations };
        let options = UdpOptions::default().reuse_port(nets.len() > 1);
        let bind = |net: &Net| {
            let bind = |&address: &SocketAddr| UdpSocket::bind_with(net, address, options);
            addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()
        };
        let sockets = nets.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        let stream_addresses = if stream_limits.is_some() { addresses } else { &[] };
        let listeners = listen(nets, stream_addresses, TcpOptions::default())?;
        let limits = stream_limits.unwrap_or_default();
        let control = self.control.as_deref();
        let control = control.map(|path| ControlSocket::listen(path, NetCores(nets.to_vec())));
        let _control = control.transpose()?;
        nets[0].wait_for_addresses()?;
        let source = NetSource::new(name, &device, nets.to_vec(), readings);
        let _reload = startup.finish(reload, nets, source)?;
        announce_server_on(&nets[0], name, addresses)?;
        if !self.has_reader_threads() {
            let cores = nets.iter().zip(sockets).zip(listeners);
            let cores = cores.map(|all| (all, responder.clone())).collect();
            return run_on_cores(cores, &self.core_cpus, stop, |core| {
                let (((net, sockets), listeners), mut responder) = core;
                let responder = &mut responder;
                serve_udp_and_tcp(net, &sockets, &listeners, limits, responder, state)
            })
            .map_err(explain);
        }
        let (net, sockets, listeners) = (&nets[0], &sockets[0], &listeners[0]);
        let mut stream_responder = responder.clone();
        let readers = vec![responder; self.readers];
        std::thread::scope(|scope| {
            let stream_thread = (!listeners.is_empty()).then(|| {
                scope.spawn(|| {
                    let responder = &mut stream_responder;
                    serve_udp_and_tcp(net, &[], listeners, limits, responder, state)
                })
            });
            let on_start = |number| pin_thread("reader", &self.reader_cpus, number);
            let config = self.readers_config();
            let result = serve_readers(sockets, readers, config, on_start, state);
            // Both end together, also on an error.
            stop.store(true, Ordering::Relaxed);
            let stream_result =
                stream_thread.map_or(Ok(Ok(())), std::thread::ScopedJoinHandle::join);
            result.and(stream_result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
        .map_err(explain)
    }

    /// Returns the configuration of a socket's readers.
    fn readers_config(&self) -> ReadersConfig {
        ReadersConfig::default().distribution(self.distribution.unwrap_or_default())
    }
}

impl ServerOptions {
    /// Returns true if readers run on their own threads: several readers, or one reader with a
    /// processor of its own.
    fn has_reader_threads(&self) -> bool {
        self.readers > 1 || !self.reader_cpus.is_empty()
    }

    /// Number of threads that answer datagrams.
    pub(super) fn thread_count(&self) -> usize {
        self.readers.max(self.cores)
    }

    /// Checks the numbers and the processors of threads.
    fn check_threads(&self) -> Result<(), Failure> {
        if self.readers == 0 || self.readers > MAX_READERS {
            return Err(format!("--readers {}: give 1 to {MAX_READERS}", self.readers).into());
        }
        check_cpus("--reader-cpus", &self.reader_cpus)?;
        check_cpus("--core-cpus", &self.core_cpus)?;
        let kernel = self.host.io_kind() == IoKind::Kernel;
        check_cores(self.cores)?;
        if self.cores > 1 && self.has_reader_threads() {
            return Err("--cores and --readers: each network core reads by itself; give one of \
                        them"
                .into());
        }
        if self.cores > 1 && kernel && self.config.is_none() {
            return Err("--cores is for Tidegate's own stack: with --io kernel give --readers \
                        and --reuse-port"
                .into());
        }
        if self.reuse_port && !kernel && self.config.is_none() {
            return Err("--reuse-port is for --io kernel: on Tidegate each reader has a queue \
                        of its own without it"
                .into());
        }
        if self.kernel_busy_poll != KernelBusyPoll::Off && !kernel && self.config.is_none() {
            return Err(
                "--kernel-busy-poll is for --io kernel: on Tidegate give --mode dedicated".into()
            );
        }
        if self.kernel_receive_buffer.is_some() && !kernel && self.config.is_none() {
            return Err("--kernel-receive-buffer is for --io kernel: leave it out".into());
        }
        Ok(())
    }
}

/// Listens on these addresses on each stack. Several stacks share the ports.
fn listen(
    nets: &[Net],
    addresses: &[SocketAddr],
    options: TcpOptions,
) -> std::io::Result<Vec<Vec<TcpListener>>> {
    let options = options.reuse_port(nets.len() > 1);
    let listen = |net: &Net| {
        let listen = |&address| TcpListener::bind_with(net, address, TCP_BACKLOG, options);
        addresses.iter().map(listen).collect()
    };
    nets.iter().map(listen).collect()
}

/// Announces that a server serves on these addresses of a stack.
fn announce_server_on(net: &Net, name: &str, addresses: &[SocketAddr]) -> std::io::Result<()> {
    let capabilities = net.capabilities();
    let backend = format!("{} ({})", capabilities.kind, capabilities.detail);
    announce_server(name, addresses, &backend)
}

/// Stacks with TCP listeners, before they serve.
pub(crate) struct StreamServer {
    pub(crate) nets: Vec<Net>,
    listeners: Vec<Vec<TcpListener>>,
    cpus: Vec<usize>,
    addresses: Vec<SocketAddr>,
    startup: Startup,
    settings: NetSettings,
    control: Option<ControlSocket>,
    /// Name of the network interface.
    device: String,
}

/// Stream server that is ready.
pub(crate) struct ReadyServer {
    pub(crate) nets: Vec<Net>,
    listeners: Vec<Vec<TcpListener>>,
    cpus: Vec<usize>,
    pub(crate) stop: Arc<AtomicBool>,
    /// Threads that end with the server.
    _threads: (ServerThreads, Option<ControlSocket>),
}

impl StreamServer {
    /// Gives up the privileges and prints the ready line, when no other host has claimed an own
    /// address. Reloads these parts of the server at SIGHUP, besides those of every server; `readings`
    /// adds the metrics of the service.
    pub(crate) fn start(
        self,
        name: &str,
        mut parts: Vec<ReloadPart>,
        readings: impl Fn(&mut Readings) + Send + Sync + 'static,
    ) -> Result<ReadyServer, Failure> {
        let Self { nets, listeners, cpus, addresses, startup, settings, control, device } = self;
        parts.push(settings.into_part(NetCores(nets.clone()))?);
        nets[0].wait_for_addresses()?;
        let stop = startup.stop();
        let source = NetSource::new(name, &device, nets.clone(), readings);
        let reload = startup.finish(parts, &nets, source)?;
        announce_server_on(&nets[0], name, &addresses)?;
        Ok(ReadyServer { nets, listeners, cpus, stop, _threads: (reload, control) })
    }
}

impl ReadyServer {
    /// Calls `serve` for each stack with its listeners, on a thread of its own if there are several.
    pub(crate) fn run(
        &mut self,
        serve: impl Fn(&Net, Vec<TcpListener>) -> std::io::Result<()> + Sync,
    ) -> std::io::Result<()> {
        let cores = self.nets.iter().zip(self.listeners.drain(..)).collect();
        run_on_cores(cores, &self.cpus, &self.stop, |(net, listeners)| serve(net, listeners))
    }
}
