//! `tidegate announce`: gives the addresses of a service to a routing daemon while the service is
//! healthy.
//!
//! Threads watch the checks, the process of the service, and the socket of `tidegate drain`, and
//! send events. The thread of the command alone decides ([`policy`]) and announces ([`routing`]).

mod announcer;
mod drain;
mod event;
mod policy;
mod routing;
mod service;
mod state;
mod watch;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tidegate_service::attachment::DEFAULT_PATH;

use self::announcer::Announcer;
pub(crate) use self::drain::{DEFAULT_SOCKET, Drain, drain};
use self::policy::{Policy, PolicyConfig};
use self::routing::RoutingOptions;
use self::service::ServiceWatch;
use self::watch::{CheckWatch, CheckWay};
use crate::Failure;
use crate::background::BackgroundThread;
use crate::health_check::HealthCheck;
use crate::metrics::{Latest, MetricsListener, MetricsOption};
use crate::output::print;
use crate::process::{announce_ready, stop_flag};
use crate::service_manager::{self, Watchdog};

/// Longest wait for an event, after which the stop signal is read and the watchdog notified.
const TICK: Duration = Duration::from_millis(100);
/// Longest time limit of a check: a server checks itself on the thread of its control socket.
const MAX_TIMEOUT_SECONDS: f64 = 1.0;

/// Shortest interval of checks: each takes some of the service's time.
const MIN_INTERVAL_SECONDS: f64 = 0.01;

/// Long help of `announce`.
const FIRST_STEPS: &str = "First steps, with BIRD on this server:\n\n  \
1. Print the lines that BIRD's configuration needs, and add them:\n     \
tidegate announce --to bird --address 192.0.2.53 --example\n  \
2. Start the service with a control socket:\n     \
tidegate serve dns --iface eth0 --address 192.0.2.53/32 --control /run/tidegate/dns.ctl ...\n  \
3. Announce its address while it answers:\n     \
tidegate announce --to bird --address 192.0.2.53 --check dns:example.org --control /run/tidegate/dns.ctl\n  \
4. Before maintenance: tidegate drain. After it: tidegate drain --undo\n\n\
docs/fleets.md explains the routers' side.";

/// Flags of `announce`.
#[derive(Args)]
#[command(after_long_help = FIRST_STEPS)]
pub(crate) struct Announce {
    /// Address of the service, announced as a route to this one address; may be repeated
    #[arg(long, short, value_name = "ADDRESS", required = true)]
    address: Vec<IpAddr>,
    #[command(flatten)]
    routing: RoutingOptions,
    /// Print the lines to add to the configuration of the routing daemon, and end
    #[arg(long, help_heading = "Routing daemon")]
    example: bool,
    /// Health check of each address; may be repeated, and all have to pass. dns:NAME and
    /// dns-tcp:NAME ask a DNS server for a name by UDP or TCP (dns:NAME:PORT on another port than
    /// 53), udp:PORT sends a datagram that any datagram answers, tcp:PORT connects, http:PORT/PATH gets
    /// a page
    #[arg(
        long,
        value_name = "CHECK",
        help_heading = "Health",
        required_unless_present = "example"
    )]
    check: Vec<HealthCheck>,
    /// Control socket of the service, as given to its --control: its process is watched, so that its
    /// end counts at once, and its gate
    #[arg(long, value_name = "SOCKET", help_heading = "Health")]
    control: Option<PathBuf>,
    /// Way of the checks [default: control with --control, else kernel]
    #[arg(long, value_enum, value_name = "WAY", help_heading = "Health")]
    check_through: Option<CheckThrough>,
    /// Socket of the daemon, for --check-through daemon
    #[arg(long, value_name = "SOCKET", default_value = DEFAULT_PATH, help_heading = "Health")]
    daemon: PathBuf,
    /// Interval of the checks, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, help_heading = "Health")]
    interval: f64,
    /// Time limit of a check in seconds, at most 1
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, help_heading = "Health")]
    timeout: f64,
    /// Successes in a row after which a check passes
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Health"
    )]
    rise: u32,
    /// Failures in a row after which a check fails
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Health"
    )]
    fall: u32,
    /// Withdraw the addresses when the gate has refused known traffic for this time, in seconds;
    /// --rise intervals in a row without a refusal begin it anew; needs --control [default: never]
    #[arg(long, value_name = "SECONDS", requires = "control", help_heading = "Overload")]
    refused_for: Option<f64>,
    /// Share of known packets from which the gate counts as refusing them, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 5, help_heading = "Overload")]
    refused_percent: u64,
    /// Class of admission with known traffic; may be repeated [default: trusted, known]
    #[arg(long, value_name = "CLASS", help_heading = "Overload")]
    known_class: Vec<String>,
    /// Shortest time for which the addresses stay withdrawn after that, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, help_heading = "Overload")]
    hold: f64,
    /// Listen on this Unix socket for `tidegate drain`
    #[arg(long, value_name = "SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Time between the withdrawal at SIGTERM and the end of this process, in which routers move the
    /// traffic, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    drain_time: f64,
    #[command(flatten)]
    metrics: MetricsOption,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print each change of the state as a line of JSON
    #[arg(long)]
    json: bool,
}

