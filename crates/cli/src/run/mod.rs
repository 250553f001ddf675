//! `tidegate run`: an unmodified program on Tidegate.

mod program;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use tidegate::gate::admission;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::Report;

use crate::Failure;
use crate::config;
use crate::gate::GateOptions;
use crate::host::{HostOptions, PortKind};

/// Where the library is, instead of beside this program.
const LIBRARY_VARIABLE: &str = "TIDEGATE_PRELOAD_LIBRARY";
const LIBRARY: &str = "libtidegate_preload.so";

/// Run an unmodified program on Tidegate.
#[derive(Args)]
pub(crate) struct Run {
    /// Run the stack inside the program, on its own calls, instead of attaching it to the
    /// daemon
    #[arg(long)]
    embedded: bool,
    /// The Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH, conflicts_with = "embedded")]
    socket: PathBuf,
    /// When not everything can be taken, known sources go before strangers; with --embedded
    #[arg(long, requires = "embedded")]
    admission: bool,
    /// Which sockets move to Tidegate: a TOML file with `listen = ["6379", "80-90", "udp:53"]`
    /// and `connect = ["192.0.2.0/24"]` [default: all but loopback]
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Refuse socket options that Tidegate does not have, instead of logging them
    #[arg(long)]
    strict: bool,
    /// Log to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Take what the flags leave open from this TOML file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    host: HostOptions,
    #[command(flatten)]
    gate: GateOptions,
    /// The program, with its arguments, after `--`
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Run {
    pub(crate) fn run(self) -> Result<(), Failure> {
        // What is wrong is said here, not in the middle of the program.
        let stack = if self.embedded { self.embedded()? } else { self.attached()? };
        let program = program::find(&self.program[0])?;
        program::check(&program)?;
        let library = library()?;
        let mut told = stack;
        told["strict"] = self.strict.into();
        for (name, path) in [("rules", self.rules), ("log", self.log)] {
            if let Some(path) = path {
                // The program may change its folder before it opens the file.
                told[name] = Value::String(absolute(&path)?);
            }
        }
        let mut command = Command::new(program);
        command.args(&self.program[1..]);
        command.env("TIDEGATE_RUN", told.to_string());
        command.env("LD_PRELOAD", with_others(&library));
        let error = command.exec();
        Err(format!("{}: {error}", self.program[0].display()).into())
    }

    /// The stack that runs inside the program.
    fn embedded(&self) -> Result<Value, Failure> {
        let host = config::over(self.host.clone(), self.config.as_deref())?;
        let gate = config::over(self.gate.clone(), self.config.as_deref())?;
        if host.port_kind() == PortKind::Kernel {
            return Err("--port kernel: start the program without `tidegate run`".into());
        }
        let settings = gate.settings()?;
        host.net_config(&settings)?;
        host.pin()?;
        Ok(json!({
            "host": host.host_config()?,
            "gate": settings.config(),
            "admission": self.admission.then(admission::Config::default),
        }))
    }

    /// The daemon that the program attaches to.
    fn attached(&self) -> Result<Value, Failure> {
        let host = config::over(self.host.clone(), self.config.as_deref())?;
        if !host.is_only_cpu()? {
            return Err("the port and its addresses are the daemon's: give them to `tidegate \
                        serve`, or add --embedded to run the stack inside the program"
                .into());
        }
        let is_shared = Report::ask(&self.socket)?.is_shared;
        host.pin()?;
        Ok(json!({ "socket": absolute(&self.socket)?, "shared": is_shared }))
    }
}

fn absolute(path: &Path) -> Result<String, Failure> {
    let path = std::path::absolute(path)?;
    let text = path.to_str().ok_or_else(|| format!("{}: not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

/// The library in front of what is loaded before C's already.
fn with_others(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// The library that is loaded into the program.
pub(crate) fn library() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from) {
        return match path.is_file() {
            true => Ok(std::path::absolute(path)?),
            false => Err(format!("{LIBRARY_VARIABLE}: {} is no file", path.display()).into()),
        };
    }
    let own = std::env::current_exe()?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(LIBRARY), folder.join("../lib/tidegate").join(LIBRARY)];
    let found = places.iter().find(|place| place.is_file());
    found.cloned().ok_or_else(|| {
        format!(
            "{LIBRARY} is neither in {} nor in {}: `make build` builds it, or set \
             {LIBRARY_VARIABLE} to its path",
            folder.display(),
            folder.join("../lib/tidegate").display()
        )
        .into()
    })
}
