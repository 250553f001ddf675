//! Settings of `tidegate run`, and the stack of this process.

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;
use tidegate::device::interface_settings::set_restorer;
use tidegate::gate::{Config, Settings};
use tidegate::host::{HostConfig, PacketClasses};
use tidegate::{Net, OpenError};

use crate::rules::{RuleLists, Rules};
use crate::{log, own_fds};

/// Variable that `tidegate run` sets: its settings as JSON.
const SETTINGS_VAR: &str = "TIDEGATE_RUN";

/// Settings of `tidegate run`, as encoded in the variable.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct EncodedSettings {
    /// Configuration of an embedded stack.
    host: Option<HostConfig>,
    #[serde(default)]
    gate: Config,
    #[serde(default)]
    classes: PacketClasses,
    /// Program that restores the settings of the interface if this process is killed.
    restorer: Option<PathBuf>,
    /// Unix socket of the daemon, for an attached stack.
    socket: Option<PathBuf>,
    /// True when the daemon uses the kernel's addresses.
    #[serde(default)]
    shared: bool,
    rules: Option<RuleLists>,
    #[serde(default)]
    strict: bool,
    log: Option<PathBuf>,
}

struct RunSettings {
    stack: StackLocation,
    rules: Rules,
    is_strict: bool,
}

/// Location of the stack.
enum StackLocation {
    /// Embedded in this process.
    Embedded { host: Box<HostConfig>, gate: Settings, classes: PacketClasses },
    /// In the daemon that listens on the Unix socket.
    Attached { socket: PathBuf, is_shared: bool },
}

static SETTINGS: OnceLock<Option<RunSettings>> = OnceLock::new();
/// The stack, or the `errno` of its socket calls.
static NET: OnceLock<Result<Net, i32>> = OnceLock::new();
/// True in a forked child of a process with an embedded stack.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

fn settings() -> Option<&'static RunSettings> {
    SETTINGS.get_or_init(read_settings).as_ref()
}

fn read_settings() -> Option<RunSettings> {
    let text = std::env::var(SETTINGS_VAR).ok()?;
    own_fds::hide();
    match parse_settings(&text) {
        Ok(settings) => Some(settings),
        Err(error) => {
            log::write(&format!(
                "{SETTINGS_VAR}: {error}; start the application with `tidegate run`"
            ));
            None
        }
    }
}

fn parse_settings(text: &str) -> Result<RunSettings, String> {
    let encoded: EncodedSettings = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if let Some(path) = &encoded.log
        && let Err(error) = log::use_file(path)
    {
        // The sockets move all the same.
        log::write(&format!(
            "--log {}: {error}; standard error is used instead: choose a file that the \
             application may write",
            path.display()
        ));
    }
    if let Some(program) = encoded.restorer {
        set_restorer(program);
    }
    let stack = match (encoded.host, encoded.socket) {
        (Some(host), None) => {
            let gate = Settings::new(encoded.gate).map_err(|error| error.to_string())?;
            StackLocation::Embedded { host: Box::new(host), gate, classes: encoded.classes }
        }
        (None, Some(socket)) => StackLocation::Attached { socket, is_shared: encoded.shared },
        _ => return Err("expected either `host` (embedded stack) or `socket` (daemon)".to_owned()),
    };
    Ok(RunSettings {
        stack,
        rules: encoded.rules.as_ref().map(Rules::parse).transpose()?.unwrap_or_default(),
        is_strict: encoded.strict,
    })
}

/// Rules for moving sockets; `None` when no socket moves.
pub(crate) fn rules() -> Option<&'static Rules> {
    settings().map(|start| &start.rules)
}

/// True when the stack is in a daemon, whether attached yet or not.
pub(crate) fn uses_daemon() -> bool {
    settings().is_some_and(|start| matches!(start.stack, StackLocation::Attached { .. }))
}

/// True when the stack is in a daemon that uses the kernel's addresses.
pub(crate) fn uses_shared_daemon() -> bool {
    settings()
        .is_some_and(|start| matches!(start.stack, StackLocation::Attached { is_shared: true, .. }))
}

