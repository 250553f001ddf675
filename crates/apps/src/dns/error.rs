//! Errors and warnings about zone files, with their locations.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Location in a zone file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneFileLocation {
    /// Path of the zone file.
    pub path: PathBuf,
    /// Line, from 1; 0 for the whole file.
    pub line: usize,
    /// Column, from 1; 0 for the whole line.
    pub column: usize,
}

impl ZoneFileLocation {
    pub(super) fn at_line(path: &Path, line: usize) -> Self {
        ZoneFileLocation { path: path.to_owned(), line, column: 0 }
    }
}

impl fmt::Display for ZoneFileLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if self.column > 0 {
            write!(f, ":{}", self.column)?;
        }
        Ok(())
    }
}

/// Reason why the DNS server cannot start.
#[derive(Debug, Error)]
pub enum DnsError {
    /// No zone is configured.
    #[error("no zone to serve: give at least one zone file")]
    NoZones,
    /// The configured name of a zone is not a domain name.
    #[error("`{text}` is not a domain name: labels have 1 to 63 octets, names at most 255")]
    InvalidOrigin {
        /// Configured text.
        text: String,
    },
    /// A zone file cannot be read.
    #[error("cannot read zone file {}: {source}", path.display())]
    Read {
        /// Path of the zone file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A zone file violates the syntax of RFC 1035 section 5.
    #[error("{location}: {problem}")]
    Syntax {
        /// Location of the error.
        location: ZoneFileLocation,
        /// Description of the error: what was expected.
        problem: String,
    },
    /// The syntax of a zone file is correct, but its records do not form a valid zone.
    #[error("{location}: {problem}")]
    InvalidZone {
        /// Location of the error.
        location: ZoneFileLocation,
        /// Description of the error and what to do.
        problem: String,
    },
    /// Two files hold the same zone.
    #[error("zone {origin} is given twice: {} and {}; remove one", first.display(), second.display())]
    DuplicateZone {
        /// Name of the zone.
        origin: String,
        /// First file.
        first: PathBuf,
        /// Second file.
        second: PathBuf,
    },
    /// The prepared answers exceed the size of the tables.
    #[error("the zones are too large: more than 4 GiB of prepared answers; serve fewer zones")]
    TooLarge,
}

/// Irregularity in a zone file that does not stop the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Location of the irregularity.
    pub location: ZoneFileLocation,
    /// Description of the irregularity and how the server handles it.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: warning: {}", self.location, self.message)
    }
}
