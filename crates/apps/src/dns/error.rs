//! What can be wrong with a zone file, said so that it can be mended.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A place in a zone file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1; 0 when the whole file is meant.
    pub line: usize,
    /// The column, from 1; 0 when the whole line is meant.
    pub column: usize,
}

impl Place {
    pub(super) fn line(path: &Path, line: usize) -> Self {
        Place { path: path.to_owned(), line, column: 0 }
    }
}

impl fmt::Display for Place {
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

/// Why the DNS server cannot start.
#[derive(Debug, Error)]
pub enum DnsError {
    /// No zone was configured.
    #[error("no zone to serve: give at least one zone file")]
    NoZones,
    /// The name of a zone cannot be a domain name.
    #[error("`{text}` is not a domain name: labels have 1 to 63 octets, names at most 255")]
    Origin {
        /// What was given.
        text: String,
    },
    /// A zone file could not be read.
    #[error("cannot read zone file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A zone file breaks the syntax of RFC 1035 section 5.
    #[error("{place}: {problem}")]
    Syntax {
        /// Where.
        place: Place,
        /// What was expected.
        problem: String,
    },
    /// A zone file is well written, but what it says makes no zone.
    #[error("{place}: {problem}")]
    Zone {
        /// Where.
        place: Place,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Two files hold the same zone.
    #[error("zone {origin} is given twice: {} and {}", first.display(), second.display())]
    Twice {
        /// The zone.
        origin: String,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// The prepared answers do not fit the tables.
    #[error("the zones are too large: more than 4 GiB of prepared answers")]
    TooLarge,
}

/// Something odd in a zone file that does not stop the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Where.
    pub place: Place,
    /// What is odd and what the server does about it.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: warning: {}", self.place, self.message)
    }
}
