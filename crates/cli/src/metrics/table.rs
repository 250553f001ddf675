//! The table of all metrics, and readings of their values.

use std::fmt;

use serde::Serialize;

/// Begin of the name of every metric.
pub(crate) const PREFIX: &str = "tidegate";

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MetricKind {
    /// Grows from the start of the process; its name ends with `_total`.
    Counter,
    /// Value at the moment.
    Gauge,
    /// Counts in buckets, from the start of the process.
    Histogram,
}

impl fmt::Display for MetricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// A metric.
#[derive(Debug)]
pub(crate) struct Metric {
    /// Name without [`PREFIX`] and `_total`.
    pub(crate) stem: &'static str,
    pub(crate) kind: MetricKind,
    pub(crate) labels: &'static [&'static str],
    /// Commands that have the metric.
    pub(crate) commands: &'static str,
    /// One sentence without its full stop.
    pub(crate) help: &'static str,
}

impl Metric {
    /// Name as Prometheus shows it.
    pub(crate) fn name(&self) -> String {
        let end = if self.kind == MetricKind::Counter { "_total" } else { "" };
        format!("{PREFIX}_{}{end}", self.stem)
    }
}

macro_rules! metrics {
    ($($metric:ident, $stem:literal, $kind:ident, [$($label:literal),*], $commands:literal, $help:literal;)+) => {
        $(
            #[doc = $help]
            pub(crate) static $metric: Metric = Metric {
                stem: $stem,
                kind: MetricKind::$kind,
                labels: &[$($label),*],
                commands: $commands,
                help: $help,
            };
        )+

        /// All metrics, in the order of the table.
        pub(crate) static ALL: &[&Metric] = &[$(&$metric),+];
    };
}

// Labels have few values: none comes from a packet. `pid` and `address` are those of attached
// programs, whose number the daemon limits.
metrics! {
    BUILD_INFO, "build_info", Gauge, ["version", "build", "command"], "all", "Version of the program, always 1";
    RX_PACKETS, "rx_packets", Counter, ["device", "queue"], "daemon, serve, route, monitor", "Frames that the device handed to the stack, or to the monitor";
    RX_BYTES, "rx_bytes", Counter, ["device", "queue"], "serve, route, monitor", "Bytes of the received frames";
    TX_PACKETS, "tx_packets", Counter, ["device", "queue"], "daemon, serve, route", "Frames that were transmitted";
    TX_BYTES, "tx_bytes", Counter, ["device", "queue"], "serve, route", "Bytes of the transmitted frames";
    RX_LOST, "rx_lost_packets", Counter, ["device", "cause"], "monitor", "Frames that passed the interface and were not counted by flow";
    DROPS, "drops", Counter, ["reason", "severity"], "daemon, serve, route, monitor", "Packets dropped at the device and in the stack; `tidegate drops` explains the reasons";
    PACKETS, "packets", Counter, ["core", "end"], "serve, route", "Received packets by their end: delivered to a socket, handled by the stack itself, or forwarded";
    POLLS, "polls", Counter, ["core"], "daemon, serve, route", "Rounds of the poll loop; of the daemon those of all cores";
    BUSY_POLLS, "busy_polls", Counter, ["core"], "daemon, serve, route", "Rounds in which frames were received";
    SLEEPS, "sleeps", Counter, ["core"], "daemon, serve, route", "Times that the core prepared to sleep";
    CORE_BUSY, "core_busy_ratio", Gauge, ["core"], "daemon", "Share of its time in which the network core was busy; 0 with a single core";
    CORES_USED, "cores_used", Gauge, [], "daemon", "Network cores that get new programs";
    GATE_TURNS, "gate_receive_turns", Counter, [], "daemon, serve, route, monitor", "Turns of receive rings";
    GATE_YIELDS, "gate_yields", Counter, [], "daemon, serve, route, monitor", "Rounds that ended with work left";
    GATE_INTERRUPTS, "gate_interrupts", Counter, [], "daemon, serve, route, monitor", "Interrupts handled";
    GATE_PAUSES, "gate_pauses", Counter, ["cause"], "daemon, serve, route, monitor", "Times that receiving was found paused: a queue was full, or the CPU share was spent";
    ADMISSION_PACKETS, "admission_packets", Counter, ["class", "result"], "daemon, serve, guard", "Packets by class: admitted, or refused because the class was closed, had reached its rate, or the source its share";
    ADMISSION_LIMITING, "admission_limiting", Gauge, [], "daemon, serve, guard", "1 while admission limits packets, 0 while it admits all";
    ADMISSION_LIMIT, "admission_limit_packets_per_second", Gauge, [], "daemon, serve, guard", "Packets per second that admission admits in all; only while it limits packets";
    TRANSMIT_PACKETS, "transmit_class_packets", Counter, ["class", "result"], "daemon, serve", "Packets by transmit class: sent, or dropped because the class had its share of the queue or they had waited too long";
    TRANSMIT_BYTES, "transmit_class_bytes", Counter, ["class"], "daemon, serve", "Bytes of the sent packets by transmit class";
    TRANSMIT_QUEUED, "transmit_class_queued_packets", Gauge, ["class"], "daemon, serve", "Packets that wait by transmit class";
    REQUESTS, "requests", Counter, [], "serve", "Requests passed to the service";
    ANSWERS, "answers", Counter, [], "serve", "Answers that the service made";
    UDP_DURATION, "udp_service_duration_seconds", Histogram, [], "serve dns, serve echo", "Time from the arrival of a datagram in the core until its answer was with the device, or of a reader with the core";
    DNS_LOG_LOST, "dns_lost_log_messages", Counter, [], "serve dns", "Queries and answers that the dnstap log lost because its receiver was too slow, or gone";
    HTTP_RESPONSES, "http_responses", Counter, ["code"], "serve http", "Responses by class of their status";
    HTTP_DURATION, "http_response_duration_seconds", Histogram, [], "serve http", "Time that responses took to make, without their transfer";
    HTTP_CONNECTIONS, "http_connections", Gauge, [], "serve http", "Open connections";
    HTTP_MEMORY, "http_memory_bytes", Gauge, [], "serve http", "Memory that the connections hold";
    HTTP_ENDED, "http_ended_connections", Counter, ["cause"], "serve http", "Connections ended by the server: over a time limit, or evicted because a resource ran out";
    HTTP_REFUSED, "http_refused_requests", Counter, [], "serve http", "Requests that admission refused";
    HTTP_LOG_LOST, "http_lost_log_lines", Counter, [], "serve http", "Lines of the access log that were lost because the disk was too slow";
    HTTP_SESSIONS, "http_sessions", Counter, [], "serve http", "Sessions that admission has begun";
    CONNECTIONS, "tcp_connections", Gauge, [], "daemon", "TCP connections in the stack";
    TCP_MEMORY, "tcp_memory_bytes", Gauge, [], "daemon", "Memory that holds data of the stack's connections";
    FREE_BUFFERS, "free_packet_buffers", Gauge, [], "daemon, serve", "Packet buffers that are neither in use nor with the device";
    APPLICATIONS, "applications", Gauge, [], "daemon", "Attached programs, one for each network core that a program uses";
    APPLICATION_COMMANDS, "application_commands", Counter, ["program", "pid"], "daemon", "Commands taken from the program";
    APPLICATION_RX_BYTES, "application_rx_bytes", Counter, ["program", "pid"], "daemon", "Payload moved to the program";
    APPLICATION_TX_BYTES, "application_tx_bytes", Counter, ["program", "pid"], "daemon", "Payload taken from the program";
    APPLICATION_MEMORY, "application_memory_bytes", Gauge, ["program", "pid"], "daemon", "Shared memory for the data of the program's sockets";
    APPLICATION_SOCKETS, "application_sockets", Gauge, ["program", "pid", "state"], "daemon", "Sockets of the program";
    LISTENER_WAITING, "listener_waiting_connections", Gauge, ["program", "pid", "address"], "daemon", "Connections that wait to be accepted";
    FLOWS, "flows", Gauge, [], "monitor", "Flows in the table";
    FLOWS_ENDED, "ended_flows", Counter, ["cause"], "monitor", "Flows that left the table: they ended, or were evicted";
    EXPORTED_RECORDS, "exported_records", Counter, ["result"], "monitor", "Records for the collector: sent, or lost";
    ANNOUNCED, "announced", Gauge, ["address"], "announce", "1 while the address is announced, 0 while it is withdrawn";
    ANNOUNCE_HEALTHY, "announce_check_healthy", Gauge, ["check", "address"], "announce", "1 while the check of the service passes, else 0";
    ANNOUNCE_WITHDRAWALS, "announce_withdrawals", Counter, ["reason"], "announce", "Withdrawals of the addresses, by reason";
    FILTER_VERDICTS, "filter_verdicts", Counter, ["verdict"], "route", "Verdicts of the packet filter";
}

