//! Passive monitor of an interface: traffic by flow, exported by IPFIX.
//!
//! [`Monitor`] reads a [`PassiveRing`](tidegate_device::packet::PassiveRing) under the gate, counts
//! each frame in a [`FlowTable`], and exports the records of flows by an [`Exporter`]. The table and
//! the exporter do no I/O and have no clock.

mod flow;
mod ipfix;
mod run;
mod table;

pub use flow::{FlowKey, FlowKind, IpFlow, Observation, Traffic};
pub use ipfix::{ExportCounters, Exporter, ExporterConfig, MeteringCounters};
pub use run::{Monitor, MonitorConfig, Report, ReportHook};
pub use table::{
    EndReason, FlowCount, FlowRecord, FlowTable, Order, Span, TableConfig, TableCounters,
};
