//! `tidegate daemon`: the network daemon that applications attach to.

mod in_background;
mod privileges;

use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::{Resource, Rlimit};
use tidegate::gate::{Settings, admission};
use tidegate::host::HostDevice;
use tidegate_service::Geometry;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{
    AttachConfig, DEFAULT_COALESCING, Daemon, Quota, StartOptions, UpgradeMode,
};

pub(crate) use self::in_background::{BACKGROUND, UNTIL_EOF};
use self::privileges::KeptCapabilities;
use crate::Failure;
use crate::config;
use crate::control::ControlSocket;
use crate::drop_log::{CHECK_INTERVAL, DropLog};
use crate::gate::GateOptions;
use crate::host::{HostOptions, IoKind};
use crate::metrics::{DaemonSource, MetricsListener, MetricsOption};
use crate::output::print_line;
use crate::process::{announce_ready, print_ready_line, raise_priority, stop_flag};
use crate::reload::{NetSettings, ReloadSignal};
use crate::sandbox::Sandbox;
use crate::service_manager::{Watchdog, notify_stopping, notify_successor};

/// Interval at which the main thread checks for the end of the network cores.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Long help on the privileges of the daemon.
const PRIVILEGES: &str = "Once the daemon serves, it drops every capability that it no longer \
needs. It keeps CAP_SYS_NICE for its priority beside CPU-bound programs; CAP_NET_ADMIN and CAP_BPF \
with --io auto, xdp, or packet with --shared, and CAP_NET_RAW and CAP_IPC_LOCK to open the device \
again if an upgrade fails; CAP_NET_BIND_SERVICE too with --shared; and no other with --io tap, \
dpdk, or packet with --address (but DPDK's own threads keep theirs, and with rdma all do). \
`tidegate upgrade` replaces a daemon with no connection lost.";

/// Flags of the daemon.
#[derive(Args)]
#[command(after_long_help = PRIVILEGES)]
pub(crate) struct DaemonCommand {
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
    config: Option<PathBuf>,
    /// Network cores: a number, or a range MIN-MAX, as 1-4, that scales with the load. The first
    /// runs on --cpu, the others on the processors after it. More than one need an --address
    /// that the kernel does not have
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = cores, help_heading = "Applications")]
    cores: RangeInclusive<usize>,
    /// Unix socket on which applications attach
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH, help_heading = "Applications")]
    socket: PathBuf,
    /// Permissions of the socket file, in octal: they decide which users may attach
    #[arg(long, value_name = "MODE", default_value = "660", value_parser = octal, help_heading = "Applications")]
    socket_mode: u32,
    /// Group of the socket file [default: the daemon's]
    #[arg(long, value_name = "GROUP", help_heading = "Applications")]
    socket_group: Option<String>,
    /// Maximum number of sockets per application
    #[arg(
        long,
        alias = "sockets",
        value_name = "COUNT",
        default_value_t = 4096,
        help_heading = "Applications"
    )]
    max_sockets: u32,
    /// Maximum number of ports that an application can bind [default: no limit]
    #[arg(long, alias = "ports", value_name = "COUNT", help_heading = "Applications")]
    max_ports: Option<u32>,
    /// Maximum number of attachments; a program has one for each network core that it uses
    /// [default: a sixth of the open files that the daemon may have]
    #[arg(long, value_name = "COUNT", help_heading = "Applications")]
    max_attachments: Option<u32>,
    /// Maximum number of attachments of one user [default and maximum: three quarters of
    /// --max-attachments]
    #[arg(long, value_name = "COUNT", help_heading = "Applications")]
    max_user_attachments: Option<u32>,
    /// Socket data memory per application, in MiB; beyond it the application gets no more sockets
    /// [default: no limit]
    #[arg(long, value_name = "MIB", help_heading = "Applications")]
    app_memory: Option<u32>,
    /// Maximum share of a network core's time for the commands of an application while others
    /// wait, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100, help_heading = "Applications")]
    app_cpu_share: u32,
    /// Buffer per TCP connection and direction between application and daemon, in bytes, besides
    /// the stack's own buffers; a power of two
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 16, help_heading = "Applications")]
    tcp_bytes: u32,
    /// Buffer per UDP socket and direction between application and daemon, in bytes, besides the
    /// stack's own queue; a power of two
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 18, help_heading = "Applications")]
    udp_bytes: u32,
    /// Minimum interval between wake-ups of a sleeping application with many peers, in
    /// microseconds; 0 disables coalescing
    #[arg(long, value_name = "MICROSECONDS", default_value_t = DEFAULT_COALESCING.as_micros() as u64, help_heading = "Applications")]
    coalescing_us: u64,
    #[command(flatten)]
    metrics: MetricsOption,
    /// Listen on this Unix socket for `tidegate ctl`, `capture`, `trace`, `ss` and `top`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Stop after this many seconds; SIGINT and SIGTERM stop earlier [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print the final report as JSON
    #[arg(long)]
    json: bool,
    /// Take over from the daemon at --socket; given by `tidegate upgrade`
    #[arg(long, hide = true)]
    take_over: bool,
    /// Return once the daemon serves, and leave it in the background; for `tidegate run`
    #[arg(long, hide = true)]
    background: bool,
    /// Serve until standard input, a pipe, has no other end; for `tidegate run`
    #[arg(long, hide = true)]
    until_eof: bool,
    /// Measure the duration of the network cores' rounds, for `tidegate lab hostile`
    #[arg(long, hide = true)]
    measure_rounds: bool,
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "give the permissions in octal, as 660".to_owned())
}

