//! Jonack and Murta's servers SS1 to SS3: interrupt moderation against NAPI.
//!
//! One set of costs, those of SS1, and one number for each other server: how
//! much slower or faster it is. The speeds are fitted twice, so that every
//! judged number comes from a fit that did not see it: what is judged under
//! NAPI comes from speeds fitted under moderation, and the other way round.

use serde_json::{Value, json};
use tidegate_gate::{Config, Mode};
use tidegate_sim::{Beside, Costs, Family, Link, Load, Machine, Report, Role, Setup};

use super::tables::{Jonack, LoadLevel, Server};
use super::{Judged, least_that};
use crate::plot::{Axis, Panel, Series, Span};
use crate::sweep::{hundredths, settings};
use crate::{Experiment, LabError};

const MS: u64 = 1_000_000;
/// Virtual time of each measurement.
const WINDOW_MS: u64 = 400;
/// The outgoing flow: 10 Mb/s in packets of 1470 bytes (section 3.2).
const FLOW_PPS: f64 = 10e6 / (1470.0 * 8.0);
const FLOW_MBPS: f64 = 10.0;
/// A little beyond the highest level.
const AXIS_END_PPS: f64 = 950_000.0;
/// No table says what a packet of the outgoing flow costs. It is copied from
/// a program, so it is taken to cost as much as five received ones.
const FLOW_COST: u64 = 5;
/// Less of the flow than this share is livelock.
const LIVELOCK_SHARE: f64 = 0.01;

/// How a server takes packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mechanism {
    Moderated,
    Napi,
}

impl Mechanism {
    fn name(self) -> &'static str {
        match self {
            Self::Moderated => "moderated",
            Self::Napi => "napi",
        }
    }
}

/// What a packet costs, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct PacketCosts {
    /// In the interrupt handler.
    receive_ns: f64,
    /// In the protocols.
    protocol_ns: f64,
    /// All of it, under NAPI.
    napi_ns: f64,
}

impl PacketCosts {
    fn scaled(self, factor: f64) -> Self {
        Self {
            receive_ns: self.receive_ns * factor,
            protocol_ns: self.protocol_ns * factor,
            napi_ns: self.napi_ns * factor,
        }
    }
}

/// The middle of a bracket of rates, by ratio.
fn middle(bracket: (u64, u64)) -> f64 {
    (bracket.0 as f64 * bracket.1 as f64).sqrt()
}

/// One server under one mechanism at one load.
fn measure(costs: PacketCosts, mechanism: Mechanism, pps: u64) -> Result<Report, LabError> {
    let whole = |ns: f64| ns.round().max(1.0) as u64;
    let receive_ns = whole(costs.receive_ns);
    let protocol_ns = whole(costs.protocol_ns);
    let mode = match mechanism {
        Mechanism::Moderated => Mode::Moderated,
        Mechanism::Napi => Mode::Napi,
    };
    // The numbers of section 3 are the gate's defaults; the queue and the
    // round are those of Linux 2.6.11.
    let config = Config { mode, input_queue: 300, round_us: 1000, ..Config::default() };
    let period_ns = (1e9 / FLOW_PPS).round() as u64;
    let setup = Setup {
        gate: settings(config)?,
        costs: Costs {
            interrupt_ns: receive_ns,
            receive_ns,
            software_ns: receive_ns / 4,
            protocol_ns,
            poll_ns: receive_ns / 4,
            poll_receive_ns: whole(costs.napi_ns).saturating_sub(protocol_ns).max(1),
            switch_ns: receive_ns / 2,
            ..Costs::default()
        },
        link: Link { bits_per_second: 1_000_000_000 },
        receive_ring: 256,
        transmit_ring: 256,
        // The card's throttle is on whatever the driver does (section 3).
        interrupt_gap_ns: 125_000,
        role: Role::Closed { family: Family::V4 },
        beside: vec![Beside::Send { period_ns, cost_ns: receive_ns * FLOW_COST }],
        load: Load { pps, ..Load::default() },
        ..Setup::default()
    };
    let mut machine = Machine::new(&setup).map_err(|error| LabError::Config(error.to_string()))?;
    machine.run(50 * MS);
    Ok(machine.run(WINDOW_MS * MS))
}

