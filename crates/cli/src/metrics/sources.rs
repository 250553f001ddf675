//! Sources of readings: stacks inside a server, the daemon, guard, router and monitor.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tidegate::gate::admission::ClassCounters;
use tidegate::gate::{GateCounters, transmit};
use tidegate::{DropCounters, Net, NetCounters};
use tidegate_apps::filter::FilterCounters;
use tidegate_apps::http::HttpCounters;
use tidegate_apps::monitor::Report as MonitorReport;
use tidegate_apps::router::{Forwarder, ForwarderCounters, InterfaceReport};
use tidegate_apps::{DurationCounts, ServeCounters};
use tidegate_gate::admission::Admission;
use tidegate_service::SocketState;
use tidegate_service::daemon::{ApplicationReport, Controls, DaemonReport};

use super::MetricsSource;
use super::table::{self, Readings, Value};
use crate::Failure;

/// Adds the readings of a service.
type ServiceReadings = Box<dyn Fn(&mut Readings) + Send + Sync>;

/// Readings of a server: its service, and the stack of each network core.
pub(crate) struct NetSource {
    command: String,
    /// Name of the network interface.
    device: String,
    /// None on kernel sockets.
    nets: Vec<Net>,
    service: ServiceReadings,
}

impl NetSource {
    /// `server` is the name after `tidegate serve`.
    pub(crate) fn new(
        server: &str,
        device: &str,
        nets: Vec<Net>,
        service: impl Fn(&mut Readings) + Send + Sync + 'static,
    ) -> Self {
        let (command, device) = (format!("serve {server}"), device.to_owned());
        Self { command, device, nets, service: Box::new(service) }
    }
}

impl MetricsSource for NetSource {
    fn read(&self) -> Result<Readings, Failure> {
        let mut readings = Readings::of_command(&self.command);
        (self.service)(&mut readings);
        let cores: Vec<NetCounters> = self.nets.iter().map(Net::counters).collect();
        let (mut drops, mut gate) = (DropCounters::new(), GateCounters::default());
        let mut transmit_classes = Vec::new();
        for (at, core) in cores.iter().enumerate() {
            drops.merge(&core.drops());
            gate.add(&core.gate);
            transmit::add_counters(&mut transmit_classes, &core.transmit_classes);
            let number = at.to_string();
            let number = number.as_str();
            let queue = [self.device.as_str(), number];
            readings.add(&table::RX_PACKETS, queue, core.device.received);
            readings.add(&table::RX_BYTES, queue, core.device.received_bytes);
            readings.add(&table::TX_PACKETS, queue, core.device.transmitted);
            readings.add(&table::TX_BYTES, queue, core.device.transmitted_bytes);
            readings.add(&table::POLLS, [number], core.engine.rounds);
            readings.add(&table::BUSY_POLLS, [number], core.engine.busy_rounds);
            readings.add(&table::SLEEPS, [number], core.engine.sleeps);
            readings.add(&table::PACKETS, [number, "delivered"], core.stack.delivered);
            readings.add(&table::PACKETS, [number, "handled"], core.stack.handled);
        }
        if let Some(first) = cores.first() {
            add_drops(&mut readings, &drops);
            add_gate(&mut readings, &gate);
            add_classes(&mut readings, &first.classes, first.admission_limit_pps);
            add_transmit_classes(&mut readings, &transmit_classes);
            let free: usize = self.nets.iter().map(Net::frames_available).sum();
            readings.add(&table::FREE_BUFFERS, [], free);
        }
        Ok(readings)
    }
}

/// Adds the requests of a server of messages.
pub(crate) fn add_requests(readings: &mut Readings, served: &ServeCounters) {
    readings.add(&table::REQUESTS, [], served.requests.load(Ordering::Relaxed));
    readings.add(&table::ANSWERS, [], served.replies.load(Ordering::Relaxed));
}

/// Adds the service times of a server of datagrams.
pub(crate) fn add_service_times(readings: &mut Readings, times: &DurationCounts) {
    let buckets = Value::Buckets(times.sum_seconds(), times.buckets());
    readings.add(&table::UDP_DURATION, [], buckets);
}

