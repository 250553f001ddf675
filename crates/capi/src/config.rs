//! Configuration file of the C library (TOML): where the stack is.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tidegate::gate::{self, Settings, admission, transmit};
use tidegate::host::{HostConfig, PacketClasses};
use tidegate::{NetConfig, OpenError};

/// Socket of the daemon unless the program names another.
pub(crate) const DEFAULT_SOCKET: &str = "/run/tidegate/tidegate.sock";

/// Configuration file. The sections are those of `tidegate`'s own file.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct ConfigFile {
    /// Unix socket of a daemon.
    socket: Option<PathBuf>,
    /// Name of this program in the lists of the daemon.
    name: Option<String>,
    host: Option<HostSection>,
    gate: gate::Config,
    admission: Option<admission::Config>,
    transmit: Option<transmit::Config>,
}

/// Host of an embedded stack. The keys are the names of the flags.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
struct HostSection {
    io: Option<String>,
    iface: Option<String>,
    address: Vec<String>,
    shared: bool,
    gateway: Vec<String>,
    probe: Option<String>,
    mac: Option<String>,
    vlan: Option<u16>,
    xdp_mode: Option<String>,
    queue: Vec<u32>,
    busy_poll: Option<u16>,
    segmentation: bool,
    frames: Option<u32>,
    no_hugepages: bool,
    capture: Option<PathBuf>,
    trace: bool,
}

/// Place of the stack.
#[derive(Clone, Debug)]
pub(crate) enum StackLocation {
    /// In the daemon that listens on the Unix socket.
    Daemon { socket: PathBuf, name: String },
    /// In this process.
    Embedded(Box<EmbeddedHost>),
}

/// Host of an embedded stack.
#[derive(Clone, Debug, Default)]
pub(crate) struct EmbeddedHost {
    pub(crate) host: HostConfig,
    pub(crate) gate: Settings,
    pub(crate) classes: PacketClasses,
}

impl EmbeddedHost {
    /// Configuration of the stack.
    ///
    /// # Errors
    /// The text names the field at fault.
    pub(crate) fn net_config(&self) -> Result<NetConfig, String> {
        let config = self.host.net_config(&self.gate).map_err(|error| error.to_string())?;
        Ok(self.classes.add_to(config))
    }
}

/// Name of the program, as the kernel knows it.
fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end().to_owned()
}

impl StackLocation {
    /// Daemon on this socket.
    pub(crate) fn daemon(socket: &Path) -> Self {
        Self::Daemon { socket: socket.to_owned(), name: program_name() }
    }

    /// Place that the environment names: `TIDEGATE_CONFIG` a configuration file, or
    /// `TIDEGATE_SOCKET` the socket of a daemon. Otherwise the usual daemon.
    ///
    /// # Errors
    /// As [`StackLocation::read`].
    pub(crate) fn of_environment() -> Result<Self, String> {
        if let Some(path) = std::env::var_os("TIDEGATE_CONFIG") {
            return Self::read(Path::new(&path));
        }
        let socket = std::env::var_os("TIDEGATE_SOCKET");
        Ok(Self::daemon(Path::new(&socket.unwrap_or_else(|| DEFAULT_SOCKET.into()))))
    }

    /// Place that a configuration file names.
    ///
    /// # Errors
    /// The text has the path of the file, and what is wrong.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let fail = |error: &dyn Display| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
        Self::parse(&text).map_err(|error| fail(&error))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: ConfigFile = toml::from_str(text).map_err(|error| error.to_string())?;
        match (file.socket, file.host) {
            (Some(socket), None) => {
                let name = file.name.unwrap_or_else(program_name);
                Ok(Self::Daemon { socket, name })
            }
            (None, Some(host)) => {
                let gate = Settings::new(file.gate).map_err(|error| error.to_string())?;
                let host = host.host_config()?;
                if let Some(transmit) = &file.transmit {
                    transmit.check().map_err(|error| error.to_string())?;
                }
                let classes = PacketClasses { admission: file.admission, transmit: file.transmit };
                Ok(Self::Embedded(Box::new(EmbeddedHost { host, gate, classes })))
            }
            _ => {
                Err("give either `socket` (a daemon) or section [host] (an embedded stack)".into())
            }
        }
    }
}

impl HostSection {
    fn host_config(self) -> Result<HostConfig, String> {
        let mut host = HostConfig::default();
        if let Some(io) = &self.io {
            host.io = value("io", io)?;
        }
        if let Some(probe) = &self.probe {
            host.probe = value("probe", probe)?;
        }
        if let Some(mode) = &self.xdp_mode {
            host.xdp_mode = value("xdp-mode", mode)?;
        }
        host.mac = self.mac.as_deref().map(|mac| value("mac", mac)).transpose()?;
        host.addresses = values("address", &self.address)?;
        host.gateways = values("gateway", &self.gateway)?;
        host.iface = self.iface;
        host.shared = self.shared;
        host.vlan = self.vlan;
        host.queues = self.queue;
        host.busy_poll = self.busy_poll;
        host.segmentation = self.segmentation;
        host.frames = self.frames;
        host.no_hugepages = self.no_hugepages;
        host.capture = self.capture;
        host.trace = self.trace;
        Ok(host)
    }
}

/// Value of a key.
///
/// # Errors
/// The text has the key and the value.
pub(crate) fn value<T: std::str::FromStr<Err: Display>>(
    key: &str,
    text: &str,
) -> Result<T, String> {
    text.parse().map_err(|error| format!("{key} = {text:?}: {error}"))
}

fn values<T: std::str::FromStr<Err: Display>>(key: &str, all: &[String]) -> Result<Vec<T>, String> {
    all.iter().map(|text| value(key, text)).collect()
}

/// Text for the error of opening an embedded stack.
pub(crate) fn open_error(error: &OpenError) -> String {
    match error.missing_capabilities() {
        Some(why) if !why.missing.is_empty() => format!(
            "{}. A program without these privileges can attach to a daemon (`tidegate daemon`), \
             which opens the device itself",
            why.reason()
        ),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_a_daemon_or_a_host() {
        let parse = StackLocation::parse;
        assert!(matches!(
            parse("socket = '/run/x'\nname = 'p'"),
            Ok(StackLocation::Daemon { name, .. }) if name == "p"
        ));
        let text = "[host]\niface = 'eth0'\nio = 'packet'\naddress = ['192.0.2.7/24']\n";
        let Ok(StackLocation::Embedded(embedded)) = parse(text) else { panic!("embedded") };
        assert_eq!(embedded.host.iface.as_deref(), Some("eth0"));
        assert!(embedded.net_config().is_ok());
        let classes = "[admission]\n[transmit]\nceiling-bps = 1000000\n";
        let Ok(StackLocation::Embedded(embedded)) = parse(&format!("{text}{classes}")) else {
            panic!("embedded")
        };
        assert!(embedded.classes.admission.is_some() && embedded.classes.transmit.is_some());
        for (text, part) in [
            ("", "either `socket`"),
            ("[host]\nadress = []", "adress"),
            ("[host]\naddress = ['x']", "address = \"x\""),
            ("socket = 'a'\n[host]\n", "either"),
            ("[host]\n[transmit]\nceiling-bps = 0", "ceiling-bps"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
