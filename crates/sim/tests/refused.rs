//! Machines that make no sense are refused with the reason.

use tidegate_gate::{Config, Mode, Settings};
use tidegate_sim::{
    Beside, Costs, Link, Load, Machine, Placement, Role, Screen, Setup, SetupError, Shape, Tick,
};

fn refused(change: impl FnOnce(&mut Setup)) -> String {
    let mut setup = Setup::default();
    change(&mut setup);
    let error: SetupError = Machine::new(&setup).err().expect("must be refused");
    error.to_string()
}

fn mode(mode: Mode) -> Settings {
    Settings::new(Config { mode, ..Config::default() }).unwrap()
}

fn udp(socket_queue: u32, placement: Placement) -> Role {
    Role::Udp { family: Default::default(), socket_queue, answers: true, placement }
}

#[test]
fn nonsense_is_refused_with_its_reason() {
    let router =
        |output_queue, queue| Role::Router { output_queue, screen: Some(Screen { queue }) };
    let refusals = [
        (refused(|s| s.cores = 0), "0 cores: give 1"),
        (refused(|s| s.cores = u32::MAX), "give 1 to 1024"),
        (refused(|s| s.receive_ring = 0), "receive-ring has 0"),
        (refused(|s| s.transmit_ring = u32::MAX), "transmit-ring has"),
        (refused(|s| s.role = udp(0, Placement::Program)), "socket-queue has 0"),
        (refused(|s| s.role = router(0, 32)), "output-queue has 0"),
        (refused(|s| s.role = router(50, 0)), "screen-queue has 0"),
        (refused(|s| s.costs = Costs { poll_ns: 0, ..s.costs }), "poll-ns is 0 ns"),
        (refused(|s| s.costs = Costs { switch_ns: u64::MAX, ..s.costs }), "switch-ns is"),
        (refused(|s| s.quantum_ns = 0), "quantum-ns is 0"),
        (refused(|s| s.tick = Some(Tick { period_ns: 0, cost_ns: 1 })), "period-ns is 0"),
        (
            refused(|s| s.beside = vec![Beside::Send { period_ns: 1, cost_ns: 0 }]),
            "cost-ns is 0 ns: give 1",
        ),
        (refused(|s| s.load.flows = 0), "0 flows"),
        (refused(|s| s.load.shape = Shape::Bursts(0)), "a burst of 0 packets"),
        (
            refused(|s| {
                s.link = Link { bits_per_second: 10_000_000 };
                s.load = Load { pps: 14_881, ..s.load };
            }),
            "which carries 14880",
        ),
        (refused(|s| s.link.bits_per_second = 0), "faster link"),
        (
            refused(|s| {
                s.gate = mode(Mode::Interrupt);
                s.role = udp(32, Placement::Inline);
            }),
            "mode interrupt has no polling loop",
        ),
        (refused(|s| s.gate = mode(Mode::Dedicated)), "no program below it"),
        (
            refused(|s| {
                s.gate = mode(Mode::Dedicated);
                s.role = udp(32, Placement::Inline);
                s.beside = vec![Beside::Compute];
            }),
            "nothing beside it",
        ),
    ];
    for (error, words) in refusals {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_load_that_does_not_fit_is_refused_later_too() {
    let mut machine = Machine::new(&Setup::default()).unwrap();
    machine.run(1_000_000);
    let error = machine.set_load(Load { pps: u64::MAX, ..Load::default() }).unwrap_err();
    assert!(matches!(error, SetupError::Link { .. }), "{error}");
    assert!(machine.run(1_000_000).delivered > 0, "the load of before goes on");
}
