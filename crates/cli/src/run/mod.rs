//! `tidegate run`: an unmodified application on Tidegate.

mod executable;
mod io_uring;
mod own_daemon;
mod placement;

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::DaemonReport;

use self::own_daemon::OwnDaemon;
use self::placement::{Placement, Request, StackPlace};
use crate::Failure;
use crate::config;
use crate::gate::GateOptions;
use crate::host::{HostOptions, IoKind};
use crate::output::print_line;

/// Environment variable with the path of the preload library, instead of the default paths.
const LIBRARY_VARIABLE: &str = "TIDEGATE_PRELOAD_LIBRARY";
const LIBRARY_NAME: &str = "libtidegate_preload.so";

/// Run an unmodified application on Tidegate.
#[derive(Args)]
pub(crate) struct Run {
    /// Embed the stack: run it inside the application, during the application's own calls,
    /// instead of attaching the application to the daemon [default: if a device or its addresses
    /// are given, and no --socket, and the application is none that serves from children]
    #[arg(long)]
    embedded: bool,
    /// Start a daemon for this application alone, which ends after it: for applications that serve
    /// from children, with a device and its addresses [default: for those known to do so]
    #[arg(long, conflicts_with_all = ["embedded", "socket"])]
    own_daemon: bool,
    /// Unix socket of the daemon [default: /run/tidegate/tidegate.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "embedded")]
    socket: Option<PathBuf>,
    /// Print where the stack of the application would run, and why; start nothing
    #[arg(long)]
    explain: bool,
    /// Admission control: under overload, known sources take precedence; for an embedded stack
    #[arg(long, conflicts_with = "socket")]
    admission: bool,
    /// Rules file (TOML): the sockets to move to Tidegate, with
    /// `listen = ["6379", "80-90", "udp:53"]` and `connect = ["192.0.2.0/24"]`
    /// [default: all but loopback]
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Refuse socket options that Tidegate does not support, instead of logging them
    #[arg(long)]
    strict: bool,
    /// Log to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Leave io_uring to the application, although Tidegate does not see its calls. By default the
    /// kernel refuses io_uring, and applications use other calls; started without CAP_SYS_ADMIN,
    /// the application gains no privileges from set-user-ID programs then
    #[arg(long)]
    allow_io_uring: bool,
    /// Configuration file (TOML). Flags take precedence
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    host: HostOptions,
    #[command(flatten)]
    gate: GateOptions,
    /// Application and its arguments, after `--`
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Run {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let host = config::merge_file(self.host.clone(), self.config.as_deref())?;
        let placement = self.placement(&host)?;
        // Errors are reported here, before the application starts.
        let stack = match placement.stack {
            StackPlace::Embedded => self.embedded_settings(&host)?,
            StackPlace::Attached => self.attached_settings(&host)?,
            StackPlace::OwnDaemon => self.own_daemon_settings(&host)?,
        };
        let program = executable::find(&self.program[0])?;
        executable::check(&program)?;
        if self.explain {
            print_line!("{}", placement.explain())?;
            return Ok(());
        }
        let library = library()?;
        let mut run_settings = stack;
        run_settings["strict"] = self.strict.into();
        if let Some(path) = &self.rules {
            run_settings["rules"] = read_rules(path)?;
        }
        if let Some(path) = &self.log {
            // The application may change its working directory before it opens the file.
            run_settings["log"] = Value::String(absolute(path)?);
        }
        let log = Log::open(run_settings["log"].as_str())?;
        let own_daemon = match placement.stack {
            StackPlace::OwnDaemon => {
                let config = self.config.as_deref();
                Some(OwnDaemon::start(&host, &self.gate, self.admission, config)?)
            }
            StackPlace::Embedded | StackPlace::Attached => None,
        };
        if let Some(daemon) = &own_daemon {
            run_settings["socket"] = Value::String(absolute(&daemon.socket)?);
        }
        if !self.allow_io_uring {
            refuse_io_uring(&log);
        }
        let mut command = Command::new(program);
        command.args(&self.program[1..]);
        command.env("TIDEGATE_RUN", run_settings.to_string());
        command.env("LD_PRELOAD", preload_list(&library));
        own_daemon.map(|daemon| daemon.leave_to(&mut command)).transpose()?;
        let error = command.exec();
        Err(format!("{}: {error}", self.program[0].display()).into())
    }

    fn placement(&self, host: &HostOptions) -> Result<Placement, Failure> {
        Ok(Placement::choose(Request {
            is_embedded: self.embedded,
            owns_daemon: self.own_daemon,
            program: Path::new(&self.program[0]),
            socket: self.socket.as_deref(),
            has_device: !host.is_unset_except_cpu()?,
            default_socket: Path::new(DEFAULT_PATH),
        }))
    }

    /// Settings of the preload library for an application with a daemon of its own, whose socket is
    /// still to be added.
    fn own_daemon_settings(&self, host: &HostOptions) -> Result<Value, Failure> {
        if host.is_unset_except_cpu()? {
            return Err("--own-daemon needs the device and addresses of the daemon: give --iface \
                        and --address, or --shared"
                .into());
        }
        Ok(json!({ "shared": host.is_shared() }))
    }