/// Parses a number of cores, or a range MIN-MAX.
fn cores(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse().ok().filter(|&count| count >= 1);
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok(min..=max),
        _ => Err("give a number of at least 1, or a range, as 1-4".to_owned()),
    }
}

impl DaemonCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.background {
            return in_background::start();
        }
        if self.take_over || self.until_eof {
            detach_from_parent();
        }
        let host = config::merge_file(self.host.clone(), self.config.as_deref())?;
        let gate = config::merge_file(self.gate.clone(), self.config.as_deref())?;
        let settings = gate.settings()?;
        let reload_signal = ReloadSignal::register(Sandbox::none())?;
        let metrics = self.metrics.bind_for_upgrades()?;
        let device = host.device_name();
        let stop = stop_flag(self.duration)?;
        let classes = config::packet_classes(self.admission, self.config.as_deref())?;
        let net = classes.add_to(host.net_config(&settings)?);
        let kept = KeptCapabilities::for_host(&host);
        let is_admitting = classes.admission.is_some();
        let upgrade = match self.until_eof {
            true => UpgradeMode::Refused("it belongs to one application"),
            false => upgrade_mode(&host, &settings, classes.admission),
        };
        let on_core_start = move |core| {
            if is_admitting {
                raise_priority();
            }
            host.pin_with_offset(core).map_err(std::io::Error::other)
        };
        let log = Arc::new(|line: &str| tracing::info!("{line}"));
        let drop_privileges = move || kept.drop_all_others();
        let start = StartOptions {
            attach: self.attach_config(),
            cores: self.cores.clone(),
            on_core_start,
            drop_privileges,
            upgrade,
            measure_rounds: self.measure_rounds,
            log,
        };
        let daemon = if self.take_over {
            let (daemon, output_fds) = Daemon::take_over(net, start)?;
            rustix::stdio::dup2_stdout(output_fds.stdout)?;
            rustix::stdio::dup2_stderr(output_fds.stderr)?;
            daemon
        } else {
            Daemon::start_with(net, start)?
        };
        let background = reload_signal.background();
        let reload = reload_signal.start_thread()?;
        reload.serve(vec![self.net_settings().into_part(daemon.controls())?]);
        let source =
            DaemonSource { controls: daemon.controls(), socket: self.socket.clone(), device };
        let serve = |listener: MetricsListener| listener.serve(source, background);
        let _metrics = metrics.map(serve).transpose()?;
        self.run_until_stopped(daemon, kept, &stop)
    }

    /// Flags of the settings that SIGHUP reloads.
    fn net_settings(&self) -> NetSettings {
        NetSettings {
            config: self.config.clone(),
            host_flags: self.host.clone(),
            gate_flags: self.gate.clone(),
            admission_flag: self.admission,
        }
    }

    /// Returns the limits and the socket of the applications.
    fn attach_config(&self) -> AttachConfig {
        AttachConfig {
            path: self.socket.clone(),
            mode: self.socket_mode,
            group: self.socket_group.clone(),
            geometry: Geometry {
                sockets: self.max_sockets,
                tcp_bytes: self.tcp_bytes,
                udp_bytes: self.udp_bytes,
            },
            coalescing: Duration::from_micros(self.coalescing_us),
            quota: Quota {
                max_ports: self.max_ports.unwrap_or(u32::MAX),
                max_memory_bytes: self.app_memory.map_or(u64::MAX, |mib| u64::from(mib) << 20),
                cpu_share_percent: self.app_cpu_share,
                max_attachments: self.max_attachments.unwrap_or(u32::MAX),
                max_user_attachments: self.max_user_attachments.unwrap_or(u32::MAX),
            },
        }
    }

    /// Reports that the daemon is ready, waits until it is to stop, and stops it.
    fn run_until_stopped(
        &self,
        daemon: Daemon,
        kept: KeptCapabilities,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        let control = |path| match self.take_over {
            true => ControlSocket::replace(path, daemon.controls()),
            false => ControlSocket::listen(path, daemon.controls()),
        };
        let control = self.control.as_deref().map(control).transpose()?;
        match daemon.controls().wait_for_addresses() {
            Err(error) if error.kind() == ErrorKind::AddrInUse => return Err(error.into()),
            // Any other error is the end of a core, which the daemon explains below.
            _ => {}
        }
        let (path, kept) = (self.socket.display(), kept.names());
        let ready = format!("applications attach at {path}; kept {kept}");
        match self.take_over {
            // The reader of the old daemon's output may have gone. The service manager knows that
            // the service is ready, and learns of this process from the old daemon.
            true => drop(print_ready_line(format_args!("{ready}"))),
            false => announce_ready(format_args!("{ready}"))?,
        }
        self.watch_until_stopped(&daemon, stop);
        if daemon.is_running() {
            notify_stopping();
            if self.json {
                print_line!("{}", serde_json::to_string(&daemon.report()?)?)?;
            }
        }
        if let Some(successor) = daemon.stop()? {
            control.into_iter().for_each(ControlSocket::hand_over);
            notify_successor(successor);
        }
        Ok(())
    }

    /// Waits until the daemon is to stop or its cores end. Meanwhile logs drops, and reports to the
    /// service manager that the cores answer.
    fn watch_until_stopped(&self, daemon: &Daemon, stop: &AtomicBool) {
        let watchdog = Watchdog::of_this_process();
        let interval = watchdog.as_ref().map_or(CHECK_INTERVAL, Watchdog::interval);
        let interval = interval.min(CHECK_INTERVAL);
        let (mut drop_log, mut last_check) = (DropLog::new(), Instant::now());
        while !stop.load(Ordering::Relaxed) && daemon.is_running() {
            match self.until_eof {
                true if in_background::has_stdin_ended(POLL_INTERVAL) => break,
                true => {}
                false => std::thread::sleep(POLL_INTERVAL),
            }
            let has_work = watchdog.is_some() || !drop_log.is_complete();
            if last_check.elapsed() < interval || !has_work {
                continue;
            }
            last_check = Instant::now();
            // A core that hangs does not answer. The end of a core is found by the next look.
            if let Ok(drops) = daemon.controls().drops() {
                drop_log.check(&drops);
                watchdog.iter().for_each(Watchdog::notify);
            }
        }
    }
}

