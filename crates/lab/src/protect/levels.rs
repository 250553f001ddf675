//! Eight levels of flood, and what they do to the rest of the machine.

use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use super::side::{Ping, Side};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::livelock::bench::{Bench, Measured, Source};
use crate::livelock::subject::{Carrier, Service};
use crate::plot::{Axis, Panel, Series};

/// The paper's levels N1 to N8, in thousand packets/s (jonack_load_levels.csv);
/// here they are shares of the most that this machine's generator sends.
const LEVELS_KPPS: [f64; 8] = [127.0, 189.0, 236.0, 324.0, 371.0, 498.0, 639.0, 875.0];

/// What was seen at one level.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) flow_mbps: f64,
    pub(super) ping: Ping,
    pub(super) load: Measured,
}

/// Everything of one carrier: without a flood, then at each level.
pub(super) struct Levels {
    pub(super) carrier: Carrier,
    /// By level, 0 is unloaded; a measurement for each repeat.
    pub(super) seen: Vec<Vec<Seen>>,
}

/// Measures every carrier at every level, in turn.
pub(super) fn run(config: &ProtectConfig, bench: &Bench) -> Result<Vec<Levels>, LabError> {
    let names = config.carriers()?;
    let mut all: Vec<Levels> = names
        .into_iter()
        .map(|carrier| Levels { carrier, seen: vec![Vec::new(); LEVELS_KPPS.len() + 1] })
        .collect();
    let namespace = &bench.pair.b.namespace;
    let side = Side::new(namespace, config.server_core, config.load_core)?;
    for repeat in 1..=config.repeats {
        for one in &mut all {
            measure(config, bench, &side, one)?;
            let told: Vec<String> =
                one.seen.iter().filter_map(|seen| seen.last()).map(tell).collect();
            eprintln!("{repeat} {:<16} {}", one.carrier.name(), told.join("  "));
        }
    }
    Ok(all)
}

fn tell(seen: &Seen) -> String {
    let kpps = seen.load.offered_pps / 1e3;
    format!("{kpps:.0} k/s: {:.1} Mb/s, {:.2} ms", seen.flow_mbps, seen.ping.median_ms)
}

fn measure(
    config: &ProtectConfig,
    bench: &Bench,
    side: &Side,
    one: &mut Levels,
) -> Result<(), LabError> {
    let time = Duration::from_secs_f64(config.seconds);
    let settle = Duration::from_secs_f64((config.seconds / 4.0).min(0.2));
    let limit = 3 * (time + settle) * one.seen.len() as u32 + Duration::from_secs(30);
    let service = Service {
        carrier: one.carrier,
        work_ns: 0,
        sink: true,
        flags: &[],
        flooded_by: Source::OneHost,
    };
    let mut running = service.start(bench, limit)?;
    // The machine's own maximum, with this server at the other end.
    let flood = &mut running.flood;
    let most = bench.measure(flood, &running.meter, None, settle, settle)?.offered_pps;
    flood.set_rate(Some(0.0))?;
    std::thread::sleep(settle);
    for (level, seen) in one.seen.iter_mut().enumerate() {
        let rate_pps = match level {
            0 => Some(0.0),
            level if level == LEVELS_KPPS.len() => None,
            level => Some(most * LEVELS_KPPS[level - 1] / LEVELS_KPPS[LEVELS_KPPS.len() - 1]),
        };
        flood.set_rate(rate_pps)?;
        std::thread::sleep(settle);
        let watch = side.watch();
        let load = bench.measure(flood, &running.meter, rate_pps, Duration::ZERO, time)?;
        let flow_mbps = watch.mbps();
        seen.push(Seen { flow_mbps, ping: side.ping(time)?, load });
    }
    Ok(())
}

impl Levels {
    fn median_at(&self, level: usize, figure: impl Fn(&Seen) -> f64) -> f64 {
        median(&self.seen[level].iter().map(figure).collect::<Vec<_>>())
    }

    fn levels(&self) -> std::ops::Range<usize> {
        1..self.seen.len()
    }