    fn socket(&self) -> &Path {
        self.socket.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// Settings of the preload library for a stack embedded in the application.
    fn embedded_settings(&self, host: &HostOptions) -> Result<Value, Failure> {
        let gate = config::merge_file(self.gate.clone(), self.config.as_deref())?;
        if host.io_kind() == IoKind::Kernel {
            return Err("--io kernel: start the application without `tidegate run`".into());
        }
        let settings = gate.settings()?;
        host.net_config(&settings)?;
        host.pin_to_given(0)?;
        Ok(json!({
            "host": host.host_config()?,
            "gate": settings.config(),
            "classes": config::packet_classes(self.admission, self.config.as_deref())?,
            "restorer": std::env::current_exe()?.to_str(),
        }))
    }

    /// Settings of the preload library for an application attached to the daemon.
    fn attached_settings(&self, host: &HostOptions) -> Result<Value, Failure> {
        if !host.is_unset_except_cpu()? {
            return Err("the device and its addresses are the daemon's: give them to `tidegate \
                        daemon`, or leave --socket out to run the stack inside the application"
                .into());
        }
        if self.admission {
            return Err("admission is the daemon's: give --admission to `tidegate daemon`, or a \
                        device to this command, to run the stack inside the application"
                .into());
        }
        let report = DaemonReport::query(self.socket()).map_err(|error| match self.socket {
            Some(_) => Failure::from(error),
            None => format!(
                "{error}; or give --iface and --address to run the stack inside the application"
            )
            .into(),
        })?;
        let is_shared = report.is_shared;
        host.pin_to_given(0)?;
        Ok(json!({ "socket": absolute(self.socket())?, "shared": is_shared }))
    }
}

/// Log of the application that is about to start.
enum Log {
    StandardError,
    File(PathBuf),
}

impl Log {
    /// Checks that the log can be written.
    fn open(path: Option<&str>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self::StandardError) };
        let log = Self::File(path.into());
        log.append("").map_err(|error| {
            format!("--log {path}: {error}; choose a file that the application may write")
        })?;
        Ok(log)
    }

    fn append(&self, text: &str) -> std::io::Result<()> {
        match self {
            Self::StandardError => std::io::stderr().write_all(text.as_bytes()),
            Self::File(path) => {
                let mut file = OpenOptions::new().create(true).append(true).open(path)?;
                file.write_all(text.as_bytes())
            }
        }
    }

    /// Writes a line as the preload library does. A failed write is ignored: it must not stop the
    /// application.
    fn write(&self, line: &str) {
        let _ = self.append(&format!("tidegate: {line}\n"));
    }
}

fn refuse_io_uring(log: &Log) {
    match io_uring::refuse() {
        Ok(false) => {}
        Ok(true) => log.write(
            "io_uring is refused, which without CAP_SYS_ADMIN takes new privileges away: \
             set-user-ID programs that this application starts run without theirs. \
             --allow-io-uring changes that",
        ),
        Err(error) => log.write(&format!(
            "io_uring cannot be refused: {error}. Sockets that this application uses by io_uring \
             do not work"
        )),
    }
}

/// Reads a rules file for the preload library, which parses its entries.
///
/// # Errors
/// When the file cannot be read, or is not TOML.
fn read_rules(path: &Path) -> Result<Value, Failure> {
    let fail = |error: &dyn std::fmt::Display| format!("--rules {}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    let rules: toml::Table = toml::from_str(&text).map_err(|error| fail(&error))?;
    Ok(serde_json::to_value(rules)?)
}

fn absolute(path: &Path) -> Result<String, Failure> {
    let path = std::path::absolute(path)?;
    let text = path.to_str().ok_or_else(|| format!("{}: not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

/// Value of `LD_PRELOAD`: the library, then the libraries that were in it already.
fn preload_list(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// Returns the path of the preload library, which is loaded into the application.
pub(crate) fn library() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from) {
        return match path.is_file() {
            true => Ok(std::path::absolute(path)?),
            false => Err(format!("{LIBRARY_VARIABLE}: {} is not a file", path.display()).into()),
        };
    }
    let executable_path = std::env::current_exe()?;
    let folder = executable_path.parent().unwrap_or(Path::new("/"));
    library_of(folder).ok_or_else(|| {
        format!(
            "{LIBRARY_NAME} is neither in {} nor in {}: `make build` builds it, or set \
             {LIBRARY_VARIABLE} to its path",
            folder.display(),
            folder.join("../lib/tidegate").display()
        )
        .into()
    })
}

/// Library of the program in `folder`: beside the program in a build, in a folder of its own in an
/// installation.
fn library_of(folder: &Path) -> Option<PathBuf> {
    let candidates = [folder.join(LIBRARY_NAME), folder.join("../lib/tidegate").join(LIBRARY_NAME)];
    candidates.into_iter().find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_found_in_a_build_and_in_an_installation() {
        let prefix = tempfile::tempdir().unwrap();
        let (bin, lib) = (prefix.path().join("bin"), prefix.path().join("lib/tidegate"));
        for folder in [&bin, &lib] {
            std::fs::create_dir_all(folder).unwrap();
        }
        assert_eq!(library_of(&bin), None);
        std::fs::write(lib.join(LIBRARY_NAME), "").unwrap();
        let installed = library_of(&bin).unwrap();
        assert_eq!(
            installed.canonicalize().unwrap(),
            lib.join(LIBRARY_NAME).canonicalize().unwrap()
        );
        std::fs::write(bin.join(LIBRARY_NAME), "").unwrap();
        assert_eq!(library_of(&bin), Some(bin.join(LIBRARY_NAME)));
    }
}
