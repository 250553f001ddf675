//! Readers that stop or die, a clock that jumps, a class that nobody matches.

use tidegate_gate::{Config, Mode, Settings, admission};
use tidegate_sim::{
    Beside, Family, Load, Machine, Place, Placement, ReaderState, Report, Role, Screen, Setup,
    SetupError, Shape,
};

const MS: u64 = 1_000_000;
const HOUR_NS: i64 = 3600 * 1000 * MS as i64;

fn gate(change: impl FnOnce(&mut Config)) -> Settings {
    let mut config = Config::default();
    change(&mut config);
    Settings::new(config).unwrap()
}

fn load(pps: u64) -> Load {
    Load { pps, shape: Shape::Poisson, ..Load::default() }
}

/// Four readers on one core, with short queues; polled with feedback.
fn four_readers(family: Family, pps: u64) -> Setup {
    let Setup { role: Role::Udp { answers, placement, .. }, .. } = Setup::default() else {
        unreachable!("the default is a UDP service")
    };
    let role = Role::Udp { family, socket_queue: 64, answers, placement };
    Setup { readers: 4, role, load: load(pps), ..Setup::default() }
}

fn served_over_offered(report: &Report) -> f64 {
    report.delivered as f64 / report.offered as f64
}

#[test]
fn a_reader_that_stops_costs_the_others_nothing() {
    for family in [Family::V4, Family::V6] {
        let mut machine = Machine::new(&four_readers(family, 300_000)).unwrap();
        machine.run(20 * MS);
        assert!(served_over_offered(&machine.run(50 * MS)) > 0.99, "all are well");
        machine.set_reader(2, ReaderState::Stopped).unwrap();
        machine.run(20 * MS);
        let report = machine.run(50 * MS);
        let kept = served_over_offered(&report);
        assert!((0.74..0.76).contains(&kept), "{family:?}: three of four: {kept}");
        assert_eq!(report.dropped(Place::Card), 0, "nobody else lost anything");
        machine.set_reader(2, ReaderState::Reads).unwrap();
        machine.run(20 * MS);
        let kept = served_over_offered(&machine.run(50 * MS));
        assert!(kept > 0.99, "{family:?}: it reads again: {kept}");
    }
}

#[test]
fn a_reader_that_dies_costs_the_others_nothing() {
    for family in [Family::V4, Family::V6] {
        let mut machine = Machine::new(&four_readers(family, 300_000)).unwrap();
        machine.run(20 * MS);
        // Its queue is full when it dies.
        machine.set_reader(1, ReaderState::Stopped).unwrap();
        machine.run(20 * MS);
        machine.set_reader(1, ReaderState::Dead).unwrap();
        machine.run(20 * MS);
        let report = machine.run(50 * MS);
        let kept = served_over_offered(&report);
        assert!((0.74..0.76).contains(&kept), "{family:?}: three of four: {kept}");
        assert_eq!(report.dropped(Place::Card), 0, "nobody else lost anything");
        assert_eq!(report.dropped(Place::SocketQueue), 0, "its packets are refused");
        assert_eq!(machine.total().unaccounted(), 0);
        machine.set_reader(1, ReaderState::Reads).unwrap();
        let kept = served_over_offered(&machine.run(50 * MS));
        assert!((0.74..0.76).contains(&kept), "{family:?}: the dead stay dead: {kept}");
    }
}

#[test]
fn a_stopped_reader_does_not_stop_the_others_under_a_flood() {
    let mut machine = Machine::new(&four_readers(Family::V4, 5_000_000)).unwrap();
    machine.run(20 * MS);
    let before = machine.run(50 * MS).delivered_pps();
    machine.set_reader(0, ReaderState::Stopped).unwrap();
    machine.run(20 * MS);
    let stopped = machine.run(100 * MS).delivered_pps();
    // A fourth of what is received is for the one that does not read.
    assert!(stopped > 0.7 * before, "{stopped} of {before}");
    machine.set_reader(0, ReaderState::Dead).unwrap();
    machine.run(20 * MS);
    let dead = machine.run(100 * MS).delivered_pps();
    assert!(dead > 0.7 * before, "{dead} of {before}");
}

#[test]
fn a_screen_that_hangs_is_found_again_and_a_dead_one_lets_nothing_through() {
    let role = Role::Router { output_queue: 50, screen: Some(Screen { queue: 32 }) };
    let setup = Setup { role, load: load(200_000), ..Setup::default() };
    let mut machine = Machine::new(&setup).unwrap();
    machine.run(20 * MS);
    let before = machine.run(50 * MS).delivered_pps();
    machine.set_reader(0, ReaderState::Stopped).unwrap();
    machine.run(50 * MS);
    let stopped = machine.run(50 * MS);
    assert_eq!(stopped.delivered, 0);
    machine.set_reader(0, ReaderState::Reads).unwrap();
    machine.run(20 * MS);
    assert!(machine.run(50 * MS).delivered_pps() > 0.98 * before);
    machine.set_reader(0, ReaderState::Dead).unwrap();
    machine.run(20 * MS);
    let dead = machine.run(50 * MS);
    assert_eq!(dead.delivered, 0);
    assert_eq!(machine.total().unaccounted(), 0);
}

