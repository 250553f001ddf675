//! `tidegate serve` without a server of its own: the daemon that programs attach
//! to.

use std::io::Write;
use std::ops::RangeInclusive;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit};
use tidegate::gate::{Settings, admission};
use tidegate::host::HostPort;
use tidegate_service::Geometry;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Start, Upgrade};

use super::privileges::Kept;
use crate::Failure;
use crate::config;
use crate::control::Control;
use crate::gate::GateOptions;
use crate::host::{HostOptions, PortKind};
use crate::process::{be_urgent, stop_flag};

/// How often to look whether the core has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Flags of the daemon.
#[derive(Args)]
pub(crate) struct DaemonCommand {
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
    config: Option<PathBuf>,
    /// Network cores: a number, or the least and the most, as 1-4, of which as many are
    /// used as are needed. The first is on --cpu, the others on the processors after it.
    /// More than one need an --address that is not the kernel's
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = cores, help_heading = "Applications")]
    cores: RangeInclusive<usize>,
    /// The Unix socket that programs attach by
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH, help_heading = "Applications")]
    socket: PathBuf,
    /// Who may attach: the permissions of that file, in octal
    #[arg(long, value_name = "MODE", default_value = "660", value_parser = octal, help_heading = "Applications")]
    socket_mode: u32,
    /// The group of that file
    #[arg(long, value_name = "GROUP", help_heading = "Applications")]
    socket_group: Option<String>,
    /// The most sockets that a program can have
    #[arg(long, value_name = "COUNT", default_value_t = 4096, help_heading = "Applications")]
    sockets: u32,
    /// The most ports that a program can bind; any number with none
    #[arg(long, value_name = "COUNT", help_heading = "Applications")]
    ports: Option<u32>,
    /// How much memory the data of a program's sockets may take, in MiB, before it gets no
    /// more sockets; any with none
    #[arg(long, value_name = "MIB", help_heading = "Applications")]
    app_memory: Option<u32>,
    /// What part of a network core's time a program gets for what it asks for while others
    /// want something too
    #[arg(long, value_name = "PERCENT", default_value_t = 100, help_heading = "Applications")]
    app_cpu_share: u32,
    /// What a connection holds for a program each way, besides the stack's own
    /// buffers; a power of two
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 16, help_heading = "Applications")]
    tcp_bytes: u32,
    /// What a UDP socket holds for a program each way, besides the stack's own
    /// queue; a power of two
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 18, help_heading = "Applications")]
    udp_bytes: u32,
    /// A program with many peers that sleeps is woken no more often than this; 0 wakes it for
    /// each
    #[arg(long, value_name = "MICROSECONDS", default_value_t = DEFAULT_COALESCING.as_micros() as u64, help_heading = "Applications")]
    coalescing_us: u64,
    /// Listen on this Unix socket for `tidegate ctl`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Stop after so many seconds; otherwise at SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Print how things stood at the end as JSON
    #[arg(long)]
    json: bool,
    /// Go on in the place of the daemon at --socket: `tidegate upgrade` says so
    #[arg(long, hide = true)]
    take_over: bool,
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "give the permissions in octal, as 660".to_owned())
}

/// How many cores: a number, or two.
fn cores(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse().ok().filter(|&count| count >= 1);
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least <= most => Ok(least..=most),
        _ => Err("give a number from 1 on, or the least and the most, as 1-4".to_owned()),
    }
}

