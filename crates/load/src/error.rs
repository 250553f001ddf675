//! Errors of load generators.

use std::io;
use std::path::{Path, PathBuf};

/// Reason that a load could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A line of a query file is not a query.
    #[error("{}:{line}: {problem}; expected `name type`, as dnsperf reads it", path.display())]
    Query {
        /// Path of the query file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Description of the syntax error.
        problem: String,
    },
    /// The configuration is invalid, or the target does not take the load.
    #[error("{0}")]
    Config(String),
    /// No reply to the request for the target's hardware address.
    #[error(
        "no reply to {protocol} for {target} within {waited_ms} ms; is the host up? \
         Give the address with --mac to skip this step"
    )]
    Unresolved {
        /// `ARP` or `NDP`.
        protocol: &'static str,
        /// The address that was requested.
        target: std::net::IpAddr,
        /// Time waited, in milliseconds.
        waited_ms: u64,
    },
    /// A system call or a device failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl LoadError {
    /// Wraps an I/O error with the path of the file.
    pub(crate) fn file(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::File { path, source }
    }

    /// Like [`LoadError::io`], for errors of other libraries.
    pub(crate) fn io_other<E>(what: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let what = what.into();
        move |error| Self::Io { what, source: io::Error::other(error) }
    }

    /// Wraps a system error with the operation that failed.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source: source.into() }
    }
}
