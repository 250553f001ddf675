//! `tidegate dump`: the state of Tidegate on this machine, for a bug report.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tidegate_device::netlink::Interface;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::DaemonReport;

use crate::output::print;
use crate::{Failure, control, doctor};

/// Settings of the kernel that change how packets are received.
const KERNEL_SETTINGS: [&str; 12] = [
    "kernel/unprivileged_bpf_disabled",
    "net/core/bpf_jit_enable",
    "net/core/busy_poll",
    "net/core/dev_weight",
    "net/core/netdev_budget",
    "net/core/netdev_budget_usecs",
    "net/core/netdev_max_backlog",
    "net/core/rmem_max",
    "net/core/wmem_max",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/tcp_congestion_control",
    "vm/nr_hugepages",
];

/// Flags of `dump`.
#[derive(Args)]
#[command(after_help = "\
The file has versions, the findings of `tidegate doctor`, the daemon's report (`tidegate ss --json`), \
receive scheduling, interfaces, kernel settings and counters. It has IP addresses, names and process \
ids of programs, and the command line of the daemon; it has no packet, no file and no secret. What \
cannot be had is in the file as an error.")]
pub(crate) struct Dump {
    /// Write to this file [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Control socket of a server or daemon, as given to its --control; may be repeated
    #[arg(long, value_name = "SOCKET")]
    control: Vec<PathBuf>,
}

impl Dump {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let control: Map<String, Value> = self
            .control
            .iter()
            .map(|path| (path.display().to_string(), found(control::query(path))))
            .collect();
        let state = json!({
            "tidegate": { "version": env!("CARGO_PKG_VERSION"), "build": tidegate_program::BUILD_ID },
            "machine": machine(),
            "doctor": found(doctor::all_findings(&self.socket)),
            "daemon": found(DaemonReport::query(&self.socket)),
            "control": control,
            "interfaces": found(interfaces()),
            "kernel_settings": kernel_settings(),
            "softnet_stat": lines_of(Path::new("/proc/net/softnet_stat")),
        });
        let text = serde_json::to_string_pretty(&state)? + "\n";
        let Some(path) = &self.output else { return print(format_args!("{text}")) };
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        tracing::info!("wrote {}; read it before you pass it on", path.display());
        Ok(())
    }
}

/// A part, or the error for which it is not there.
fn found<T: Serialize, E: ToString>(part: Result<T, E>) -> Value {
    let part = part.map_err(|error| error.to_string());
    part.and_then(|part| serde_json::to_value(part).map_err(|error| error.to_string()))
        .unwrap_or_else(|error| json!({ "error": error }))
}

fn machine() -> Value {
    let uname = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    json!({
        "kernel": text(uname.release()),
        "kernel_build": text(uname.version()),
        "architecture": text(uname.machine()),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": lines_of(Path::new("/proc/meminfo")),
        "system": lines_of(Path::new("/etc/os-release")),
    })
}

fn interfaces() -> Result<Value, Failure> {
    let all = Interface::all()?;
    let rows = all.iter().map(|interface| {
        let folder = Path::new("/sys/class/net").join(&interface.name);
        let setting = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let read = |name: &str| setting(name).map(|text| text.trim().to_owned());
        let queues = |kind: &str| {
            let entries = fs::read_dir(folder.join("queues")).into_iter().flatten().flatten();
            entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(kind)).count()
        };
        json!({
            "name": interface.name,
            "driver": fs::read_link(folder.join("device/driver")).ok()
                .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())),
            "mtu": read("mtu"),
            "state": read("operstate"),
            "speed_mbps": read("speed"),
            "threaded": read("threaded"),
            "napi_defer_hard_irqs": read("napi_defer_hard_irqs"),
            "gro_flush_timeout": read("gro_flush_timeout"),
            "rx_queues": queues("rx-"),
            "tx_queues": queues("tx-"),
        })
    });
    Ok(rows.collect())
}

fn kernel_settings() -> Value {
    let setting = |name: &&str| {
        let value = fs::read_to_string(Path::new("/proc/sys").join(name));
        let value = value.map_or(Value::Null, |text| text.trim().into());
        (name.replace('/', "."), value)
    };
    Value::Object(KERNEL_SETTINGS.iter().map(setting).collect())
}

fn lines_of(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}