/// Detaches the daemon from the process that started it: a new session, so that signals to the
/// old process group do not end it, and the maximum limit of file descriptors, because the
/// daemon needs a descriptor for each application.
fn detach_from_parent() {
    // Fails if this process already leads a group: then it is detached already.
    let _ = rustix::process::setsid();
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let limit = Rlimit { current: limit.maximum, ..limit };
    // On failure the present limit may suffice.
    let _ = rustix::process::setrlimit(Resource::Nofile, limit);
}

/// Returns the way in which another daemon may take over from this daemon, if any.
fn upgrade_mode(
    host: &HostOptions,
    settings: &Settings,
    classes: Option<admission::Config>,
) -> UpgradeMode {
    match host.io_kind() {
        IoKind::Device(HostDevice::Auto | HostDevice::Xdp | HostDevice::Tap) => {}
        // The old daemon's ports stay diverted until the next daemon has diverted them.
        IoKind::Device(HostDevice::Packet) if host.is_shared() => {}
        IoKind::Device(HostDevice::Dpdk(config)) => {
            if let Err(reason) = config.check_handover() {
                return UpgradeMode::Refused(reason);
            }
        }
        IoKind::Device(HostDevice::Rdma(_)) => {
            return UpgradeMode::Refused("other hosts know an RDMA device by its queue pair");
        }
        IoKind::Device(HostDevice::Packet) => return UpgradeMode::Concurrent,
        IoKind::Kernel => return UpgradeMode::Refused("it serves on kernel sockets"),
    }
    let (host, settings) = (host.clone(), settings.clone());
    UpgradeMode::Reopen(Box::new(move || {
        let net = host.net_config(&settings).map_err(std::io::Error::other)?;
        Ok(match &classes {
            Some(classes) => net.admission(classes.clone()),
            None => net,
        })
    }))
}
