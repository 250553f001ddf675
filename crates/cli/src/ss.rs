//! `tidegate ss`: the sockets of the applications attached to the daemon.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use tidegate_service::SocketState;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{DaemonReport, SocketReport};

use crate::Failure;
use crate::output::print_line;

/// Flags of `ss`.
#[derive(Args)]
pub(crate) struct Ss {
    /// Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Show only listening sockets
    #[arg(long, short)]
    listening: bool,
    /// Print the whole report as JSON
    #[arg(long)]
    json: bool,
}

impl Ss {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let report = DaemonReport::query(&self.socket)?;
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?)?;
            return Ok(());
        }
        print_line!(
            "{:<5} {:<12} {:>8} {:>5} {:>4}  {:<28} {:<28} PROGRAM",
            "PROTO",
            "STATE",
            "WAITING",
            "FULL",
            "CORE",
            "LOCAL",
            "PEER"
        )?;
        for app in &report.applications {
            let owner = &app.identity;
            let sockets =
                app.sockets.iter().filter(|socket| !self.listening || is_listening(socket));
            for socket in sockets {
                let SocketReport { phase, local, peer, waiting, fill_percent, .. } = socket;
                print_line!(
                    "{:<5} {:<12} {waiting:>8} {fill_percent:>4}% {:>4}  {:<28} {:<28} {} ({}, \
                     user {})",
                    if *phase == SocketState::Datagram { "udp" } else { "tcp" },
                    state(*phase),
                    app.core,
                    address_text(*local),
                    address_text(*peer),
                    owner.name,
                    owner.pid,
                    owner.uid,
                )?;
            }
        }
        let counted = report.drops.iter().filter(|drop| drop.1 > 0);
        let drops: Vec<String> =
            counted.map(|(reason, count)| format!("{reason} {count}")).collect();
        print_line!(
            "{} processes, {} connections, {} frames in, {} out, dropped: {}",
            // A process may have sockets on each core.
            report.applications.iter().map(|app| app.identity.pid).collect::<HashSet<_>>().len(),
            report.connections,
            report.received,
            report.transmitted,
            if drops.is_empty() { "none".to_owned() } else { drops.join(", ") }
        )?;
        Ok(())
    }
}

fn is_listening(socket: &SocketReport) -> bool {
    matches!(socket.phase, SocketState::Listening | SocketState::Datagram) && socket.peer.is_none()
}

fn state(phase: SocketState) -> &'static str {
    match phase {
        SocketState::Free => "FREE",
        SocketState::Datagram => "UNCONN",
        SocketState::Listening => "LISTEN",
        SocketState::Connecting => "SYN-SENT",
        SocketState::Connected => "ESTAB",
        SocketState::Over => "CLOSED",
    }
}

fn address_text(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "*".to_owned(), |address| address.to_string())
}
