//! Export of flow records by IPFIX (RFC 7011), as messages for UDP.
//!
//! Three templates describe the records of IPv4 flows, IPv6 flows and other frames, an options
//! template the counters of the metering process (RFC 7011 section 4). UDP loses messages, so the
//! templates are repeated. A message fits into the minimum MTU of IPv6: the path MTU to the
//! collector is not known (section 10.3.3).

use std::net::IpAddr;

use super::flow::{FlowKind, IpFlow};
use super::table::FlowRecord;

/// Maximum bytes of a message: an IPv6 packet of 1280 bytes without the headers of IPv6 and UDP.
const MAX_MESSAGE_BYTES: usize = 1232;

/// Maximum time that a record waits for others in its message.
const MAX_RECORD_WAIT_NS: u64 = 1_000_000_000;

/// Interval at which the templates and the counters are sent.
const TEMPLATE_INTERVAL_NS: u64 = 60_000_000_000;

const VERSION: u16 = 10;
const HEADER_BYTES: usize = 16;
const SET_HEADER_BYTES: usize = 4;
const TEMPLATE_SET: u16 = 2;
const OPTIONS_TEMPLATE_SET: u16 = 3;

/// Information element of IANA's registry, with the length of the field in bytes.
type Field = (u16, u16);

const OCTET_DELTA_COUNT: Field = (1, 8);
const PACKET_DELTA_COUNT: Field = (2, 8);
const PROTOCOL_IDENTIFIER: Field = (4, 1);
const TCP_CONTROL_BITS: Field = (6, 1);
const SOURCE_TRANSPORT_PORT: Field = (7, 2);
const SOURCE_IPV4_ADDRESS: Field = (8, 4);
const DESTINATION_TRANSPORT_PORT: Field = (11, 2);
const DESTINATION_IPV4_ADDRESS: Field = (12, 4);
const SOURCE_IPV6_ADDRESS: Field = (27, 16);
const DESTINATION_IPV6_ADDRESS: Field = (28, 16);
const ICMP_TYPE_CODE_IPV4: Field = (32, 2);
const EXPORTED_MESSAGE_TOTAL_COUNT: Field = (41, 8);
const EXPORTED_FLOW_RECORD_TOTAL_COUNT: Field = (42, 8);
const VLAN_ID: Field = (58, 2);
const FLOW_END_REASON: Field = (136, 1);
const ICMP_TYPE_CODE_IPV6: Field = (139, 2);
const OBSERVATION_DOMAIN_ID: Field = (149, 4);
const FLOW_START_MILLISECONDS: Field = (152, 8);
const FLOW_END_MILLISECONDS: Field = (153, 8);
const IGNORED_PACKET_TOTAL_COUNT: Field = (164, 8);
const IGNORED_OCTET_TOTAL_COUNT: Field = (165, 8);
const ETHERNET_TYPE: Field = (256, 2);
const LAYER2_OCTET_DELTA_COUNT: Field = (352, 8);

/// Description of records: number, and fields in the order of the records.
struct Template {
    id: u16,
    fields: &'static [Field],
}

/// Template of the flows of one IP family: addresses, then the fields of both families.
macro_rules! ip_template {
    ($id:literal, $source:ident, $destination:ident, $icmp:ident) => {
        Template {
            id: $id,
            fields: &[
                $source,
                $destination,
                SOURCE_TRANSPORT_PORT,
                DESTINATION_TRANSPORT_PORT,
                $icmp,
                PROTOCOL_IDENTIFIER,
                TCP_CONTROL_BITS,
                OCTET_DELTA_COUNT,
                PACKET_DELTA_COUNT,
                VLAN_ID,
                FLOW_START_MILLISECONDS,
                FLOW_END_MILLISECONDS,
                FLOW_END_REASON,
            ],
        }
    };
}

const IPV4: Template =
    ip_template!(256, SOURCE_IPV4_ADDRESS, DESTINATION_IPV4_ADDRESS, ICMP_TYPE_CODE_IPV4);
const IPV6: Template =
    ip_template!(257, SOURCE_IPV6_ADDRESS, DESTINATION_IPV6_ADDRESS, ICMP_TYPE_CODE_IPV6);
const OTHER: Template = Template {
    id: 258,
    fields: &[
        ETHERNET_TYPE,
        LAYER2_OCTET_DELTA_COUNT,
        PACKET_DELTA_COUNT,
        VLAN_ID,
        FLOW_START_MILLISECONDS,
        FLOW_END_MILLISECONDS,
        FLOW_END_REASON,
    ],
};
/// Its first field is the scope.
const METERING: Template = Template {
    id: 259,
    fields: &[
        OBSERVATION_DOMAIN_ID,
        EXPORTED_MESSAGE_TOTAL_COUNT,
        EXPORTED_FLOW_RECORD_TOTAL_COUNT,
        IGNORED_PACKET_TOTAL_COUNT,
        IGNORED_OCTET_TOTAL_COUNT,
    ],
};