/// Adds the counters of the HTTP server.
pub(crate) fn add_http(readings: &mut Readings, counters: &HttpCounters) {
    let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
    for (class, count) in ["1xx", "2xx", "3xx", "4xx", "5xx"].into_iter().zip(&counters.responses) {
        readings.add(&table::HTTP_RESPONSES, [class], load(count));
    }
    let durations = &counters.durations;
    let buckets = Value::Buckets(durations.sum_seconds(), durations.buckets());
    readings.add(&table::HTTP_DURATION, [], buckets);
    readings.add(&table::HTTP_CONNECTIONS, [], load(&counters.connections_open));
    readings.add(&table::HTTP_MEMORY, [], load(&counters.memory_bytes));
    readings.add(&table::HTTP_ENDED, ["time_limit"], load(&counters.timed_out));
    readings.add(&table::HTTP_ENDED, ["evicted"], load(&counters.evicted));
    readings.add(&table::HTTP_REFUSED, [], load(&counters.refused));
    readings.add(&table::HTTP_SESSIONS, [], load(&counters.sessions));
}

/// Readings of the daemon, by its own report.
pub(crate) struct DaemonSource {
    pub(crate) controls: Controls,
    /// Unix socket on which applications attach.
    pub(crate) socket: PathBuf,
    /// Name of the network interface.
    pub(crate) device: String,
}

impl MetricsSource for DaemonSource {
    fn read(&self) -> Result<Readings, Failure> {
        let report = DaemonReport::query(&self.socket)?;
        let mut readings = Readings::of_command("daemon");
        let queue = [self.device.as_str(), "0"];
        readings.add(&table::RX_PACKETS, queue, report.received);
        readings.add(&table::TX_PACKETS, queue, report.transmitted);
        readings.add(&table::POLLS, ["all"], report.rounds);
        readings.add(&table::BUSY_POLLS, ["all"], report.busy_rounds);
        readings.add(&table::SLEEPS, ["all"], report.sleeps);
        for (at, core) in report.cores.iter().enumerate() {
            let busy = f64::from(core.busy) / 1000.0;
            readings.add(&table::CORE_BUSY, [at.to_string().as_str()], busy);
        }
        readings.add(&table::CORES_USED, [], report.cores_used);
        readings.add(&table::CONNECTIONS, [], report.connections);
        readings.add(&table::TCP_MEMORY, [], report.tcp_memory_bytes);
        readings.add(&table::FREE_BUFFERS, [], report.frames_available);
        // The cores of this process have ended if another daemon has taken over: then the report is
        // that daemon's, whose own metrics have the rest in a moment.
        if let (Ok(drops), Ok(gate)) = (self.controls.drops(), self.controls.gate(None)) {
            add_drops(&mut readings, &drops);
            add_gate(&mut readings, &gate.counters);
            add_classes(&mut readings, &gate.classes, gate.limit_pps);
            add_transmit_classes(&mut readings, &gate.transmit_classes);
        }
        readings.add(&table::APPLICATIONS, [], report.applications.len());
        add_applications(&mut readings, &report.applications);
        Ok(readings)
    }
}

/// States of sockets that are counted, with their values of label `state`.
const STATES: [(SocketState, &str); 4] = [
    (SocketState::Datagram, "datagram"),
    (SocketState::Listening, "listening"),
    (SocketState::Connecting, "connecting"),
    (SocketState::Connected, "connected"),
];

/// Adds the programs. One that is attached to several network cores counts once, with all of its
/// attachments.
fn add_applications(readings: &mut Readings, applications: &[ApplicationReport]) {
    let mut programs: Vec<(u32, &str)> =
        applications.iter().map(|app| (app.identity.pid, app.identity.name.as_str())).collect();
    programs.sort_unstable();
    programs.dedup();
    for (pid, name) in programs {
        let of_program = || {
            applications.iter().filter(|app| app.identity.pid == pid && app.identity.name == name)
        };
        let sum = |of: fn(&ApplicationReport) -> u64| of_program().map(of).sum::<u64>();
        let pid = pid.to_string();
        let program = [name, &pid];
        readings.add(&table::APPLICATION_COMMANDS, program, sum(|app| app.commands));
        readings.add(&table::APPLICATION_RX_BYTES, program, sum(|app| app.bytes_in));
        readings.add(&table::APPLICATION_TX_BYTES, program, sum(|app| app.bytes_out));
        readings.add(&table::APPLICATION_MEMORY, program, sum(|app| app.memory_bytes));
        let sockets = || of_program().flat_map(|app| &app.sockets);
        for (state, label) in STATES {
            let count = sockets().filter(|socket| socket.phase == state).count();
            readings.add(&table::APPLICATION_SOCKETS, [name, &pid, label], count);
        }
        let listeners = sockets().filter(|socket| socket.phase == SocketState::Listening);
        let mut waiting: Vec<(String, usize)> = Vec::new();
        for socket in listeners {
            let address = socket.local.map_or_else(String::new, |address| address.to_string());
            match waiting.iter_mut().find(|(known, _)| *known == address) {
                Some((_, sum)) => *sum += socket.waiting,
                None => waiting.push((address, socket.waiting)),
            }
        }
        for (address, count) in waiting {
            readings.add(&table::LISTENER_WAITING, [name, &pid, &address], count);
        }
    }
}

