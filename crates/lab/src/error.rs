//! What can go wrong around an experiment.

use std::io;
use std::path::{Path, PathBuf};

/// Why an experiment or a load could not be run.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program that is needed is not installed.
    #[error("`{program}` is not installed; install it with: apt-get install {package}")]
    Missing {
        /// The program that was looked for.
        program: String,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// A program ran and failed.
    #[error("`{command}` failed ({status}): {stderr}")]
    Command {
        /// The command line.
        command: String,
        /// How it ended.
        status: String,
        /// What it wrote on standard error.
        stderr: String,
    },
    /// The user may not do this.
    #[error("{what} needs root: {hint}")]
    Permission {
        /// What was tried.
        what: String,
        /// The next step.
        hint: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line of a query file is not a query.
    #[error("{}:{line}: {problem}; expected `name type`, as dnsperf reads it", path.display())]
    Query {
        /// Which file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The configuration cannot be run.
    #[error("{0}")]
    Config(String),
    /// A server under test did not become ready, or ended early.
    #[error("{name} did not start: {detail}")]
    Server {
        /// Which server.
        name: String,
        /// What it said.
        detail: String,
    },
    /// Nobody answered for the target's hardware address.
    #[error(
        "no answer to {protocol} for {target} in {waited_ms} ms; is it up on this link? \
         Give the address with --mac to go without"
    )]
    Unresolved {
        /// `ARP` or `NDP`.
        protocol: &'static str,
        /// Who was asked for.
        target: std::net::IpAddr,
        /// How long we waited.
        waited_ms: u64,
    },
    /// A system call or a port failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

impl LabError {
    /// Wraps a file error with its path.
    pub fn file(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::File { path, source }
    }

    /// As [`LabError::io`], for errors of other libraries.
    pub fn io_other<E>(what: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let what = what.into();
        move |error| Self::Io { what, source: io::Error::other(error) }
    }

    /// Wraps a system error with what was being done.
    pub fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source: source.into() }
    }
}