/// True when the stack uses the kernel's addresses, whether opened yet or not.
pub(crate) fn uses_kernel_addresses() -> bool {
    settings().is_some_and(|start| match &start.stack {
        StackLocation::Embedded { host, .. } => host.shared,
        StackLocation::Attached { is_shared, .. } => *is_shared,
    })
}

/// True when unsupported calls shall fail (`--strict`).
pub(crate) fn is_strict() -> bool {
    settings().is_some_and(|start| start.is_strict)
}

/// Stack of this process; the first call opens the stack and then calls `on_opened`.
///
/// # Errors
/// `ENETDOWN` when the stack cannot be opened, and `EADDRNOTAVAIL` when another host uses an address
/// of an embedded stack; both are logged. `EIO` in a forked child of a
/// process with an embedded stack, whose memory is the parent's.
pub(crate) fn open(on_opened: fn()) -> io::Result<&'static Net> {
    if is_child() {
        return Err(child_error());
    }
    let opened = NET.get_or_init(|| {
        let net = open_stack().map_err(|error| {
            log::write(&error);
            libc::ENETDOWN
        })?;
        // At once for an attached stack: its addresses are the daemon's.
        net.wait_for_addresses().map_err(|error| {
            log::write(&error.to_string());
            libc::EADDRNOTAVAIL
        })?;
        on_opened();
        let capabilities = net.capabilities();
        let (kind, detail) = (capabilities.kind, capabilities.detail);
        log::write(&format!("this application now uses Tidegate: {kind} ({detail})"));
        Ok(net)
    });
    opened.as_ref().map_err(|&errno| io::Error::from_raw_os_error(errno))
}

fn open_stack() -> Result<Net, String> {
    let settings = settings().ok_or("no settings: start the application with `tidegate run`")?;
    match &settings.stack {
        StackLocation::Embedded { host, gate, classes } => {
            let config = host.net_config(gate).map_err(|error| error.to_string())?;
            // Each socket that moves leaves a kernel socket on its port.
            let config = classes.add_to(config).kernel_ports_bound(true);
            let net = own_fds::with_low_numbers_taken(|| Net::open(config));
            net.map_err(|error| embedded_error(&error))
        }
        StackLocation::Attached { socket, .. } => {
            // The name of the process, which may differ from that of its file.
            let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
            let net = Net::attach(socket, name.trim_end());
            net.map_err(|error| error.to_string())
        }
    }
}

/// Text for the error of opening an embedded stack. The advice for missing privileges is of this
/// application: the library is loaded into no executable with file capabilities, and the
/// application may have given up what it was started with.
fn embedded_error(error: &OpenError) -> String {
    match error.missing_capabilities() {
        Some(why) if !why.missing.is_empty() => format!(
            "the application's first socket opens the stack, but {}. An application that is started \
             without these privileges, or gives them up before its first socket, can attach to a \
             daemon (`tidegate daemon`), which opens the device itself",
            why.reason()
        ),
        _ => error.to_string(),
    }
}

/// Stack of this process, if it is open.
#[inline]
pub(crate) fn opened_net() -> Option<&'static Net> {
    NET.get()?.as_ref().ok()
}

/// True in a forked child of a process with an embedded stack.
#[inline]
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Records that this process is a forked child of a process with an embedded stack.
pub(crate) fn set_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Error of a socket call in such a child (`EIO`); logs an explanation once.
pub(crate) fn child_error() -> io::Error {
    log::write_once(
        "a forked child uses a socket of its parent: only the parent can use an embedded stack, \
         and a child can only close it. Start the application with `tidegate run --own-daemon`, or \
         run the application as one process (nginx: `daemon off; master_process off;`)",
    );
    io::Error::from_raw_os_error(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_move_although_the_log_cannot_be_written() {
        let settings = r#"{ "socket": "/run/daemon.sock", "log": "/nonexistent/folder/log" }"#;
        assert!(parse_settings(settings).is_ok());
    }
}
