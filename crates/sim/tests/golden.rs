//! Golden tables: results of each mode at loads from a tenth of the capacity to ten times the
//! capacity. A change of the gate, the stack or the simulator shows as a difference in the
//! numbers. `TIDEGATE_GOLDEN=write cargo test -p tidegate-sim` rewrites the tables.

use std::fmt::Write;

use tidegate_gate::{Config, Mode, Quota, Settings};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, Costs, DropPoint, FilterProcess, HostRole, Link, Machine,
    OfferedLoad, Placement, PriorityLevel, Setup, SimReport, Tick,
};

const MS: u64 = 1_000_000;
const LOADS_PERCENT: [u64; 10] = [10, 25, 50, 75, 100, 150, 200, 300, 500, 1000];

fn settings(change: impl FnOnce(&mut Config)) -> Settings {
    let mut config = Config::default().feedback(false);
    change(&mut config);
    Settings::new(config).unwrap()
}

fn heading(about: &str) -> String {
    let mut table = format!("{about}\nCPU in percent, latency in microseconds.\n\n");
    let _ = write!(table, "{:>8} {:>9} {:>9}", "load %", "offered", "served");
    for place in DropPoint::ALL {
        let _ = write!(table, " {:>12}", place.name());
    }
    for level in ["device", "software", "kernel", "program", "idle"] {
        let _ = write!(table, " {level:>8}");
    }
    let _ = writeln!(table, " {:>9} {:>9} {:>8}", "median", "p99", "beside");
    table
}

fn row(table: &mut String, percent: u64, report: &SimReport) {
    let pps = |count| report.per_second(count).round();
    let _ = write!(table, "{percent:>8} {:>9} {:>9}", pps(report.offered), pps(report.delivered));
    for place in DropPoint::ALL {
        let _ = write!(table, " {:>12}", pps(report.dropped(place)));
    }
    for level in PriorityLevel::ALL {
        let _ = write!(table, " {:>8.2}", report.level_percent(level));
    }
    let _ = write!(table, " {:>8.2}", report.idle_percent());
    let latency = |quantile| report.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
    let background: u64 = report.background.iter().map(|background| background.spent_ns).sum();
    let _ = writeln!(
        table,
        " {:>9.1} {:>9.1} {:>8.2}",
        latency(0.5),
        latency(0.99),
        report.percent(background)
    );
}

/// Compares a table with the file in the tree, or writes the file.
fn check(name: &str, table: &str) {
    let path = format!("{}/tests/golden/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write") {
        std::fs::write(&path, table).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (is, was)) in table.lines().zip(golden.lines()).enumerate() {
        assert_eq!(is, was, "{path}:{}: TIDEGATE_GOLDEN=write accepts the change", line + 1);
    }
    assert_eq!(table.lines().count(), golden.lines().count(), "{path}");
}

fn sweep(setup: &Setup, capacity_pps: u64) -> Vec<(u64, SimReport)> {
    LOADS_PERCENT
        .iter()
        .map(|&percent| {
            let load = OfferedLoad { pps: capacity_pps * percent / 100, ..setup.load };
            let mut machine = Machine::new(&Setup { load, ..setup.clone() }).unwrap();
            machine.run(10 * MS);
            (percent, machine.run(40 * MS))
        })
        .collect()
}

fn golden(name: &str, about: &str, setup: &Setup, capacity_pps: u64) -> Vec<(u64, SimReport)> {
    let rows = sweep(setup, capacity_pps);
    let mut table = heading(about);
    rows.iter().for_each(|(percent, report)| row(&mut table, *percent, report));
    check(name, &table);
    rows
}

/// Minimum goodput at or above the load of the peak, divided by the peak.
fn floor(rows: &[(u64, SimReport)]) -> f64 {
    let served: Vec<f64> = rows.iter().map(|(_, report)| report.delivered_pps()).collect();
    let peak = served.iter().copied().fold(0.0, f64::max);
    let at = served.iter().position(|&pps| pps == peak).unwrap_or(0);
    served[at..].iter().copied().fold(peak, f64::min) / peak
}

fn udp(name: &str, settings: Settings, change: impl FnOnce(&mut Setup)) -> f64 {
    let mut setup = Setup { gate: settings, ..Setup::default() };
    setup.load.shape = ArrivalPattern::Poisson;
    change(&mut setup);
    let about = format!("A UDP service on one core, Poisson arrivals, mode {name}.");
    floor(&golden(&format!("udp-{name}"), &about, &setup, Costs::default().capacity_pps()))
}

#[test]
fn udp_interrupt_livelocks() {
    assert!(udp("interrupt", settings(|c| c.mode = Mode::Interrupt), |_| ()) < 0.05);
}

