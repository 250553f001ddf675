//! Reports of the monitor, as a table and as JSON.

use std::fmt::Write;
use std::net::IpAddr;

use serde_json::{Value, json};
use tidegate_apps::monitor::{FlowCount, FlowKey, FlowKind, IpFlow, Report, Traffic};

use crate::Failure;
use crate::output::{print, print_line};
use crate::report::{drops_json, gate_json};

/// Moves the cursor of a terminal to its upper left corner, and clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Prints a report as a table.
pub(super) fn print_table(iface: &str, report: &Report, clears: bool) -> Result<(), Failure> {
    let clear = if clears && !report.is_final { CLEAR } else { "" };
    print(format_args!("{clear}{}", table(iface, report)))
}

/// Prints a report as a line of JSON.
pub(super) fn print_json(iface: &str, report: &Report) -> Result<(), Failure> {
    print_line!("{}", report_json(iface, report))
}

fn table(iface: &str, report: &Report) -> String {
    let seconds = (report.span_ns as f64 / 1e9).max(1e-9);
    let Traffic { packets, bytes } = report.traffic;
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{iface}, {}{seconds:.1} s: {packets} packets, {bytes} bytes, {:.0} packets/s, {:.1} Mbit/s",
        if report.is_final { "in all " } else { "" },
        packets as f64 / seconds,
        bytes as f64 * 8e-6 / seconds,
    );
    let rows: Vec<[String; 6]> = std::iter::once(
        ["protocol", "source", "destination", "vlan", "packets", "bytes"].map(str::to_owned),
    )
    .chain(report.top.iter().map(|(key, traffic)| row(key, traffic)))
    .chain(std::iter::once(rest_row(report)))
    .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    for row in &rows {
        let [protocol, source, destination, vlan, packets, bytes] = row;
        let _ = writeln!(
            text,
            "{protocol:<0$}  {source:<1$}  {destination:<2$}  {vlan:>3$}  {packets:>4$}  {bytes:>5$}",
            widths[0], widths[1], widths[2], widths[3], widths[4], widths[5],
        );
    }
    let counters = &report.table;
    let _ = writeln!(
        text,
        "flows: {} of {} in the table, {} ended, {} evicted; {} packets untracked",
        counters.current.flows,
        report.max_flows,
        counters.ended.flows,
        counters.evicted.flows,
        counters.untracked.packets,
    );
    let ring = &report.ring;
    let _ = writeln!(
        text,
        "lost: {} on a full ring, {} missed by the interface, {} damaged; {} malformed",
        ring.ring_full,
        ring.rx_missed,
        ring.damaged,
        report.malformed.total(),
    );
    for (reason, packets) in report.malformed.nonzero() {
        let _ = writeln!(text, "  {packets} {}: {}", reason.name(), reason.sentence());
    }
    if let Some(export) = &report.export {
        let _ = writeln!(
            text,
            "exported: {} records in {} messages; {} records not sent",
            export.records, export.messages, export.lost_records,
        );
    }
    text
}

fn row(key: &FlowKey, traffic: &Traffic) -> [String; 6] {
    let vlan = if key.vlan == 0 { String::new() } else { key.vlan.to_string() };
    let (packets, bytes) = (traffic.packets.to_string(), traffic.bytes.to_string());
    match &key.kind {
        FlowKind::Other(ethertype) => {
            let protocol = format!("{ethertype:?}");
            [protocol, String::new(), String::new(), vlan, packets, bytes]
        }
        FlowKind::Ip(flow) => {
            let fragment = if flow.fragment { " fragments" } else { "" };
            let protocol = format!("{:?}{fragment}", flow.protocol);
            let (source, destination) = match flow.is_icmp() {
                true => (flow.source.to_string(), icmp_destination(flow)),
                false => (
                    endpoint(flow.source, flow.source_port),
                    endpoint(flow.destination, flow.destination_port),
                ),
            };
            [protocol, source, destination, vlan, packets, bytes]
        }
    }
}

/// Traffic of the time of the report that is in none of the listed flows.
fn rest_row(report: &Report) -> [String; 6] {
    let mut listed = Traffic::default();
    report.top.iter().for_each(|(_, traffic)| listed.add(*traffic));
    let rest = |all: u64, listed: u64| all.saturating_sub(listed).to_string();
    let empty = String::new;
    let packets = rest(report.traffic.packets, listed.packets);
    ["others".into(), empty(), empty(), empty(), packets, rest(report.traffic.bytes, listed.bytes)]
}

fn endpoint(address: IpAddr, port: u16) -> String {
    match (address, port) {
        (_, 0) => address.to_string(),
        (IpAddr::V4(_), _) => format!("{address}:{port}"),
        (IpAddr::V6(_), _) => format!("[{address}]:{port}"),
    }
}

fn icmp_destination(flow: &IpFlow) -> String {
    let [kind, code] = flow.destination_port.to_be_bytes();
    format!("{} type {kind} code {code}", flow.destination)
}

fn report_json(iface: &str, report: &Report) -> Value {
    let counters = &report.table;
    let flows: Vec<Value> =
        report.top.iter().map(|(key, traffic)| flow_json(key, traffic)).collect();
    json!({
        "iface": iface,
        "final": report.is_final,
        "seconds": report.span_ns as f64 / 1e9,
        "packets": report.traffic.packets,
        "bytes": report.traffic.bytes,
        "flows": flows,
        "total": {
            "packets": counters.observed.packets,
            "bytes": counters.observed.bytes,
            "malformed": drops_json(&report.malformed),
            "lost": {
                "ring_full": report.ring.ring_full,
                "rx_missed": report.ring.rx_missed,
                "damaged": report.ring.damaged,
            },
        },
        "table": {
            "max_flows": report.max_flows,
            "current": count_json(&counters.current),
            "ended": count_json(&counters.ended),
            "evicted": count_json(&counters.evicted),
            "untracked": { "packets": counters.untracked.packets, "bytes": counters.untracked.bytes },
        },
        "export": report.export.map(|export| json!({
            "messages": export.messages,
            "records": export.records,
            "records_not_sent": export.lost_records,
        })),
        "gate": gate_json(&report.gate),
    })
}

fn count_json(count: &FlowCount) -> Value {
    let Traffic { packets, bytes } = count.traffic;
    json!({ "flows": count.flows, "packets": packets, "bytes": bytes })
}

fn flow_json(key: &FlowKey, traffic: &Traffic) -> Value {
    let vlan = (key.vlan != 0).then_some(key.vlan);
    let Traffic { packets, bytes } = *traffic;
    match &key.kind {
        FlowKind::Other(ethertype) => {
            json!({ "ethertype": ethertype.0, "vlan": vlan, "packets": packets, "bytes": bytes })
        }
        FlowKind::Ip(flow) => {
            let mut value = json!({
                "protocol": flow.protocol.0,
                "source": flow.source,
                "destination": flow.destination,
                "fragment": flow.fragment,
                "vlan": vlan,
                "packets": packets,
                "bytes": bytes,
            });
            if flow.is_icmp() {
                let [kind, code] = flow.destination_port.to_be_bytes();
                (value["icmp_type"], value["icmp_code"]) = (kind.into(), code.into());
            } else {
                value["source_port"] = flow.source_port.into();
                value["destination_port"] = flow.destination_port.into();
            }
            value
        }
    }
}