#[test]
fn a_clock_that_jumps_is_over_in_a_moment() {
    for (mode, share) in [
        (Mode::Interrupt, 100),
        (Mode::Moderated, 100),
        (Mode::Napi, 100),
        (Mode::Polled, 100),
        (Mode::Polled, 40),
    ] {
        let setup = Setup {
            gate: gate(|c| {
                c.mode = mode;
                c.cpu_share_percent = share;
            }),
            // Just more than is served, but for the modes that collapse.
            load: load(if mode == Mode::Polled { 2_000_000 } else { 250_000 }),
            beside: if share < 100 { vec![Beside::Compute] } else { Vec::new() },
            ..Setup::default()
        };
        let mut machine = Machine::new(&setup).unwrap();
        machine.run(50 * MS);
        let before = machine.run(200 * MS).delivered_pps();
        // Hours forward, hours back, back to its beginning, and a little.
        for jump_ns in [3 * HOUR_NS, -2 * HOUR_NS, -5 * HOUR_NS, 7_000_000, -3_000_000] {
            machine.jump_clock(jump_ns);
            machine.run(300 * MS);
            let after = machine.run(200 * MS).delivered_pps();
            // Beside a program that computes, 0.2 s are 50 turns, and vary by a tenth.
            assert!(
                after > if share < 100 { 0.85 } else { 0.97 } * before,
                "{mode:?} {share} {jump_ns}: {after} of {before}"
            );
        }
        assert_eq!(machine.total().unaccounted(), 0);
    }
}

fn admission(text: &str) -> Option<admission::Config> {
    Some(toml::from_str(text).unwrap())
}

#[test]
fn a_class_that_nobody_matches_costs_the_others_nothing() {
    let served = |admission| {
        let Role::Udp { family, socket_queue, answers, .. } = Setup::default().role else {
            unreachable!("the default is a UDP service")
        };
        let setup = Setup {
            gate: gate(|c| c.mode = Mode::Dedicated),
            role: Role::Udp { family, socket_queue, answers, placement: Placement::Inline },
            admission,
            load: load(3_000_000),
            ..Setup::default()
        };
        let mut machine = Machine::new(&setup).unwrap();
        machine.run(500 * MS);
        let report = machine.run(500 * MS);
        assert_eq!(machine.total().unaccounted(), 0);
        (report.delivered_pps(), report.dropped(Place::Admission))
    };
    let (peak, _) = served(None);
    let (alone, refused) = served(admission("[[class]]\nname = 'all'\nrank = 1"));
    let (beside, _) = served(admission(
        "[[class]]\nname = 'nobody'\nmatch = [{protocol = '132'}]\nguaranteed-pps = 500000\n\
         [[class]]\nname = 'all'\nrank = 1",
    ));
    assert!(refused > 0, "there is more than can be taken");
    assert!(alone > 0.9 * peak, "admission keeps the peak: {alone} of {peak}");
    assert!(beside > 0.98 * alone, "{beside} of {alone}");
}

/// A program of its own is served in batches at the peak, and packet by packet
/// below it, at twice the cost: what it serves of a smaller load is not all that
/// it can serve.
#[test]
fn admission_keeps_the_peak_of_a_service_that_is_a_program() {
    let served = |pps, admission| {
        let mut machine = Machine::new(&Setup { admission, load: load(pps), ..Setup::default() });
        let machine = machine.as_mut().unwrap();
        machine.run(400 * MS);
        machine.run(400 * MS).delivered_pps()
    };
    let peak = served(1_000_000, None);
    for pps in [700_000, 740_000, 1_000_000, 3_000_000, 6_000_000] {
        let kept = served(pps, admission("[[class]]\nname = 'all'\nrank = 1"));
        assert!(kept > 0.8 * peak, "{kept} of {peak} at {pps}");
    }
}

/// One port of four comes first, and is asked for no more than can be served.
#[test]
fn a_class_that_comes_first_is_served_through_a_flood() {
    let first = "[[class]]\nname = 'first'\nmatch = [{port = 4002}]\n\
                 [[class]]\nname = 'rest'\nrank = 1";
    let kept = |admission| {
        let setup = Setup { admission, ..four_readers(Family::V4, 1_000_000) };
        let mut machine = Machine::new(&setup).unwrap();
        machine.run(500 * MS);
        let report = machine.run(500 * MS);
        4.0 * report.delivered_by_reader[2] as f64 / report.offered as f64
    };
    let (with, without) = (kept(admission(first)), kept(None));
    assert!(with > 0.95 && without < 0.8, "{with} {without}");
}

#[test]
fn faults_that_make_no_sense_are_refused() {
    let mut machine = Machine::new(&Setup::default()).unwrap();
    let error = machine.set_reader(1, ReaderState::Stopped).unwrap_err();
    assert!(matches!(error, SetupError::Reader(1)), "{error}");
    let router = Role::Router { output_queue: 50, screen: None };
    let mut machine = Machine::new(&Setup { role: router, ..Setup::default() }).unwrap();
    assert!(machine.set_reader(0, ReaderState::Dead).is_err(), "nobody reads there");
    for readers in [0, 65] {
        let error = Machine::new(&Setup { readers, ..Setup::default() }).err().unwrap();
        assert!(error.to_string().contains("readers: give 1 to 64"), "{error}");
    }
    let closed =
        Setup { readers: 2, role: Role::Closed { family: Family::V4 }, ..Setup::default() };
    assert!(Machine::new(&closed).is_err());
    let same = admission("[[class]]\nname = 'a'\n[[class]]\nname = 'b'");
    let error = Machine::new(&Setup { admission: same, ..Setup::default() }).err().unwrap();
    assert!(matches!(error, SetupError::Admission(_)), "{error}");
}
