//! Behaviour of the parts of a machine, tested through the public interface.

use tidegate_gate::{Config, Mode, Settings};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, Costs, DropPoint, HostRole, IpFamily, Machine, OfferedLoad,
    Placement, PriorityLevel, Setup, SimReport,
};

const MS: u64 = 1_000_000;

fn gate(mode: Mode) -> Settings {
    Settings::new(Config::default().mode(mode)).unwrap()
}

fn load(pps: u64) -> OfferedLoad {
    OfferedLoad { pps, shape: ArrivalPattern::Poisson, ..OfferedLoad::default() }
}

fn run(setup: &Setup) -> SimReport {
    let mut machine = Machine::new(setup).unwrap();
    machine.run(5 * MS);
    machine.run(50 * MS)
}

#[test]
fn moderation_limits_the_interrupt_rate_and_bounds_latency() {
    let moderated = Setup { gate: gate(Mode::Moderated), load: load(100_000), ..Setup::default() };
    let plain = Setup { gate: gate(Mode::Interrupt), ..moderated.clone() };
    let (moderated, plain) = (run(&moderated), run(&plain));
    assert!(moderated.per_second(moderated.interrupts) <= 8001.0, "{}", moderated.interrupts);
    assert!(plain.per_second(plain.interrupts) > 50_000.0, "{}", plain.interrupts);
    assert!(moderated.latency_ns.max() < 300_000, "the gap and the work");
    assert!(plain.latency_ns.value_at_quantile(0.5) < 10_000);
    assert_eq!(moderated.drops, [0; DropPoint::ALL.len()]);
}

#[test]
fn nic_enforces_its_own_interrupt_gap() {
    for mode in [Mode::Interrupt, Mode::Napi, Mode::Polled] {
        let gap = Setup {
            gate: gate(mode),
            interrupt_gap_ns: 250_000,
            load: load(100_000),
            ..Setup::default()
        };
        let report = run(&gap);
        assert!(report.per_second(report.interrupts) <= 4001.0, "{mode:?}");
        assert_eq!(report.drops, [0; DropPoint::ALL.len()], "{mode:?}");
    }
}

#[test]
fn crossing_costs_what_it_says_on_several_cores() {
    let served = |cores, crossing_share, mode| {
        let costs = Costs { crossing_ns: 1250, ..Costs::default() };
        let (load, gate) = (load(10_000_000), gate(mode));
        let setup = Setup { cores, crossing_share, costs, load, gate, ..Setup::default() };
        run(&setup).delivered_pps()
    };
    for mode in [Mode::Polled, Mode::Napi] {
        assert_eq!(served(1, 1.0, mode), served(1, 0.0, mode), "one core has no other");
    }
    // Some 1,350 ns without a crossing.
    let ratio = served(2, 1.0, Mode::Polled) / served(2, 0.0, Mode::Polled);
    assert!((0.45..0.6).contains(&ratio), "{ratio}");
    let half = served(2, 0.5, Mode::Polled) / served(2, 0.0, Mode::Polled);
    assert!((0.62..0.75).contains(&half), "{half}");
}

#[test]
fn machine_without_load_is_fully_idle() {
    let report = run(&Setup { load: load(0), ..Setup::default() });
    assert_eq!((report.offered, report.idle_ns), (0, report.duration_ns));
    assert!(report.idle_percent() == 100.0 && report.level_percent(PriorityLevel::Device) == 0.0);
}

#[test]
fn dedicated_core_replies_without_interrupts() {
    for family in [IpFamily::V4, IpFamily::V6] {
        let setup = Setup {
            gate: gate(Mode::Dedicated),
            role: HostRole::Udp {
                family,
                socket_queue: 64,
                answers: true,
                placement: Placement::Inline,
            },
            load: load(200_000),
            ..Setup::default()
        };
        let report = run(&setup);
        assert_eq!((report.interrupts, report.drops), (0, [0; DropPoint::ALL.len()]), "{family:?}");
        assert!(report.delivered > 9_500 && report.answered == report.delivered);
    }
}

/// A flow stays on its core, and a few thousand flows load all cores evenly.
#[test]
fn more_cores_serve_more() {
    let one = Setup { load: load(2_000_000), ..Setup::default() };
    let four = Setup { cores: 4, ..one.clone() };
    let single = Setup { load: OfferedLoad { flows: 1, ..one.load }, ..four.clone() };
    let [one, four, single] = [one, four, single].map(|setup| run(&setup).delivered_pps());
    assert!(four > 2.5 * one, "{one} {four}");
    assert!(single < 1.1 * one, "one flow is one core's work: {one} {single}");
}

#[test]
fn flood_starves_background_tasks_unless_the_cpu_share_is_limited() {
    let background_percent = |config: Config| {
        let setup = Setup {
            gate: Settings::new(config).unwrap(),
            background: vec![BackgroundTask::Compute],
            load: load(5_000_000),
            ..Setup::default()
        };
        let report = run(&setup);
        report.percent(report.background[0].spent_ns)
    };
    let interrupt = background_percent(Config::default().mode(Mode::Interrupt));
    assert!(interrupt < 1.0, "{interrupt}");
    let polled = Config::default().feedback(false);
    assert!(background_percent(polled.clone()) < 1.0);
    let shared = background_percent(polled.cpu_share_percent(40));
    assert!(shared > 25.0, "{shared}");
}

#[test]
fn recovers_when_the_flood_ends() {
    for mode in [Mode::Interrupt, Mode::Moderated, Mode::Napi, Mode::Polled] {
        let setup = Setup { gate: gate(mode), load: load(100_000), ..Setup::default() };
        let mut machine = Machine::new(&setup).unwrap();
        machine.run(10 * MS);
        machine.set_load(load(6_000_000)).unwrap();
        machine.run(20 * MS);
        machine.set_load(load(100_000)).unwrap();
        machine.run(10 * MS);
        let after = machine.run(20 * MS);
        assert_eq!(after.drops, [0; DropPoint::ALL.len()], "{mode:?}: {:?}", DropPoint::ALL);
        assert!(after.delivered_pps() > 90_000.0, "{mode:?}");
    }
}
