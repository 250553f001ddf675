//! `tidegate ss`: the sockets of the applications attached to the daemon, or of a server, with the
//! options and columns of iproute2's `ss`.

mod filter;
mod tcp_details;

use std::collections::HashSet;
use std::net::SocketAddr;

use clap::Args;
use tidegate_service::SocketState;
use tidegate_service::daemon::{ApplicationReport, DaemonReport, SocketReport};

use self::filter::Filter;
use crate::Failure;
use crate::output::print_line;
use crate::report_source::ReportSource;

/// Flags of `ss`.
#[derive(Args)]
#[command(
    override_usage = "tidegate ss [OPTIONS] [FILTER]...",
    after_help = "\
Without --all and --listening only connected sockets are shown.

Filters, as of iproute2's ss:
  state STATE, exclude STATE   established, syn-sent, listening, closed, unconnected, connected, all
  sport = :PORT, dport = :PORT also with !=, <, >, <= and >=
  src NETWORK[:PORT], dst NETWORK[:PORT]
  and, or, not, ( )

Examples:
  tidegate ss -tln                     the listeners
  tidegate ss -tp state established    the connections with their programs
  tidegate ss -ti --control /run/http.ctl
                                       the connections of a server, with round trips and windows
  tidegate ss -t '( dport = :443 or dport = :80 )' and dst 192.0.2.0/24"
)]
pub(crate) struct Ss {
    #[command(flatten)]
    source: ReportSource,
    /// Show TCP sockets; with neither -t nor -u both are shown
    #[arg(long, short)]
    tcp: bool,
    /// Show UDP sockets
    #[arg(long, short)]
    udp: bool,
    /// Show only listeners and unconnected UDP sockets
    #[arg(long, short)]
    listening: bool,
    /// Show listeners, unconnected sockets and connections
    #[arg(long, short, conflicts_with = "listening")]
    all: bool,
    /// Show addresses and ports as numbers, which they always are
    #[arg(long, short)]
    numeric: bool,
    /// Show the program of each socket
    #[arg(long, short)]
    processes: bool,
    /// Show user, network core and fill level of the receive queue
    #[arg(long, short)]
    extended: bool,
    /// Show congestion window, round trips, retransmissions and delivery rate of connections
    #[arg(long, short)]
    info: bool,
    /// Show only IPv4 sockets
    #[arg(long, short = '4', conflicts_with = "ipv6")]
    ipv4: bool,
    /// Show only IPv6 sockets
    #[arg(long, short = '6')]
    ipv6: bool,
    /// Do not print the heading
    #[arg(long, short = 'H')]
    no_header: bool,
    /// Print a summary of the daemon instead of the sockets
    #[arg(long, short)]
    summary: bool,
    /// Print the whole report as JSON
    #[arg(long)]
    json: bool,
    /// State, address and port of the sockets to show
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,
}

impl Ss {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let filter = Filter::parse(&self.filter)?;
        let report = self.source.query()?;
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?)?;
            return Ok(());
        }
        if self.summary {
            return print_summary(&report);
        }
        // As of iproute2's ss: a column of the protocol only if there are several.
        let has_protocol = self.tcp == self.udp;
        if !self.no_header {
            let mut row = ["Netid", "State", "Recv-Q", "Local Address:Port", "Peer Address:Port"]
                .map(str::to_owned);
            let process = if self.processes { "Process" } else { "" };
            print_row(&mut row, has_protocol, process)?;
        }
        for app in &report.applications {
            for socket in app.sockets.iter().filter(|socket| self.shows(socket, &filter)) {
                let mut row = [
                    protocol(socket).to_owned(),
                    state(socket.phase).to_owned(),
                    socket.waiting.to_string(),
                    address_text(socket.local),
                    address_text(socket.peer),
                ];
                print_row(&mut row, has_protocol, &self.details(app, socket))?;
                if let Some(info) = socket.tcp.as_ref().filter(|_| self.info) {
                    print_line!("\t{}", tcp_details::line(info))?;
                }
            }
        }
        Ok(())
    }

    fn shows(&self, socket: &SocketReport, filter: &Filter) -> bool {
        let is_udp = protocol(socket) == "udp";
        let is_of_protocol = self.tcp == self.udp || self.udp == is_udp;
        let is_ipv6 = socket.local.is_some_and(|local| local.is_ipv6());
        let is_of_family = !(self.ipv4 && is_ipv6 || self.ipv6 && !is_ipv6);
        let is_of_kind = match (self.all || filter.names_state(), self.listening) {
            (true, _) => socket.phase != SocketState::Free,
            (false, listening) => is_listening(socket) == listening,
        };
        is_of_protocol && is_of_family && is_of_kind && filter.matches(socket)
    }

    /// Details that follow the addresses.
    fn details(&self, app: &ApplicationReport, socket: &SocketReport) -> String {
        let owner = &app.identity;
        let mut details = Vec::new();
        if self.processes {
            details.push(format!("users:((\"{}\",pid={}))", owner.name, owner.pid));
        }
        if self.extended {
            let fill = socket.fill_percent;
            details.push(format!("uid:{} core:{} fill:{fill}%", owner.uid, app.core));
        }
        details.join(" ")
    }
}

fn print_row(row: &mut [String; 5], has_protocol: bool, end: &str) -> Result<(), Failure> {
    let [protocol, state, received, local, peer] = row;
    let protocol = if has_protocol { format!("{protocol:<6}") } else { String::new() };
    let line = format!("{protocol}{state:<10} {received:>7} {local:>30} {peer:>30}  {end}");
    print_line!("{}", line.trim_end())?;
    Ok(())
}

fn print_summary(report: &DaemonReport) -> Result<(), Failure> {
    let sockets = || report.applications.iter().flat_map(|app| &app.sockets);
    let count = |phase| sockets().filter(|socket| socket.phase == phase).count();
    // A process may have sockets on each core.
    let processes: HashSet<u32> = report.applications.iter().map(|app| app.identity.pid).collect();
    print_line!("Programs: {}", processes.len())?;
    print_line!(
        "TCP:   {} (estab {}, opening {}, listening {}), {} connections in the stack, {} KiB",
        sockets().filter(|socket| protocol(socket) == "tcp").count(),
        count(SocketState::Connected),
        count(SocketState::Connecting),
        count(SocketState::Listening),
        report.connections,
        report.tcp_memory_bytes >> 10,
    )?;
    print_line!("UDP:   {}", count(SocketState::Datagram))?;
    print_line!("Frames: {} received, {} transmitted", report.received, report.transmitted)?;
    let counted = report.drops.iter().filter(|drop| drop.1 > 0);
    let drops: Vec<String> = counted.map(|(reason, count)| format!("{reason} {count}")).collect();
    print_line!(
        "Dropped: {}",
        if drops.is_empty() { "none".to_owned() } else { drops.join(", ") }
    )?;
    Ok(())
}

fn protocol(socket: &SocketReport) -> &'static str {
    if socket.phase == SocketState::Datagram { "udp" } else { "tcp" }
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
    address.map_or_else(|| "*:*".to_owned(), |address| address.to_string())
}