impl Template {
    const fn record_bytes(&self) -> usize {
        let (mut bytes, mut at) = (0, 0);
        while at < self.fields.len() {
            bytes += self.fields[at].1 as usize;
            at += 1;
        }
        bytes
    }
}

/// Settings of an [`Exporter`].
#[derive(Clone, Copy, Debug)]
pub struct ExporterConfig {
    /// Number of the observation domain, by which a collector tells monitors apart.
    pub domain: u32,
    /// Time of the Unix clock at time 0 of the exporter, in nanoseconds.
    pub unix_epoch_ns: u64,
}

/// Counters of an [`Exporter`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCounters {
    /// Messages that were sent.
    pub messages: u64,
    /// Flow records in these messages.
    pub records: u64,
    /// Flow records in messages that could not be sent.
    pub lost_records: u64,
}

/// Packets that are in no flow record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeteringCounters {
    /// Packets that were lost or are not tracked.
    pub ignored_packets: u64,
    /// Bytes of the untracked packets; those of lost packets are not known.
    pub ignored_bytes: u64,
}

/// Exporter of flow records. Messages go to a closure, which returns true if a message was sent.
pub struct Exporter {
    config: ExporterConfig,
    message: Vec<u8>,
    /// Start of the set that records are added to, and its template.
    open_set: Option<(usize, u16)>,
    /// Data records of the message, and flow records among them.
    data_records: u32,
    flow_records: u64,
    /// Data records of all messages before.
    sequence: u32,
    /// Time of the first record of the message.
    first_record_ns: Option<u64>,
    next_templates_ns: u64,
    counters: ExportCounters,
}

impl Exporter {
    /// Creates an exporter that sends its templates first.
    pub fn new(config: ExporterConfig) -> Self {
        let mut exporter = Self {
            config,
            message: Vec::with_capacity(MAX_MESSAGE_BYTES),
            open_set: None,
            data_records: 0,
            flow_records: 0,
            sequence: 0,
            first_record_ns: None,
            next_templates_ns: 0,
            counters: ExportCounters::default(),
        };
        exporter.message.resize(HEADER_BYTES, 0);
        exporter
    }

    /// Counters so far.
    pub fn counters(&self) -> &ExportCounters {
        &self.counters
    }

    /// Adds a record to the current message; sends the message when it is full.
    pub fn push(&mut self, now_ns: u64, record: &FlowRecord, send: &mut impl FnMut(&[u8]) -> bool) {
        let template = match record.key.kind {
            FlowKind::Ip(IpFlow { source: IpAddr::V4(_), .. }) => &IPV4,
            FlowKind::Ip(_) => &IPV6,
            FlowKind::Other(_) => &OTHER,
        };
        self.begin_record(now_ns, template, send);
        self.flow_records += 1;
        self.first_record_ns.get_or_insert(now_ns);
        match record.key.kind {
            FlowKind::Ip(flow) => self.put_ip_flow(&flow),
            FlowKind::Other(ethertype) => self.put(&ethertype.0.to_be_bytes()),
        }
        if matches!(record.key.kind, FlowKind::Ip(_)) {
            self.put(&[record.tcp_flags]);
        }
        self.put(&record.traffic.bytes.to_be_bytes());
        self.put(&record.traffic.packets.to_be_bytes());
        self.put(&record.key.vlan.to_be_bytes());
        self.put(&self.unix_ms(record.first_ns).to_be_bytes());
        self.put(&self.unix_ms(record.last_ns).to_be_bytes());
        self.put(&[record.reason as u8]);
    }

    /// Fields from the addresses to the protocol.
    fn put_ip_flow(&mut self, flow: &IpFlow) {
        for address in [flow.source, flow.destination] {
            match address {
                IpAddr::V4(v4) => self.put(&v4.octets()),
                IpAddr::V6(v6) => self.put(&v6.octets()),
            }
        }
        let (port, icmp) = match flow.is_icmp() {
            true => (0, flow.destination_port),
            false => (flow.destination_port, 0),
        };
        self.put(&flow.source_port.to_be_bytes());
        self.put(&port.to_be_bytes());
        self.put(&icmp.to_be_bytes());
        self.put(&[flow.protocol.0]);
    }

    /// Sends templates and counters when they are due, and a message whose first record has waited
    /// long enough. To be called at least once a second.
    pub fn poll(
        &mut self,
        now_ns: u64,
        metering: &MeteringCounters,
        send: &mut impl FnMut(&[u8]) -> bool,
    ) {
        if now_ns >= self.next_templates_ns {
            self.announce(now_ns, metering, send);
        }
        let is_due = |first_ns: u64| now_ns.saturating_sub(first_ns) >= MAX_RECORD_WAIT_NS;
        if self.first_record_ns.is_some_and(is_due) {
            self.flush(now_ns, send);
        }
    }