/// Value that the command itself replaces from time to time, because only one of its threads may read
/// the counters.
#[derive(Debug, Default)]
pub(crate) struct Latest<T>(Arc<Mutex<T>>);

impl<T> Clone for Latest<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Clone> Latest<T> {
    /// Replaces the value.
    pub(crate) fn publish(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }

    fn get(&self) -> T {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl MetricsSource for Latest<Readings> {
    fn read(&self) -> Result<Readings, Failure> {
        Ok(self.get())
    }
}

/// Readings of the guard.
pub(crate) fn guard_readings(admission: &Admission) -> Readings {
    let mut readings = Readings::of_command("guard");
    let names = admission.classes().names().map(str::to_owned);
    let classes: Vec<_> = names.zip(admission.counters().iter().cloned()).collect();
    add_classes(&mut readings, &classes, admission.total_pps());
    readings
}

/// Readings of the monitor of `device`.
pub(crate) fn monitor_readings(device: &str, report: &MonitorReport) -> Readings {
    let mut readings = Readings::of_command("monitor");
    readings.add(&table::RX_PACKETS, [device, "0"], report.table.observed.packets);
    readings.add(&table::RX_BYTES, [device, "0"], report.table.observed.bytes);
    let ring = &report.ring;
    readings.add(&table::RX_LOST, [device, "ring_full"], ring.ring_full);
    readings.add(&table::RX_LOST, [device, "damaged"], ring.damaged);
    readings.add(&table::RX_LOST, [device, "rx_missed"], ring.rx_missed);
    add_drops(&mut readings, &report.malformed);
    add_gate(&mut readings, &report.gate);
    readings.add(&table::FLOWS, [], report.table.current.flows);
    readings.add(&table::FLOWS_ENDED, ["ended"], report.table.ended.flows);
    readings.add(&table::FLOWS_ENDED, ["evicted"], report.table.evicted.flows);
    if let Some(export) = &report.export {
        readings.add(&table::EXPORTED_RECORDS, ["sent"], export.records);
        readings.add(&table::EXPORTED_RECORDS, ["lost"], export.lost_records);
    }
    readings
}

/// Counters of one network core of the router.
#[derive(Clone, Debug, Default)]
pub(crate) struct RouterCounters {
    interfaces: Vec<InterfaceReport>,
    turns: ForwarderCounters,
    gate: GateCounters,
    drops: DropCounters,
    filter: Option<FilterCounters>,
}

impl RouterCounters {
    pub(crate) fn of(forwarder: &mut Forwarder) -> Self {
        Self {
            interfaces: forwarder.reports(),
            turns: forwarder.counters(),
            gate: *forwarder.gate().counters(),
            drops: forwarder.drops(),
            filter: forwarder.filter_counters(),
        }
    }
}

/// Readings of the router, whose network cores publish their counters.
pub(crate) struct RouterSource {
    /// Names of the interfaces.
    pub(crate) devices: Vec<String>,
    pub(crate) cores: Vec<Latest<RouterCounters>>,
}

impl MetricsSource for RouterSource {
    fn read(&self) -> Result<Readings, Failure> {
        let mut readings = Readings::of_command("route");
        let (mut drops, mut gate) = (DropCounters::new(), GateCounters::default());
        for (at, core) in self.cores.iter().map(Latest::get).enumerate() {
            let number = at.to_string();
            let number = number.as_str();
            let (mut forwarded, mut handled) = (0, 0);
            for (name, InterfaceReport { device, stack, .. }) in
                self.devices.iter().zip(&core.interfaces)
            {
                let queue = [name.as_str(), number];
                readings.add(&table::RX_PACKETS, queue, device.received);
                readings.add(&table::RX_BYTES, queue, device.received_bytes);
                readings.add(&table::TX_PACKETS, queue, device.transmitted);
                readings.add(&table::TX_BYTES, queue, device.transmitted_bytes);
                forwarded += stack.forwarded;
                handled += stack.handled;
            }
            readings.add(&table::PACKETS, [number, "forwarded"], forwarded);
            readings.add(&table::PACKETS, [number, "handled"], handled);
            readings.add(&table::POLLS, [number], core.turns.turns);
            readings.add(&table::BUSY_POLLS, [number], core.turns.busy_turns);
            readings.add(&table::SLEEPS, [number], core.turns.sleeps);
            drops.merge(&core.drops);
            gate.add(&core.gate);
            // Only one network core has a filter.
            if let Some(filter) = core.filter {
                readings.add(&table::FILTER_VERDICTS, ["passed"], filter.passed);
                readings.add(&table::FILTER_VERDICTS, ["refused"], filter.refused);
            }
        }
        add_drops(&mut readings, &drops);
        add_gate(&mut readings, &gate);
        Ok(readings)
    }
}

fn add_drops(readings: &mut Readings, drops: &DropCounters) {
    for (reason, packets) in drops.iter() {
        let severity = reason.severity().to_string();
        readings.add(&table::DROPS, [reason.name(), &severity], packets);
    }
}

fn add_gate(readings: &mut Readings, gate: &GateCounters) {
    readings.add(&table::GATE_TURNS, [], gate.receive_turns);
    readings.add(&table::GATE_YIELDS, [], gate.yields);
    readings.add(&table::GATE_INTERRUPTS, [], gate.interrupts);
    readings.add(&table::GATE_PAUSES, ["queue_full"], gate.paused_by_feedback);
    readings.add(&table::GATE_PAUSES, ["cpu_share"], gate.paused_by_share);
}

/// Adds the admission classes, and the limit of all together, if admission limits now. Nothing
/// without classes: there is no admission.
fn add_classes(
    readings: &mut Readings,
    classes: &[(String, ClassCounters)],
    limit_pps: Option<u64>,
) {
    if !classes.is_empty() {
        readings.add(&table::ADMISSION_LIMITING, [], u64::from(limit_pps.is_some()));
    }
    if let Some(limit_pps) = limit_pps {
        readings.add(&table::ADMISSION_LIMIT, [], limit_pps);
    }
    for (name, class) in classes {
        let mut add = |result, packets: u64| {
            readings.add(&table::ADMISSION_PACKETS, [name.as_str(), result], packets);
        };
        add("admitted", class.admitted);
        add("refused_closed", class.refused_closed);
        add("refused_rate", class.refused_rate);
        add("refused_source_share", class.refused_source_share);
    }
}

/// Adds the transmit classes. Nothing without classes.
fn add_transmit_classes(readings: &mut Readings, classes: &[(String, transmit::ClassCounters)]) {
    for (name, class) in classes {
        let name = name.as_str();
        readings.add(&table::TRANSMIT_PACKETS, [name, "sent"], class.sent);
        readings.add(&table::TRANSMIT_PACKETS, [name, "dropped"], class.dropped);
        readings.add(&table::TRANSMIT_BYTES, [name], class.sent_bytes);
        readings.add(&table::TRANSMIT_QUEUED, [name], class.queued);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_service::daemon::{Identity, SocketReport};

    use super::super::text::{Format, write};
    use super::*;

    fn app(pid: u32, core: usize, waiting: usize) -> ApplicationReport {
        let identity =
            Identity { pid, uid: 0, name: "nginx".to_owned(), library: Default::default() };
        let listener = SocketReport {
            phase: SocketState::Listening,
            local: Some("192.0.2.1:80".parse().unwrap()),
            peer: None,
            waiting,
            fill_percent: 0,
            holders: 1,
            tcp: None,
        };
        ApplicationReport {
            identity,
            commands: 10,
            bytes_in: 1,
            bytes_out: 2,
            memory_bytes: 4096,
            sockets: vec![listener],
            core,
        }
    }

    #[test]
    fn program_on_several_cores_is_counted_once() {
        let mut readings = Readings::default();
        add_applications(&mut readings, &[app(7, 0, 2), app(7, 1, 3), app(8, 0, 0)]);
        let text = write(readings, Format::Prometheus).unwrap();
        for line in [
            r#"tidegate_application_commands_total{program="nginx",pid="7"} 20"#,
            r#"tidegate_application_commands_total{program="nginx",pid="8"} 10"#,
            r#"tidegate_application_sockets{program="nginx",pid="7",state="listening"} 2"#,
            r#"tidegate_listener_waiting_connections{program="nginx",pid="7",address="192.0.2.1:80"} 5"#,
        ] {
            assert_eq!(text.lines().filter(|found| *found == line).count(), 1, "{line}: {text}");
        }
    }
}