impl DaemonCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.take_over {
            stand_alone();
        }
        let host = config::over(self.host, self.config.as_deref())?;
        let gate = config::over(self.gate, self.config.as_deref())?;
        let settings = gate.settings()?;
        let stop = stop_flag(self.duration)?;
        let mut net = host.net_config(&settings)?;
        let classes = config::admission(self.admission, self.config.as_deref())?;
        let is_admitting = classes.is_some();
        if let Some(classes) = &classes {
            net = net.admission(classes.clone());
        }
        let geometry = Geometry {
            sockets: self.sockets,
            tcp_bytes: self.tcp_bytes,
            udp_bytes: self.udp_bytes,
        };
        let door = DoorConfig {
            path: self.socket.clone(),
            mode: self.socket_mode,
            group: self.socket_group,
            geometry,
            coalescing: Duration::from_micros(self.coalescing_us),
            quota: Quota {
                ports: self.ports.unwrap_or(u32::MAX),
                memory_bytes: self.app_memory.map_or(u64::MAX, |mib| u64::from(mib) << 20),
                cpu_share_percent: self.app_cpu_share,
            },
        };
        let kept = Kept::of(&host);
        let upgrade = upgrade(&host, &settings, classes);
        let begin = move |core| {
            if is_admitting {
                be_urgent();
            }
            host.pin_beside(core).map_err(std::io::Error::other)
        };
        // Who reads what we say may have gone long ago.
        let log = Arc::new(|line: &str| drop(writeln!(std::io::stderr(), "{line}")));
        let settle = move || kept.give_up_the_rest();
        let start = Start { door, cores: self.cores, begin, settle, upgrade, log };
        let daemon = if self.take_over {
            let (daemon, prints) = Daemon::take_over(net, start)?;
            rustix::stdio::dup2_stdout(prints.stdout)?;
            rustix::stdio::dup2_stderr(prints.stderr)?;
            daemon
        } else {
            Daemon::start_with(net, start)?
        };
        let control = |path| match self.take_over {
            true => Control::replace(path, daemon.controls()),
            false => Control::listen(path, daemon.controls()),
        };
        let control = self.control.as_deref().map(control).transpose()?;
        let path = self.socket.display();
        let said =
            writeln!(std::io::stdout(), "ready: programs attach at {path}; kept {}", kept.names());
        if !self.take_over {
            said?;
        }
        while !stop.load(Ordering::Relaxed) && daemon.is_running() {
            std::thread::sleep(LOOK);
        }
        if daemon.is_running() && self.json {
            println!("{}", serde_json::to_string(&daemon.report()?)?);
        }
        if let Some(successor) = daemon.stop()? {
            control.into_iter().for_each(Control::leave);
            tell_service_manager(successor);
        }
        Ok(())
    }
}

/// Who started us goes, and we stay: what ends it is not to end us. And its limits
/// are not the daemon's, who has a descriptor for each program.
fn stand_alone() {
    // One that leads a group of its own is alone already.
    let _ = rustix::process::setsid();
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let limit = Rlimit { current: limit.maximum, ..limit };
    // With the limit that there is it may be enough.
    let _ = rustix::process::setrlimit(Resource::Nofile, limit);
}

/// Whether and how another daemon may take this one's place.
fn upgrade(host: &HostOptions, settings: &Settings, classes: Option<admission::Config>) -> Upgrade {
    match host.port_kind() {
        PortKind::Own(HostPort::Xdp | HostPort::Tap) => {}
        PortKind::Own(HostPort::Dpdk(config)) => {
            if let Err(why) = config.can_change_hands() {
                return Upgrade::Refused(why);
            }
        }
        PortKind::Own(HostPort::Packet) => return Upgrade::Beside,
        PortKind::Kernel => return Upgrade::Refused("it serves on kernel sockets"),
    }
    let (host, settings) = (host.clone(), settings.clone());
    Upgrade::Anew(Box::new(move || {
        let net = host.net_config(&settings).map_err(std::io::Error::other)?;
        Ok(match &classes {
            Some(classes) => net.admission(classes.clone()),
            None => net,
        })
    }))
}

/// A service manager must know which process the service is now, before this one
/// has ended (`sd_notify(3)`).
fn tell_service_manager(pid: u32) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let name = path.as_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let tell = |address| {
        UnixDatagram::unbound()?.send_to_addr(format!("MAINPID={pid}").as_bytes(), &address)
    };
    if let Err(error) = address.and_then(tell) {
        // Nobody may read it, and nothing else can be done.
        let _ = writeln!(std::io::stderr(), "the service manager was not told: {error}");
    }
}
