//! Errors of experiments and load generators.

use std::io;
use std::path::{Path, PathBuf};

/// Reason that an experiment or a load could not be run.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A required executable is not installed.
    #[error("`{program}` is not installed; install it with: apt-get install {package}")]
    Missing {
        /// The missing executable.
        program: String,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// A command failed.
    #[error("`{command}` failed ({status}): {stderr}")]
    Command {
        /// The command line.
        command: String,
        /// Exit status.
        status: String,
        /// Its standard error output.
        stderr: String,
    },
    /// Missing privileges.
    #[error("{what} needs root: {hint}")]
    Permission {
        /// The operation that was refused.
        what: String,
        /// Suggested next step.
        hint: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The configuration is invalid, or a measurement with it failed.
    #[error("{0}")]
    Config(String),
    /// A server under test did not become ready, or exited early.
    #[error("{name} did not start: {detail}")]
    Server {
        /// Name of the server.
        name: String,
        /// Details, for example its last output.
        detail: String,
    },
    /// The program under test cannot be used.
    #[error(transparent)]
    Program(#[from] tidegate_program::BesideError),
    /// A load could not be generated.
    #[error(transparent)]
    Load(#[from] tidegate_load::LoadError),
    /// A system call or a device failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl LabError {
    /// Wraps an I/O error with the path of the file.
    pub fn file(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::File { path, source }
    }

    /// Like [`LabError::io`], for errors of other libraries.
    pub fn io_other<E>(what: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let what = what.into();
        move |error| Self::Io { what, source: io::Error::other(error) }
    }

    /// Wraps a system error with the operation that failed.
    pub fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source: source.into() }
    }
}