    /// The least of the flow at any level, over what it is unloaded.
    pub(super) fn flow_kept_min(&self) -> f64 {
        let flow = |level| self.median_at(level, |seen| seen.flow_mbps);
        self.levels().map(flow).fold(f64::INFINITY, f64::min) / flow(0).max(1e-9)
    }

    /// The longest ping at any level, over what it is unloaded.
    pub(super) fn ping_ratio_max(&self) -> f64 {
        let ping = |level| self.median_at(level, |seen| seen.ping.median_ms);
        self.levels().map(ping).fold(0.0, f64::max) / ping(0).max(1e-9)
    }

    pub(super) fn rows(&self) -> Vec<Value> {
        let row = |level: usize| {
            let of = |figure: fn(&Seen) -> f64| {
                let value = self.median_at(level, figure);
                value.is_finite().then(|| (value * 1000.0).round() / 1000.0)
            };
            json!({
                "test": "levels",
                "carrier": self.carrier.name(),
                "level": if level == 0 { "none".to_owned() } else { format!("N{level}") },
                "offered_per_s": of(|seen| seen.load.offered_pps.round()),
                "flow_mbps": of(|seen| seen.flow_mbps),
                "ping_ms": of(|seen| seen.ping.median_ms),
                "ping_loss_percent": of(|seen| 100.0 * seen.ping.loss),
                "system_percent": of(|seen| system_percent(&seen.load)),
                "flood_loss_percent": of(|seen| loss_percent(&seen.load)),
            })
        };
        (0..self.seen.len()).map(row).collect()
    }
}

fn system_percent(load: &Measured) -> f64 {
    load.server_core.system_percent + load.server_core.softirq_percent
}

fn loss_percent(load: &Measured) -> f64 {
    if load.offered_pps <= 0.0 {
        return 0.0;
    }
    100.0 * (1.0 - load.goodput_pps / load.offered_pps).clamp(0.0, 1.0)
}

/// The paper's pictures: flow, ping, system time and losses against the flood.
pub(super) fn panels(all: &[Levels]) -> Vec<Panel> {
    let panel = |title: &str, y: Axis, figure: fn(&Seen) -> f64| Panel {
        title: title.into(),
        x: Axis::new("flood", "packets/s"),
        y,
        series: all
            .iter()
            .map(|one| {
                let point = |level| {
                    let x = one.median_at(level, |seen| seen.load.offered_pps);
                    (x, one.median_at(level, figure))
                };
                Series::new(one.carrier.name(), (0..one.seen.len()).map(point))
            })
            .collect(),
        spans: Vec::new(),
    };
    vec![
        panel("a steady flow out", Axis::new("rate", "Mb/s"), |seen| seen.flow_mbps),
        panel("ping", Axis::new("median time", "ms").log(), |seen| seen.ping.median_ms),
        panel("the kernel's time", Axis::new("of the core", "%").up_to(100.0), |seen| {
            system_percent(&seen.load)
        }),
        panel("losses of the flood", Axis::new("lost", "%").up_to(100.0), |seen| {
            loss_percent(&seen.load)
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_unloaded_machine_and_of_the_worst_level() {
        let seen = |flow_mbps, median_ms| {
            vec![Seen { flow_mbps, ping: Ping { median_ms, loss: 0.0 }, ..Seen::default() }]
        };
        let one = Levels {
            carrier: Carrier::kernel(),
            seen: vec![seen(10.0, 0.1), seen(9.9, 0.15), seen(9.5, 0.12)],
        };
        assert_eq!(one.flow_kept_min(), 0.95);
        assert!((one.ping_ratio_max() - 1.5).abs() < 1e-9);
        assert_eq!(one.rows()[1]["level"], "N1");
        let dead = Levels {
            carrier: Carrier::kernel(),
            seen: vec![seen(10.0, 0.1), seen(0.0, f64::INFINITY)],
        };
        assert_eq!(dead.flow_kept_min(), 0.0);
        assert!(dead.ping_ratio_max().is_infinite());
        assert!(dead.rows()[1]["ping_ms"].is_null());
    }
}
