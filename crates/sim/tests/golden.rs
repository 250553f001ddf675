//! Golden tables: what each mode does at loads from a tenth of the capacity to
//! ten times of it. A change of the gate, the stack or the simulator shows as
//! a difference of numbers. `TIDEGATE_GOLDEN=write cargo test -p tidegate-sim`
//! writes the tables anew.

use std::fmt::Write;

use tidegate_gate::{Config, Mode, Quota, Settings};
use tidegate_sim::{
    Beside, Costs, Level, Link, Load, Machine, Place, Placement, Report, Role, Screen, Setup,
    Shape, Tick,
};

const MS: u64 = 1_000_000;
const LOADS_PERCENT: [u64; 10] = [10, 25, 50, 75, 100, 150, 200, 300, 500, 1000];

fn settings(change: impl FnOnce(&mut Config)) -> Settings {
    let mut config = Config { feedback: false, ..Config::default() };
    change(&mut config);
    Settings::new(config).unwrap()
}

fn heading(about: &str) -> String {
    let mut table = format!("{about}\nCPU in percent, latency in microseconds.\n\n");
    let _ = write!(table, "{:>8} {:>9} {:>9}", "load %", "offered", "served");
    for place in Place::ALL {
        let _ = write!(table, " {:>12}", place.name());
    }
    for level in ["device", "software", "kernel", "program", "idle"] {
        let _ = write!(table, " {level:>8}");
    }
    let _ = writeln!(table, " {:>9} {:>9} {:>8}", "median", "p99", "beside");
    table
}

fn row(table: &mut String, percent: u64, report: &Report) {
    let pps = |count| report.per_second(count).round();
    let _ = write!(table, "{percent:>8} {:>9} {:>9}", pps(report.offered), pps(report.delivered));
    for place in Place::ALL {
        let _ = write!(table, " {:>12}", pps(report.dropped(place)));
    }
    for level in Level::ALL {
        let _ = write!(table, " {:>8.2}", report.level_percent(level));
    }
    let _ = write!(table, " {:>8.2}", report.idle_percent());
    let latency = |quantile| report.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
    let beside: u64 = report.beside.iter().map(|beside| beside.spent_ns).sum();
    let _ = writeln!(
        table,
        " {:>9.1} {:>9.1} {:>8.2}",
        latency(0.5),
        latency(0.99),
        report.percent(beside)
    );
}

/// Compares with the table in the tree, or writes it.
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

fn sweep(setup: &Setup, capacity_pps: u64) -> Vec<(u64, Report)> {
    LOADS_PERCENT
        .iter()
        .map(|&percent| {
            let load = Load { pps: capacity_pps * percent / 100, ..setup.load };
            let mut machine = Machine::new(&Setup { load, ..setup.clone() }).unwrap();
            machine.run(10 * MS);
            (percent, machine.run(40 * MS))
        })
        .collect()
}

fn golden(name: &str, about: &str, setup: &Setup, capacity_pps: u64) -> Vec<(u64, Report)> {
    let rows = sweep(setup, capacity_pps);
    let mut table = heading(about);
    rows.iter().for_each(|(percent, report)| row(&mut table, *percent, report));
    check(name, &table);
    rows
}

/// The worst goodput at or above the load of the peak, over the peak.
fn floor(rows: &[(u64, Report)]) -> f64 {
    let served: Vec<f64> = rows.iter().map(|(_, report)| report.delivered_pps()).collect();
    let peak = served.iter().copied().fold(0.0, f64::max);
    let at = served.iter().position(|&pps| pps == peak).unwrap_or(0);
    served[at..].iter().copied().fold(peak, f64::min) / peak
}

fn udp(name: &str, settings: Settings, change: impl FnOnce(&mut Setup)) -> f64 {
    let mut setup = Setup { gate: settings, ..Setup::default() };
    setup.load.shape = Shape::Poisson;
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
fn udp_polled_with_a_share_leaves_the_rest() {
    let share = settings(|c| {
        c.feedback = true;
        c.cpu_share_percent = 50;
    });
    udp("polled-share", share, |setup| setup.beside = vec![Beside::Compute]);
}

#[test]
fn udp_dedicated_is_flat() {
    let floor = udp("dedicated", settings(|c| c.mode = Mode::Dedicated), |setup| {
        setup.role = Role::Udp {
            family: Default::default(),
            socket_queue: 256,
            answers: true,
            placement: Placement::Inline,
        };
    });
    assert!(floor > 0.95, "{floor}");
}

/// A router of the year 1996: 200 microseconds a packet, Ethernet.
fn router(name: &str, settings: Settings, screen: bool, change: impl FnOnce(&mut Setup)) -> f64 {
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
    };
    let mut setup = Setup {
        gate: settings,
        costs,
        link: Link { bits_per_second: 1_000_000_000 },
        receive_ring: 32,
        transmit_ring: 32,
        role: Role::Router { output_queue: 50, screen: screen.then_some(Screen { queue: 32 }) },
        tick: Some(Tick { period_ns: MS, cost_ns: 60_000 }),
        quantum_ns: 10 * MS,
        load: Load { shape: Shape::Poisson, ..Load::default() },
        ..Setup::default()
    };
    change(&mut setup);
    let mut rows = Vec::new();
    let mut table = heading(&format!("A router, Poisson arrivals, {name}."));
    for &percent in &LOADS_PERCENT {
        let load = Load { pps: 5000 * percent / 100, ..setup.load };
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
fn screen_interrupt_livelocks() {
    let interrupt = settings(|c| c.mode = Mode::Interrupt);
    assert!(router("screen-interrupt", interrupt, true, |_| ()) < 0.05);
}

#[test]
fn screen_without_feedback_livelocks() {
    let quota = settings(|c| c.receive_quota = Quota::Packets(10));
    assert!(router("screen-quota", quota, true, |_| ()) < 0.05);
}

#[test]
fn screen_with_feedback_is_flat() {
    let feedback = settings(|c| {
        c.receive_quota = Quota::Packets(10);
        c.feedback = true;
    });
    assert!(router("screen-feedback", feedback, true, |_| ()) > 0.95);
}

#[test]
fn a_share_is_kept_at_every_load() {
    for percent in [25, 50, 75] {
        let share = settings(|c| {
            c.receive_quota = Quota::Packets(5);
            c.cpu_share_percent = percent;
        });
        router(&format!("share-{percent}"), share, false, |setup| {
            setup.beside = vec![Beside::Compute];
        });
    }
}
