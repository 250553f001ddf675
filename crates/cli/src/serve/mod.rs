//! `tidegate daemon`: a server on Tidegate, or on kernel sockets for comparison.

mod common;
mod dns;
mod echo;
mod http;
mod limits;
mod nfs;

use clap::{Args, Subcommand};

pub(crate) use self::dns::check_dns;
pub(crate) use self::echo::check_echo;
pub(crate) use self::http::check_http;
pub(crate) use self::nfs::check_nfs;
use crate::Failure;
use crate::config::{SectionFlags, flags_of};

/// Servers.
#[derive(Args)]
pub(crate) struct Serve {
    #[command(subcommand)]
    server: Server,
}

/// One server.
#[derive(Subcommand)]
enum Server {
    /// Authoritative DNS server
    Dns(Box<dns::DnsCommand>),
    /// UDP or TCP echo server
    Echo(Box<echo::EchoCommand>),
    /// HTTP/1.1 server for static files, with a small API
    Http(Box<http::HttpCommand>),
    /// NFS version 3 server: a directory, read-only, over TCP
    Nfs(Box<nfs::NfsCommand>),
}

/// Sections of the servers, with their flags.
pub(crate) fn section_flags() -> [SectionFlags; 4] {
    [
        flags_of::<dns::DnsOptions>(),
        flags_of::<echo::EchoOptions>(),
        flags_of::<http::HttpOptions>(),
        flags_of::<nfs::NfsOptions>(),
    ]
}

impl Serve {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.server {
            Server::Dns(command) => command.run(),
            Server::Echo(command) => command.run(),
            Server::Http(command) => command.run(),
            Server::Nfs(command) => command.run(),
        }
    }
}
