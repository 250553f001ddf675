//! Report of a server: its sockets and counters, in the form of a daemon's report.

use tidegate::{Net, SocketRole, TcpState};
use tidegate_service::SocketState;
use tidegate_service::daemon::{
    ApplicationReport, CoreNodes, CoreReport, DaemonReport, Identity, SocketReport,
};

/// Maximum number of sockets of one core in a report: the core stands still for its length.
const MAX_SOCKETS: usize = 10_000;

/// Report of a server with these stacks, one for each network core.
pub(crate) fn of_server(nets: &[Net]) -> DaemonReport {
    let program = std::env::args().next().unwrap_or_default();
    let identity = Identity {
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        name: program.rsplit('/').next().unwrap_or_default().to_owned(),
        library: Default::default(),
    };
    let arguments = std::env::args_os().skip(1);
    let mut report = DaemonReport {
        pid: std::process::id(),
        arguments: arguments.map(|text| text.to_string_lossy().into_owned()).collect(),
        folder: std::env::current_dir().unwrap_or_default(),
        cores_used: nets.len(),
        ..DaemonReport::default()
    };
    for (core, net) in nets.iter().enumerate() {
        let counters = net.counters();
        report.cores.push(CoreReport {
            busy: 0,
            applications: 1,
            received: counters.device.received,
            transmitted: counters.device.transmitted,
            longest_round_ns: None,
            nodes: CoreNodes::default(),
        });
        report.received += counters.device.received;
        report.transmitted += counters.device.transmitted;
        report.rounds += counters.engine.rounds;
        report.busy_rounds += counters.engine.busy_rounds;
        report.sleeps += counters.engine.sleeps;
        report.frames_available += net.frames_available();
        for (reason, count) in counters.drops().iter() {
            match report.drops.iter_mut().find(|(name, _)| name == reason.name()) {
                Some((_, sum)) => *sum += count,
                None => report.drops.push((reason.name().to_owned(), count)),
            }
        }
        let sockets: Vec<_> = net.sockets(MAX_SOCKETS).iter().map(socket_report).collect();
        report.connections += sockets.iter().filter(|socket| socket.tcp.is_some()).count();
        report.applications.push(ApplicationReport {
            identity: identity.clone(),
            commands: counters.stack.delivered,
            bytes_in: 0,
            bytes_out: 0,
            memory_bytes: 0,
            sockets,
            core,
        });
    }
    report
}

fn socket_report(socket: &tidegate::SocketEntry) -> SocketReport {
    let (phase, fill_percent, tcp) = match socket.role {
        SocketRole::Udp { fill_percent } => (SocketState::Datagram, fill_percent, None),
        SocketRole::Listener => (SocketState::Listening, 0, None),
        SocketRole::Connection(info) => {
            let phase = match info.state {
                TcpState::SynSent | TcpState::SynReceived => SocketState::Connecting,
                TcpState::Established | TcpState::CloseWait => SocketState::Connected,
                _ => SocketState::Over,
            };
            (phase, 0, Some(info))
        }
    };
    SocketReport {
        phase,
        local: socket.local,
        peer: socket.peer,
        waiting: socket.waiting,
        fill_percent,
        holders: 1,
        tcp,
    }
}