    /// Sends the remaining records, and the counters.
    pub fn finish(
        &mut self,
        now_ns: u64,
        metering: &MeteringCounters,
        send: &mut impl FnMut(&[u8]) -> bool,
    ) {
        self.flush(now_ns, send);
        self.push_counters(now_ns, metering, send);
        self.flush(now_ns, send);
    }

    /// Sends a message with the templates and the counters.
    pub fn announce(
        &mut self,
        now_ns: u64,
        metering: &MeteringCounters,
        send: &mut impl FnMut(&[u8]) -> bool,
    ) {
        self.flush(now_ns, send);
        self.next_templates_ns = now_ns.saturating_add(TEMPLATE_INTERVAL_NS);
        self.begin_set(TEMPLATE_SET);
        for template in [&IPV4, &IPV6, &OTHER] {
            self.put(&template.id.to_be_bytes());
            self.put(&(template.fields.len() as u16).to_be_bytes());
            self.put_fields(template);
        }
        self.begin_set(OPTIONS_TEMPLATE_SET);
        self.put(&METERING.id.to_be_bytes());
        self.put(&(METERING.fields.len() as u16).to_be_bytes());
        self.put(&1_u16.to_be_bytes());
        self.put_fields(&METERING);
        self.push_counters(now_ns, metering, send);
        self.flush(now_ns, send);
    }

    fn push_counters(
        &mut self,
        now_ns: u64,
        metering: &MeteringCounters,
        send: &mut impl FnMut(&[u8]) -> bool,
    ) {
        self.begin_record(now_ns, &METERING, send);
        let ExportCounters { messages, records, .. } = self.counters;
        self.put(&self.config.domain.to_be_bytes());
        for count in [messages, records, metering.ignored_packets, metering.ignored_bytes] {
            self.put(&count.to_be_bytes());
        }
    }

    fn put_fields(&mut self, template: &Template) {
        for (element, bytes) in template.fields {
            self.put(&element.to_be_bytes());
            self.put(&bytes.to_be_bytes());
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.message.extend_from_slice(bytes);
    }

    fn unix_ms(&self, ns: u64) -> u64 {
        self.config.unix_epoch_ns.saturating_add(ns) / 1_000_000
    }

    /// Opens the set of a template, in a message that has space for a record.
    fn begin_record(
        &mut self,
        now_ns: u64,
        template: &Template,
        send: &mut impl FnMut(&[u8]) -> bool,
    ) {
        let is_open = self.open_set.is_some_and(|(_, id)| id == template.id);
        let header_bytes = if is_open { 0 } else { SET_HEADER_BYTES };
        if self.message.len() + header_bytes + template.record_bytes() > MAX_MESSAGE_BYTES {
            self.flush(now_ns, send);
        }
        if self.open_set.is_none_or(|(_, id)| id != template.id) {
            self.begin_set(template.id);
        }
        self.data_records += 1;
    }

    fn begin_set(&mut self, id: u16) {
        self.end_set();
        self.open_set = Some((self.message.len(), id));
        self.put(&id.to_be_bytes());
        self.put(&[0; 2]);
    }

    /// Writes the length of the open set.
    fn end_set(&mut self) {
        let Some((start, _)) = self.open_set.take() else { return };
        let length = (self.message.len() - start) as u16;
        self.message[start + 2..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    /// Sends the current message, if there is anything in it.
    fn flush(&mut self, now_ns: u64, send: &mut impl FnMut(&[u8]) -> bool) {
        self.end_set();
        if self.message.len() == HEADER_BYTES {
            return;
        }
        let length = self.message.len() as u16;
        let export_seconds = (self.unix_ms(now_ns) / 1000) as u32;
        let header = &mut self.message[..HEADER_BYTES];
        header[..2].copy_from_slice(&VERSION.to_be_bytes());
        header[2..4].copy_from_slice(&length.to_be_bytes());
        header[4..8].copy_from_slice(&export_seconds.to_be_bytes());
        header[8..12].copy_from_slice(&self.sequence.to_be_bytes());
        header[12..].copy_from_slice(&self.config.domain.to_be_bytes());
        if send(&self.message) {
            self.counters.messages += 1;
            self.counters.records += self.flow_records;
        } else {
            self.counters.lost_records += self.flow_records;
        }
        // Lost messages count too, so that a collector detects the loss.
        self.sequence = self.sequence.wrapping_add(self.data_records);
        (self.data_records, self.flow_records) = (0, 0);
        self.first_record_ns = None;
        self.message.truncate(HEADER_BYTES);
    }
}

#[cfg(test)]
mod tests;
