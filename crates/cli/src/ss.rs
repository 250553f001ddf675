//! `tidegate ss`: the sockets of programs that are attached to the daemon.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use tidegate_service::Phase;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::{Report, SocketReport};

use crate::Failure;

/// Flags of `ss`.
#[derive(Args)]
pub(crate) struct Ss {
    /// The Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Only those that listen
    #[arg(long, short)]
    listening: bool,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

impl Ss {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let report = Report::ask(&self.socket)?;
        if self.json {
            println!("{}", serde_json::to_string(&report)?);
            return Ok(());
        }
        println!(
            "{:<5} {:<12} {:>8} {:>5} {:>4}  {:<28} {:<28} PROGRAM",
            "PROTO", "STATE", "WAITING", "FULL", "CORE", "LOCAL", "PEER"
        );
        for app in &report.applications {
            let owner = &app.identity;
            let shown = app.sockets.iter().filter(|socket| !self.listening || listens(socket));
            for socket in shown {
                let SocketReport { phase, local, peer, waiting, fill_percent, .. } = socket;
                println!(
                    "{:<5} {:<12} {waiting:>8} {fill_percent:>4}% {:>4}  {:<28} {:<28} {} ({}, \
                     user {})",
                    if *phase == Phase::Datagram { "udp" } else { "tcp" },
                    state(*phase),
                    app.core,
                    text(*local),
                    text(*peer),
                    owner.name,
                    owner.pid,
                    owner.uid,
                );
            }
        }
        let drops: Vec<String> =
            report.drops.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        println!(
            "{} programs, {} connections, {} frames in, {} out, dropped: {}",
            // One may have sockets on each core.
            report.applications.iter().map(|app| app.identity.pid).collect::<HashSet<_>>().len(),
            report.connections,
            report.received,
            report.transmitted,
            if drops.is_empty() { "none".to_owned() } else { drops.join(", ") }
        );
        Ok(())
    }
}

fn listens(socket: &SocketReport) -> bool {
    matches!(socket.phase, Phase::Listening | Phase::Datagram) && socket.peer.is_none()
}

fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Free => "free",
        Phase::Datagram => "bound",
        Phase::Listening => "listening",
        Phase::Connecting => "connecting",
        Phase::Connected => "connected",
        Phase::Over => "over",
    }
}

fn text(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "*".to_owned(), |address| address.to_string())
}