/// Packets that the card did not lose.
fn received_pps(report: &Report) -> f64 {
    let lost = report.dropped(tidegate_sim::Place::Card);
    report.per_second(report.offered - lost)
}

fn flow_share(report: &Report) -> f64 {
    let sent = report.beside.first().map_or(0, |beside| beside.sent);
    report.per_second(sent) / FLOW_PPS
}

/// SS1's costs: from its livelock under moderation and its rate under NAPI.
fn fit(jonack: &Jonack, server: &Server) -> Result<PacketCosts, LabError> {
    // Livelock comes when the handler alone takes everything; losses too, so
    // the bracket of one is that of the other (section 4.1).
    let receive_ns = 1e9 / middle(server.moderated_pps);
    // At the last load without losses the protocols still had their part.
    let whole_ns = (receive_ns * 1e9 / server.moderated_pps.0 as f64).sqrt();
    let most_pps = jonack.levels.last().map_or(0, |level| level.pps);
    let with = |napi_ns| PacketCosts { receive_ns, protocol_ns: whole_ns - receive_ns, napi_ns };
    let napi_ns = least_that(receive_ns, 4.0 * receive_ns, |napi_ns| {
        let report = measure(with(napi_ns), Mechanism::Napi, most_pps)?;
        Ok(received_pps(&report) <= server.napi_mlfrr_pps as f64)
    })?;
    Ok(with(napi_ns))
}

/// What became of a server under a mechanism at every level.
#[derive(Default)]
struct Course {
    /// The first level of livelock.
    livelock: Option<String>,
    /// The last level before any losses.
    last_lossless_pps: u64,
    /// Packets received at the highest level.
    plateau_pps: f64,
    /// Packets received at each level.
    received: Vec<(f64, f64)>,
    /// The outgoing flow at each level, in megabits per second.
    flow: Vec<(f64, f64)>,
}

fn course(
    jonack: &Jonack,
    server: &Server,
    costs: PacketCosts,
    mechanism: Mechanism,
    rows: &mut Vec<Value>,
) -> Result<Course, LabError> {
    let mut course = Course::default();
    let mut lossless = true;
    for level in &jonack.levels {
        let report = measure(costs, mechanism, level.pps)?;
        let (received, flow) = (received_pps(&report), flow_share(&report));
        if flow < LIVELOCK_SHARE && course.livelock.is_none() {
            course.livelock = Some(level.name.clone());
        }
        // A packet in a thousand is still none: the counters of the paper were
        // read before and after.
        lossless &= received >= 0.999 * report.offered_pps();
        if lossless {
            course.last_lossless_pps = level.pps;
        }
        course.plateau_pps = received;
        course.received.push((level.pps as f64, received));
        course.flow.push((level.pps as f64, flow * FLOW_MBPS));
        rows.push(json!({
            "machine": server.name,
            "case": mechanism.name(),
            "level": level.name,
            "offered_pps": level.pps,
            "received_pps": received.round(),
            "flow_mbps": hundredths(flow * FLOW_MBPS),
            "system_percent": hundredths(100.0 - report.idle_percent()
                - report.percent(report.beside.iter().map(|beside| beside.spent_ns).sum())),
        }));
    }
    Ok(course)
}

