//! What all servers have in common: their flags, and how they are brought up on
//! Tidegate or on kernel sockets.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};
use tidegate::{Distribution, Net, ReadersConfig, TcpListener, TcpOptions, UdpSocket};
use tidegate_apps::embedded::serve_both;
use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};
use tidegate_apps::readers::{serve_kernel_readers, serve_readers};
use tidegate_apps::{MessageLimits, Responder, ServeCounters};

use crate::Failure;
use crate::config;
use crate::control::Control;
use crate::gate::GateOptions;
use crate::host::{HostOptions, PortKind, pin_to};
use crate::process::{be_urgent, ready, stop_flag};
use crate::report::ServeReport;

/// The longest datagram on kernel sockets: an echo of a whole Ethernet frame.
const MAX_DATAGRAM_BYTES: usize = 2048;

/// Connections that may wait to be accepted.
const TCP_BACKLOG: usize = 4096;

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
        if let Some(classes) = config::admission(self.admission, self.config.as_deref())? {
            be_urgent();
            config = config.admission(classes);
        }
        let net = Net::open(config.own_thread(gate.network_thread()))?;
        let addresses = host.wildcards(port);
        let bind = |&address| TcpListener::bind_with(&net, address, TCP_BACKLOG, options);
        let listeners = addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        let control = self.control.as_deref().map(|path| Control::listen(path, net.clone()));
        let control = control.transpose()?;
        Ok(StreamServer { net, listeners, addresses, stop, _control: control })
    }

    /// Serves datagrams, and streams of messages if they have limits, on
    /// Tidegate or on kernel sockets.
    pub(crate) fn serve(
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
            if let Some(classes) = config::admission(self.admission, self.config.as_deref())? {
                be_urgent();
                config = config.admission(classes);
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
            let control = self.control.as_deref().map(|path| Control::listen(path, net.clone()));
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
