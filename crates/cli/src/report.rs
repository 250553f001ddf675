//! Final reports of the commands, as text and as JSON.

use std::sync::atomic::Ordering;

use clap::Args;
use serde_json::{Map, Value, json};
use tidegate::gate::admission::ClassCounters;
use tidegate::gate::{GateCounters, transmit};
use tidegate::{DropCounters, DropReason, Net, NetCounters};
use tidegate_apps::ServeCounters;
use tidegate_device::DeviceCounters;

use crate::Failure;
use crate::output::print_line;

/// Final report of a server.
pub(crate) struct ServeReport {
    json: Value,
    drops: DropCounters,
}

impl ServeReport {
    /// Report of a server on kernel sockets, without drops: the kernel does not report them.
    pub(crate) fn kernel(name: &str, served: &ServeCounters) -> Self {
        let json = json!({
            "server": name,
            "port": "kernel",
            "requests": served.requests.load(Ordering::Relaxed),
            "answers": served.replies.load(Ordering::Relaxed),
        });
        Self { json, drops: DropCounters::new() }
    }

    /// Report of a server on Tidegate, with a stack for each network core.
    pub(crate) fn tidegate(name: &str, served: &ServeCounters, nets: &[Net]) -> Self {
        let cores: Vec<NetCounters> = nets.iter().map(Net::counters).collect();
        // After the counters: the device learns its real mode of operation from the kernel.
        let capabilities = nets[0].capabilities();
        let sum = |of: fn(&NetCounters) -> u64| cores.iter().map(of).sum::<u64>();
        let (mut drops, mut gate) = (DropCounters::new(), GateCounters::default());
        let mut transmit_classes = Vec::new();
        for core in &cores {
            drops.merge(&core.drops());
            gate.add(&core.gate);
            transmit::add_counters(&mut transmit_classes, &core.transmit_classes);
        }
        let json = json!({
            "server": name,
            "port": capabilities.kind,
            "detail": capabilities.detail,
            "requests": served.requests.load(Ordering::Relaxed),
            "answers": served.replies.load(Ordering::Relaxed),
            "received": sum(|core| core.device.received),
            "transmitted": sum(|core| core.device.transmitted),
            "delivered": sum(|core| core.stack.delivered),
            "handled": sum(|core| core.stack.handled),
            "rounds": sum(|core| core.engine.rounds),
            "busy_rounds": sum(|core| core.engine.busy_rounds),
            "sleeps": sum(|core| core.engine.sleeps),
            "unreadable_neighbours": sum(|core| core.engine.unreadable_neighbours),
            "gate": gate_json(&gate),
            "classes": classes_json(&cores[0].classes),
            "transmit_classes": transmit_classes_json(&transmit_classes),
            "drops": drops_json(&drops),
            "device": driver_json(&cores[0].device),
            "cores": cores.iter().map(core_json).collect::<Vec<_>>(),
        });
        Self { json, drops }
    }

    pub(crate) fn print(&self, as_json: bool) -> Result<(), Failure> {
        if as_json {
            print_line!("{}", self.json)?;
            return Ok(());
        }
        print_line!("{} requests, {} answers", self.json["requests"], self.json["answers"])?;
        if let (Some(received), Some(sent)) =
            (self.json["received"].as_u64(), self.json["transmitted"].as_u64())
        {
            print_line!("{received} frames received, {sent} transmitted")?;
        }
        for (reason, packets) in self.drops.nonzero() {
            print_line!("{packets:>12} dropped: {:<28} {}", reason.name(), reason.sentence())?;
        }
        Ok(())
    }
}

/// Packets of one network core as JSON.
fn core_json(core: &NetCounters) -> Value {
    json!({
        "received": core.device.received,
        "passed_on": core.device.passed_on,
        "delivered": core.stack.delivered,
        "handled": core.stack.handled,
        "transmitted": core.device.transmitted,
    })
}

/// Counters of the gate as JSON.
pub(crate) fn gate_json(gate: &GateCounters) -> Value {
    json!({
        "interrupts": gate.interrupts,
        "receive_turns": gate.receive_turns,
        "yields": gate.yields,
        "held_by_feedback": gate.paused_by_feedback,
        "held_by_share": gate.paused_by_share,
        "lifted": gate.share_lifted,
    })
}

/// Admitted and refused packets of each class as JSON.
pub(crate) fn classes_json(classes: &[(String, ClassCounters)]) -> Value {
    let rows = classes.iter().map(|(name, class)| {
        let row = json!({
            "admitted": class.admitted,
            "admitted_over_share": class.admitted_over_share,
            "refused_closed": class.refused_closed,
            "refused_rate": class.refused_rate,
            "refused_source_share": class.refused_source_share,
        });
        (name.clone(), row)
    });
    Value::Object(rows.collect())
}

/// Frames of each transmit class as JSON.
pub(crate) fn transmit_classes_json(classes: &[(String, transmit::ClassCounters)]) -> Value {
    let rows = classes.iter().map(|(name, class)| {
        let row = json!({
            "sent": class.sent,
            "sent_bytes": class.sent_bytes,
            "dropped": class.dropped,
            "queued": class.queued,
        });
        (name.clone(), row)
    });
    Value::Object(rows.collect())
}

/// Counters of a DPDK device, by the names of its driver, as JSON.
fn driver_json(counters: &DeviceCounters) -> Value {
    let counted = counters.driver.iter().map(|(name, value)| (name.to_string(), (*value).into()));
    Value::Object(counted.collect::<Map<_, _>>())
}

/// Nonzero drop counters by reason, as JSON.
pub(crate) fn drops_json(drops: &DropCounters) -> Value {
    let seen = drops.nonzero().map(|(reason, packets)| (reason.name().to_owned(), packets.into()));
    Value::Object(seen.collect::<Map<_, _>>())
}

/// Flags of `drops`.
#[derive(Args)]
pub(crate) struct Drops {
    /// Print the drop reasons as JSON
    #[arg(long)]
    json: bool,
}

impl Drops {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.json {
            let reasons: Vec<_> = DropReason::ALL
                .iter()
                .map(|reason| {
                    json!({
                        "name": reason.name(),
                        "severity": reason.severity().to_string(),
                        "sentence": reason.sentence(),
                    })
                })
                .collect();
            print_line!("{}", serde_json::to_string_pretty(&reasons)?)?;
            return Ok(());
        }
        for reason in DropReason::ALL {
            print_line!("{:<28} {:<7} {}", reason.name(), reason.severity(), reason.sentence())?;
        }
        Ok(())
    }
}
