//! Report of a network core: its counters, its applications and their sockets.

use std::io;

use tidegate_engine::EngineNodes;
use tidegate_gate::Settings;
use tidegate_memory::current_node;
use tidegate_stack::QUEUE_FILL_SCALE;

use super::NetworkCore;
use super::message::ReportAnswer;
use super::round_timer::RoundTimer;
use super::server::SocketServer;
use crate::daemon::application::Application;
use crate::daemon::ids::PayloadBytes;
use crate::daemon::report::{
    ApplicationReport, CoreNodes, CoreReport, DaemonReport, GateState, SocketReport,
};
use crate::daemon::socket::{AppSocket, SocketKind};

impl NetworkCore {
    /// Report of this core and its applications.
    pub(in crate::daemon) fn report(&mut self) -> ReportAnswer {
        let busy = self.cores.load(self.index).last_report().busy_permille;
        let apps = self.apps.iter().flatten();
        let memories = apps.clone().map(|app| app.memory.clone()).collect();
        let mut report = DaemonReport::of_core(self.index, busy, &mut self.server, apps);
        let longest_ns = self.rounds.as_ref().map(RoundTimer::longest_ns);
        report.cores.iter_mut().for_each(|core| core.longest_round_ns = longest_ns);
        ReportAnswer { report, memories }
    }

    /// Applies receive-scheduling settings, if given. Returns the settings in force and the
    /// counters.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode.
    pub(in crate::daemon) fn gate(&mut self, settings: Option<Settings>) -> io::Result<GateState> {
        let engine = &mut self.server.engine;
        settings.map_or(Ok(()), |settings| engine.set_gate(settings))?;
        let (settings, counters) = (engine.gate().settings().clone(), *engine.gate().counters());
        let (classes, limit_pps) = (engine.class_counters(), engine.admission_limit_pps());
        let transmit_classes = engine.transmit_class_counters();
        Ok(GateState { settings, counters, classes, limit_pps, transmit_classes })
    }
}

impl DaemonReport {
    fn of_core<'a>(
        number: usize,
        busy: u32,
        host: &mut SocketServer,
        apps: impl Iterator<Item = &'a Box<Application>>,
    ) -> Self {
        let applications: Vec<_> = apps
            .map(|app| ApplicationReport {
                core: number,
                identity: app.identity.clone(),
                commands: app.commands.taken(),
                bytes_in: payload_bytes(host, app).to_app,
                bytes_out: payload_bytes(host, app).from_app,
                memory_bytes: app.memory_bytes(),
                sockets: app
                    .sockets()
                    .filter_map(|(_, key)| Some(SocketReport::new(host, host.sockets.get(key)?)))
                    .collect(),
            })
            .collect();
        let drops = host.engine.drops();
        let (engine, port, _) = host.engine.counters();
        let EngineNodes { device, memory } = host.engine.nodes();
        let arguments = std::env::args_os().skip(1);
        Self {
            pid: std::process::id(),
            versions: None,
            arguments: arguments.map(|text| text.to_string_lossy().into_owned()).collect(),
            folder: std::env::current_dir().unwrap_or_default(),
            is_shared: host.claims.shares_kernel_addresses(),
            cores: vec![CoreReport {
                busy,
                applications: applications.len(),
                received: port.received,
                transmitted: port.transmitted,
                longest_round_ns: None,
                nodes: CoreNodes { processor: current_node(), memory, device },
            }],
            cores_used: 1,
            applications,
            received: port.received,
            transmitted: port.transmitted,
            drops: drops.iter().map(|(reason, count)| (reason.name().to_owned(), count)).collect(),
            rounds: engine.rounds,
            busy_rounds: engine.busy_rounds,
            sleeps: engine.sleeps,
            frames_available: host.engine.frames_available(),
            connections: host.engine.stack().tcp_connections(),
            tcp_memory_bytes: host.engine.stack().tcp_memory_used(),
        }
    }
}

/// Payload bytes moved through all sockets of an application so far.
fn payload_bytes(host: &SocketServer, app: &Application) -> PayloadBytes {
    let mut moved = app.payload_bytes;
    let open = app.sockets().filter_map(|(_, key)| host.sockets.get(key));
    open.for_each(|socket| moved.add(socket.payload_bytes()));
    moved
}

impl SocketReport {
    fn new(host: &SocketServer, socket: &AppSocket) -> Self {
        let stack = host.engine.stack();
        let mut fill = 0;
        let waiting = match &socket.kind {
            SocketKind::Udp(datagrams) => {
                fill = stack.udp_queue_fill(datagrams.id).unwrap_or(0);
                stack.udp_queue_len(datagrams.id)
            }
            SocketKind::Listener(id) => stack.tcp_acceptable(*id),
            SocketKind::Stream(stream) => stack.tcp_readable(stream.id),
        };
        Self {
            phase: socket.status.state,
            local: socket.local_addr(&host.engine),
            peer: socket.peer_addr(&host.engine),
            waiting,
            fill_percent: fill * 100 / QUEUE_FILL_SCALE,
            holders: socket.holders().len(),
            tcp: match &socket.kind {
                SocketKind::Stream(stream) => host.engine.stack().tcp_info(stream.id),
                _ => None,
            },
        }
    }
}
