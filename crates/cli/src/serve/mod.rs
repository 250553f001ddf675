//! `tidegate serve`: the daemon for other programs, or a server on Tidegate or on
//! kernel sockets to compare.

mod common;
mod daemon;
mod dns;
mod echo;
mod http;
mod privileges;

use clap::{Args, Subcommand};

use crate::Failure;

/// What is said of them in the help.
const PRIVILEGES: &str = "Once the daemon serves it gives up every privilege that it needs no \
more. It keeps CAP_NET_ADMIN and CAP_BPF with --port xdp, and CAP_NET_RAW and CAP_IPC_LOCK to open \
that port again if an upgrade fails; CAP_NET_BIND_SERVICE too with --shared; and none with --port \
packet, tap and dpdk (but DPDK has threads of its own, which keep theirs). `tidegate upgrade` \
replaces a daemon with no connection lost.";

/// The daemon, or a server.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, after_long_help = PRIVILEGES)]
pub(crate) struct Serve {
    #[command(subcommand)]
    server: Option<Server>,
    #[command(flatten)]
    daemon: daemon::DaemonCommand,
}

/// Servers.
#[derive(Subcommand)]
enum Server {
    /// An authoritative DNS server
    Dns(Box<dns::DnsCommand>),
    /// A UDP or TCP server that sends back what it gets
    Echo(Box<echo::EchoCommand>),
    /// An HTTP/1.1 server for static files, with a small API
    Http(Box<http::HttpCommand>),
}

impl Serve {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.server {
            None => self.daemon.run(),
            Some(Server::Dns(command)) => command.run(),
            Some(Server::Echo(command)) => command.run(),
            Some(Server::Http(command)) => command.run(),
        }
    }
}