#[test]
fn udp_moderated() {
    udp("moderated", settings(|c| c.mode = Mode::Moderated), |_| ());
}

#[test]
fn udp_napi() {
    udp("napi", settings(|c| c.mode = Mode::Napi), |_| ());
}

#[test]
fn udp_polled_without_feedback_starves_the_service() {
    assert!(udp("polled", settings(|_| ()), |_| ()) < 0.5);
}

#[test]
fn udp_polled_with_feedback_is_flat() {
    assert!(udp("polled-feedback", settings(|c| c.feedback = true), |_| ()) > 0.95);
}

#[test]
fn udp_polled_with_a_share_leaves_cpu_to_background_tasks() {
    let share = settings(|c| {
        c.feedback = true;
        c.cpu_share_percent = 50;
    });
    udp("polled-share", share, |setup| setup.background = vec![BackgroundTask::Compute]);
}

#[test]
fn udp_dedicated_is_flat() {
    let floor = udp("dedicated", settings(|c| c.mode = Mode::Dedicated), |setup| {
        setup.role = HostRole::Udp {
            family: Default::default(),
            socket_queue: 256,
            answers: true,
            placement: Placement::Inline,
        };
    });
    assert!(floor > 0.95, "{floor}");
}

/// Simulates a router of 1996: 200 microseconds per packet, Ethernet.
fn router(name: &str, settings: Settings, filter: bool, change: impl FnOnce(&mut Setup)) -> f64 {
    let costs = Costs {
        interrupt_ns: 10_000,
        receive_ns: 70_000,
        software_ns: 10_000,
        protocol_ns: 90_000,
        poll_ns: 5_000,
        poll_receive_ns: 70_000,
        switch_ns: 30_000,
        read_ns: 50_000,
        work_ns: 100_000,
        transmit_ns: 30_000,
        transmit_done_ns: 10_000,
        refuse_ns: 0,
        crossing_ns: 0,
        remote_ns: 0,
    };
    let mut setup = Setup {
        gate: settings,
        costs,
        link: Link { bits_per_second: 1_000_000_000 },
        receive_ring: 32,
        transmit_ring: 32,
        role: HostRole::Router {
            output_queue: 50,
            filter: filter.then_some(FilterProcess { queue: 32 }),
        },
        tick: Some(Tick { period_ns: MS, cost_ns: 60_000 }),
        quantum_ns: 10 * MS,
        load: OfferedLoad { shape: ArrivalPattern::Poisson, ..OfferedLoad::default() },
        ..Setup::default()
    };
    change(&mut setup);
    let mut rows = Vec::new();
    let mut table = heading(&format!("A router, Poisson arrivals, {name}."));
    for &percent in &LOADS_PERCENT {
        let load = OfferedLoad { pps: 5000 * percent / 100, ..setup.load };
        let mut machine = Machine::new(&Setup { load, ..setup.clone() }).unwrap();
        machine.run(100 * MS);
        let report = machine.run(1000 * MS);
        row(&mut table, percent, &report);
        rows.push((percent, report));
    }
    check(&format!("router-{name}"), &table);
    floor(&rows)
}

#[test]
fn router_interrupt_livelocks() {
    assert!(router("interrupt", settings(|c| c.mode = Mode::Interrupt), false, |_| ()) < 0.05);
}

#[test]
fn router_without_quota_starves_the_transmitter() {
    let unlimited = settings(|c| c.receive_quota = Quota::Unlimited);
    assert!(router("unlimited", unlimited, false, |_| ()) < 0.05);
}

#[test]
fn router_with_a_quota_is_flat() {
    let quota = settings(|c| c.receive_quota = Quota::Packets(10));
    assert!(router("quota", quota, false, |_| ()) > 0.95);
}

#[test]
fn filter_interrupt_livelocks() {
    let interrupt = settings(|c| c.mode = Mode::Interrupt);
    assert!(router("screen-interrupt", interrupt, true, |_| ()) < 0.05);
}

#[test]
fn filter_without_feedback_livelocks() {
    let quota = settings(|c| c.receive_quota = Quota::Packets(10));
    assert!(router("screen-quota", quota, true, |_| ()) < 0.05);
}

#[test]
fn filter_with_feedback_is_flat() {
    let feedback = settings(|c| {
        c.receive_quota = Quota::Packets(10);
        c.feedback = true;
    });
    assert!(router("screen-feedback", feedback, true, |_| ()) > 0.95);
}

#[test]
fn cpu_share_holds_at_every_load() {
    for percent in [25, 50, 75] {
        let share = settings(|c| {
            c.receive_quota = Quota::Packets(5);
            c.cpu_share_percent = percent;
        });
        router(&format!("share-{percent}"), share, false, |setup| {
            setup.background = vec![BackgroundTask::Compute];
        });
    }
}