/// Runs the servers at every level, and judges what was not fitted.
pub(super) fn run(result: &mut Experiment) -> Result<(Vec<Judged>, Vec<Panel>), LabError> {
    let jonack = Jonack::read()?;
    let Some(reference) = jonack.servers.first() else { return Ok(Default::default()) };
    let base = fit(&jonack, reference)?;
    let mut judged = Vec::new();
    let mut panels = Vec::new();
    for server in &jonack.servers {
        // How much slower than the reference, by each half of the numbers.
        let by_moderation = middle(reference.moderated_pps) / middle(server.moderated_pps);
        let by_napi = reference.napi_mlfrr_pps as f64 / server.napi_mlfrr_pps as f64;
        let half = if server == reference { "fitted" } else { "judged" };
        let (mut received, mut flow) = (Vec::new(), Vec::new());
        for (mechanism, factor) in
            [(Mechanism::Moderated, by_napi), (Mechanism::Napi, by_moderation)]
        {
            let rows = &mut result.rows;
            let course = course(&jonack, server, base.scaled(factor), mechanism, rows)?;
            judge(&mut judged, server, mechanism, half, &course);
            received.push(Series::new(mechanism.name(), course.received));
            flow.push(Series::new(mechanism.name(), course.flow));
        }
        let most_pps = jonack.levels.last().map_or(0.0, |level| level.pps as f64);
        received.push(published_napi(server, most_pps));
        panels.push(Panel {
            title: format!("{} of Jonack and Murta: the flood", server.name),
            x: Axis::new("offered", "packets/s"),
            y: Axis::new("received", "packets/s"),
            series: received,
            ..Panel::default()
        });
        let begins = jonack.levels.iter().find(|level| level.name == server.livelock_level);
        let livelock = |level: &LoadLevel| Span {
            range: (level.pps as f64, AXIS_END_PPS),
            label: String::new(),
        };
        panels.push(Panel {
            title: format!("{}: the flow out; livelock published where grey", server.name),
            x: Axis::new("offered", "packets/s").up_to(AXIS_END_PPS),
            y: Axis::new("sent", "Mb/s").up_to(12.0),
            series: flow,
            spans: begins.map(livelock).into_iter().collect(),
        });
    }
    result.note(
        "Jonack and Murta: the costs are SS1's (the middle of its bracket of losses under \
         moderation, its MLFRR under NAPI); the speeds of SS2 and SS3 are fitted on the NAPI half \
         where moderation is judged, and on the moderation half where NAPI is judged",
    );
    result.note(format!(
        "assumed, since no table says: a packet of the outgoing flow costs as much as {FLOW_COST} \
         received ones, an interrupt as much as one; livelock is less than 1 % of the flow"
    ));
    result.note(
        "known difference: SS3's last level without losses under NAPI is N6, of 498,000 packets/s, \
         and its published MLFRR is 3 % above that. A speed that is read from losses under \
         moderation is as fine as the two levels around them, which are 34 to 37 % apart; it gives \
         the MLFRR 9 % too low, so N6 has losses. Every reading of the brackets (lower ends, upper ends, \
         middles) gives SS3 2.7 times SS1's speed; NAPI's own numbers give 3.0: the paper's \
         servers have no single speed, the model's do",
    );
    result.note(
        "known difference: in the paper the outgoing flow is much degraded one level before \
         livelock already; here it is whole until then",
    );
    Ok((judged, panels))
}

/// Section 4.1: all that comes up to the MLFRR, and no more than that.
fn published_napi(server: &Server, most_pps: f64) -> Series {
    let mlfrr = server.napi_mlfrr_pps as f64;
    let points = [(0.0, 0.0), (mlfrr, mlfrr), (most_pps, mlfrr)];
    Series::new("napi, published", points).dashed()
}

fn judge(
    judged: &mut Vec<Judged>,
    server: &Server,
    mechanism: Mechanism,
    half: &'static str,
    course: &Course,
) {
    let of = |what: &str| format!("{} {what}", mechanism.name());
    let published = match mechanism {
        Mechanism::Moderated => server.livelock_level.as_str(),
        Mechanism::Napi => "never",
    };
    let simulated = course.livelock.as_deref().unwrap_or("never");
    // That NAPI never livelocks was fitted nowhere, not even on SS1.
    let livelock_half = if mechanism == Mechanism::Napi { "judged" } else { half };
    judged.push(Judged::same(&server.name, of("livelock"), livelock_half, published, simulated));
    let lossless_pps = match mechanism {
        Mechanism::Moderated => server.moderated_pps.0,
        Mechanism::Napi => server.napi_pps.0,
    };
    let (published, simulated) = (lossless_pps.to_string(), course.last_lossless_pps.to_string());
    let case = of("last lossless level");
    judged.push(Judged::same(&server.name, case, half, &published, &simulated));
    if mechanism == Mechanism::Napi {
        let published = server.napi_mlfrr_pps as f64;
        let case = of("MLFRR");
        judged.push(Judged::rate(&server.name, case, half, published, course.plateau_pps));
    }
}
