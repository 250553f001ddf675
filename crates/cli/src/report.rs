//! What a command prints at its end, for people and as JSON.

use std::sync::atomic::Ordering;

use clap::Args;
use serde_json::{Map, Value, json};
use tidegate::gate::GateCounters;
use tidegate::gate::admission::ClassCounters;
use tidegate::{DropCounters, DropReason, Net};
use tidegate_apps::ServeCounters;
use tidegate_port::PortCounters;

use crate::Failure;

/// What a server did.
pub(crate) struct ServeReport {
    json: Value,
    drops: DropCounters,
}

impl ServeReport {
    /// A server on kernel sockets: the kernel does not tell what it dropped.
    pub(crate) fn kernel(name: &str, served: &ServeCounters) -> Self {
        let json = json!({
            "server": name,
            "port": "kernel",
            "requests": served.requests.load(Ordering::Relaxed),
            "answers": served.answers.load(Ordering::Relaxed),
        });
        Self { json, drops: DropCounters::new() }
    }

    /// A server on Tidegate.
    pub(crate) fn tidegate(name: &str, served: &ServeCounters, net: &Net) -> Self {
        let counters = net.counters();
        // After the counters: a port learns from the kernel how it really works.
        let capabilities = net.capabilities();
        let drops = counters.drops();
        let json = json!({
            "server": name,
            "port": capabilities.kind,
            "detail": capabilities.detail,
            "requests": served.requests.load(Ordering::Relaxed),
            "answers": served.answers.load(Ordering::Relaxed),
            "received": counters.port.received,
            "transmitted": counters.port.transmitted,
            "delivered": counters.stack.delivered,
            "handled": counters.stack.handled,
            "rounds": counters.engine.rounds,
            "busy_rounds": counters.engine.busy_rounds,
            "sleeps": counters.engine.sleeps,
            "gate": gate_json(&counters.gate),
            "classes": classes_json(&counters.classes),
            "drops": drops_json(&drops),
            "device": device_json(&counters.port),
        });
        Self { json, drops }
    }

    pub(crate) fn print(&self, as_json: bool) -> Result<(), Failure> {
        if as_json {
            println!("{}", self.json);
            return Ok(());
        }
        println!("{} requests, {} answers", self.json["requests"], self.json["answers"]);
        if let (Some(received), Some(sent)) =
            (self.json["received"].as_u64(), self.json["transmitted"].as_u64())
        {
            println!("{received} frames received, {sent} transmitted");
        }
        for (reason, packets) in self.drops.nonzero() {
            println!("{packets:>12} dropped: {:<28} {}", reason.name(), reason.sentence());
        }
        Ok(())
    }
}

/// What the gate did.
pub(crate) fn gate_json(gate: &GateCounters) -> Value {
    json!({
        "interrupts": gate.interrupts,
        "receive_turns": gate.receive_turns,
        "yields": gate.yields,
        "held_by_feedback": gate.held_by_feedback,
        "held_by_share": gate.held_by_share,
        "lifted": gate.lifted,
    })
}

/// What was admitted and refused of each class.
pub(crate) fn classes_json(classes: &[(String, ClassCounters)]) -> Value {
    let rows = classes.iter().map(|(name, class)| {
        let row = json!({
            "admitted": class.admitted,
            "refused_closed": class.refused_closed,
            "refused_rate": class.refused_rate,
            "refused_source_share": class.refused_source_share,
        });
        (name.clone(), row)
    });
    Value::Object(rows.collect())
}

/// What a device of DPDK's counts itself.
fn device_json(port: &PortCounters) -> Value {
    let counted = port.device.iter().map(|(name, value)| (name.to_string(), (*value).into()));
    Value::Object(counted.collect::<Map<_, _>>())
}

/// The drops that happened, by name.
pub(crate) fn drops_json(drops: &DropCounters) -> Value {
    let seen = drops.nonzero().map(|(reason, packets)| (reason.name().to_owned(), packets.into()));
    Value::Object(seen.collect::<Map<_, _>>())
}

/// Flags of `drops`.
#[derive(Args)]
pub(crate) struct Drops {
    /// As JSON
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
            println!("{}", serde_json::to_string_pretty(&reasons)?);
            return Ok(());
        }
        for reason in DropReason::ALL {
            println!("{:<28} {:<7} {}", reason.name(), reason.severity(), reason.sentence());
        }
        Ok(())
    }
}
