//! Invalid setups are rejected with the reason.

use tidegate_gate::{Config, Mode, Settings};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, Costs, FilterProcess, HostRole, Link, Machine, OfferedLoad,
    Placement, Setup, SetupError, Tick,
};

fn refused(change: impl FnOnce(&mut Setup)) -> String {
    let mut setup = Setup::default();
    change(&mut setup);
    let error: SetupError = Machine::new(&setup).err().expect("must be refused");
    error.to_string()
}

fn mode(mode: Mode) -> Settings {
    Settings::new(Config::default().mode(mode)).unwrap()
}

fn udp(socket_queue: u32, placement: Placement) -> HostRole {
    HostRole::Udp { family: Default::default(), socket_queue, answers: true, placement }
}

#[test]
fn rejects_invalid_setups_with_the_reason() {
    let router = |output_queue, queue| HostRole::Router {
        output_queue,
        filter: Some(FilterProcess { queue }),
    };
    let refusals = [
        (refused(|s| s.cores = 0), "0 cores: give 1"),
        (refused(|s| s.cores = u32::MAX), "give 1 to 1024"),
        (refused(|s| s.crossing_share = 1.5), "1.5 of the flows pass from core to core"),
        (refused(|s| s.crossing_share = f64::NAN), "give a share from 0 to 1"),
        (refused(|s| s.receive_ring = 0), "receive-ring has 0"),
        (refused(|s| s.transmit_ring = u32::MAX), "transmit-ring has"),
        (refused(|s| s.role = udp(0, Placement::Process)), "socket-queue has 0"),
        (refused(|s| s.role = router(0, 32)), "output-queue has 0"),
        (refused(|s| s.role = router(50, 0)), "filter-queue has 0"),
        (refused(|s| s.costs = Costs { poll_ns: 0, ..s.costs }), "poll-ns is 0 ns"),
        (refused(|s| s.costs = Costs { switch_ns: u64::MAX, ..s.costs }), "switch-ns is"),
        (refused(|s| s.quantum_ns = 0), "quantum-ns is 0"),
        (refused(|s| s.tick = Some(Tick { period_ns: 0, cost_ns: 1 })), "period-ns is 0"),
        (
            refused(|s| s.background = vec![BackgroundTask::Send { period_ns: 1, cost_ns: 0 }]),
            "cost-ns is 0 ns: give 1",
        ),
        (refused(|s| s.load.flows = 0), "0 flows"),
        (refused(|s| s.load.shape = ArrivalPattern::Bursts(0)), "a burst of 0 packets"),
        (
            refused(|s| {
                s.link = Link { bits_per_second: 10_000_000 };
                s.load = OfferedLoad { pps: 14_881, ..s.load };
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
        (refused(|s| s.gate = mode(Mode::Dedicated)), "no process below it"),
        (
            refused(|s| {
                s.gate = mode(Mode::Dedicated);
                s.role = udp(32, Placement::Inline);
                s.background = vec![BackgroundTask::Compute];
            }),
            "without background tasks",
        ),
    ];
    for (error, words) in refusals {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn set_load_rejects_a_load_above_the_link_rate() {
    let mut machine = Machine::new(&Setup::default()).unwrap();
    machine.run(1_000_000);
    let error =
        machine.set_load(OfferedLoad { pps: u64::MAX, ..OfferedLoad::default() }).unwrap_err();
    assert!(matches!(error, SetupError::Link { .. }), "{error}");
    assert!(machine.run(1_000_000).delivered > 0, "the previous load continues");
}