/// Way of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CheckThrough {
    /// The server checks itself through its stack, on request over its control socket
    Control,
    /// Kernel sockets of this host: for servers on the kernel's stack
    Kernel,
    /// The daemon's stack, attached like a program: for programs of `tidegate run`
    Daemon,
}

impl Announce {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.example {
            print(format_args!("{}", self.routing.example(&self.address)))?;
            return Ok(());
        }
        let takes_output = self.routing.takes_output();
        if self.json && takes_output {
            return Err(
                "--json: ExaBGP reads standard output; `tidegate drain --status --json` prints \
                        the state"
                    .into(),
            );
        }
        if self.interval < MIN_INTERVAL_SECONDS {
            return Err(format!("--interval {}: give 0.01 seconds or more", self.interval).into());
        }
        let interval = seconds("--interval", self.interval)?;
        let drain_time = seconds("--drain-time", self.drain_time)?;
        let policy = self.policy()?;
        let way = self.check_way()?;
        let stop = stop_flag(self.duration)?;
        let latest = Latest::default();
        let metrics = self.metrics.bind()?;
        let (sender, events) = channel();
        let _socket = drain::listen(&self.socket, sender.clone())?;
        let announcement = self.routing.open(&self.address)?;
        let checks = self.checks();
        for (index, (check, address)) in checks.iter().enumerate() {
            let (check, address, way) = (check.clone(), *address, way.clone());
            let timeout = self.timeout()?;
            CheckWatch { index, check, address, way, interval, timeout }.start(sender.clone())?;
        }
        if let Some(socket) = &self.control {
            let classes = match self.known_class.as_slice() {
                [] => ["trusted", "known"].map(str::to_owned).into(),
                given => given.to_vec(),
            };
            let refused_percent = self.refused_percent;
            ServiceWatch { socket: socket.clone(), classes, refused_percent, interval }
                .start(sender)?;
        }
        let background = BackgroundThread::like_this_thread()?;
        let serve = |listener: MetricsListener| listener.serve(latest.clone(), background.clone());
        let _metrics = metrics.map(serve).transpose()?;
        let policy = Policy::new(policy, checks.len());
        let mut announcer = Announcer::new(policy, announcement, &self.address, checks);
        if takes_output {
            service_manager::notify_ready();
        } else {
            announce_ready(format_args!("announce; state by `tidegate drain --status`"))?;
        }
        announcer.print_changes(self.json).publish(latest);
        let watchdog = Watchdog::of_this_process();
        let mut notified = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            match events.recv_timeout(TICK) {
                Ok(event) => announcer.handle(event)?,
                Err(RecvTimeoutError::Timeout) => announcer.update()?,
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
            }
            if let Some(watchdog) = &watchdog
                && notified.elapsed() >= watchdog.interval()
            {
                watchdog.notify();
                notified = Instant::now();
            }
        }
        service_manager::notify_stopping();
        if announcer.stop()? {
            std::thread::sleep(drain_time);
        }
        Ok(())
    }

    /// Each check on each address.
    fn checks(&self) -> Vec<(HealthCheck, IpAddr)> {
        let of_address = |&address| self.check.iter().map(move |check| (check.clone(), address));
        self.address.iter().flat_map(of_address).collect()
    }

    fn policy(&self) -> Result<PolicyConfig, Failure> {
        let refused_limit = self.refused_for.map(|limit| seconds("--refused-for", limit));
        Ok(PolicyConfig {
            rise: self.rise,
            fall: self.fall,
            refused_limit: refused_limit.transpose()?,
            hold: seconds("--hold", self.hold)?,
        })
    }

    fn timeout(&self) -> Result<Duration, Failure> {
        if self.timeout > MAX_TIMEOUT_SECONDS || self.timeout < 0.001 {
            return Err(format!("--timeout {}: give 0.001 to 1 seconds", self.timeout).into());
        }
        seconds("--timeout", self.timeout)
    }

    fn check_way(&self) -> Result<CheckWay, Failure> {
        let control = |socket: &Path| CheckWay::Control(socket.to_owned());
        match (self.check_through, &self.control) {
            (Some(CheckThrough::Control), None) => {
                Err("--check-through control: give the control socket of the service by --control"
                    .into())
            }
            (Some(CheckThrough::Daemon), _) => Ok(CheckWay::Daemon(self.daemon.clone())),
            (None | Some(CheckThrough::Control), Some(socket)) => Ok(control(socket)),
            (None | Some(CheckThrough::Kernel), _) => Ok(CheckWay::Kernel),
        }
    }
}

/// Duration of a flag.
fn seconds(flag: &str, seconds: f64) -> Result<Duration, Failure> {
    let duration = Duration::try_from_secs_f64(seconds).ok();
    duration.ok_or_else(|| format!("{flag} {seconds}: give a number of seconds from 0 on").into())
}