/// Value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// Count, or amount.
    Integer(u64),
    /// Ratio.
    Real(f64),
    /// Sum of what was counted, and upper bounds with the counts of their buckets.
    Buckets(f64, Vec<(f64, u64)>),
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Integer(value as u64)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

/// Value of a metric, with the values of its labels.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(super) metric: &'static Metric,
    pub(super) labels: Vec<String>,
    pub(super) value: Value,
}

/// Values of metrics at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readings(Vec<Reading>);

impl Readings {
    /// Readings of a command: its version, and nothing else yet.
    pub(crate) fn of_command(command: &str) -> Self {
        let mut readings = Self::default();
        let version = env!("CARGO_PKG_VERSION");
        readings.add(&BUILD_INFO, [version, tidegate_program::BUILD_ID, command], 1_u64);
        readings
    }

    /// Adds a value.
    ///
    /// # Panics
    /// If the metric has not as many labels.
    pub(crate) fn add<'a>(
        &mut self,
        metric: &'static Metric,
        labels: impl IntoIterator<Item = &'a str>,
        value: impl Into<Value>,
    ) {
        let labels: Vec<String> = labels.into_iter().map(str::to_owned).collect();
        assert_eq!(labels.len(), metric.labels.len(), "labels of {}", metric.stem);
        self.0.push(Reading { metric, labels, value: value.into() });
    }

    /// Readings of a metric.
    pub(super) fn of<'a>(
        &'a self,
        metric: &'static Metric,
    ) -> impl Iterator<Item = &'a Reading> + 'a {
        self.0.iter().filter(move |reading| std::ptr::eq(reading.metric, metric))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_follow_the_conventions_of_prometheus() {
        let is_plain = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        for (at, metric) in ALL.iter().enumerate() {
            assert!(is_plain(metric.stem), "{}", metric.stem);
            assert!(metric.labels.iter().all(|label| is_plain(label)), "{}", metric.stem);
            assert!(!metric.stem.ends_with("_total") && !metric.help.ends_with('.'));
            assert!(ALL[..at].iter().all(|other| other.name() != metric.name()));
        }
    }

    #[test]
    #[should_panic(expected = "labels of drops")]
    fn reading_has_the_labels_of_its_metric() {
        Readings::default().add(&DROPS, ["no_route"], 1_u64);
    }
}
