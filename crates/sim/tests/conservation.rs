//! Whatever the load and the mode: every packet is somewhere.

use proptest::prelude::*;
use tidegate_gate::admission;
use tidegate_gate::{Config, Mode, Quota, Settings};
use tidegate_sim::{
    Beside, Family, Load, Machine, Placement, ReaderState, Role, Screen, Setup, Shape, Tick,
};

fn role(which: u8, answers: bool, mode: Mode, queue: u32) -> Role {
    // A dedicated core has no programs.
    let which = if mode == Mode::Dedicated { which % 3 } else { which };
    let family = if queue.is_multiple_of(2) { Family::V4 } else { Family::V6 };
    let placement = if mode == Mode::Dedicated { Placement::Inline } else { Placement::Program };
    match which {
        0 => Role::Udp { family, socket_queue: queue, answers, placement },
        1 => Role::Closed { family },
        2 => Role::Router { output_queue: queue, screen: None },
        _ => Role::Router { output_queue: 50, screen: Some(Screen { queue }) },
    }
}

prop_compose! {
    fn setups()(
        mode in 0..5_usize,
        feedback in any::<bool>(),
        share in 1..=100_u32,
        quota in 0..200_u32,
        which in 0..4_u8,
        answers in any::<bool>(),
        queue in 1..300_u32,
        (cores, rings) in (1..5_u32, 1..600_u32),
        (pps, shape) in (0..3_000_000_u64, 0..3_u8),
        beside in 0..4_u8,
        (gap_us, thread, admits) in (0..200_u64, any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) -> Setup {
        let mode = Mode::ALL[mode];
        let config = Config {
            mode,
            feedback,
            cpu_share_percent: if mode == Mode::Polled { share } else { 100 },
            receive_quota: if quota == 0 { Quota::Unlimited } else { Quota::Packets(quota) },
            ..Config::default()
        };
        let shape = [Shape::Constant, Shape::Poisson, Shape::Bursts(40)][usize::from(shape)];
        let all = [Beside::Compute, Beside::Send { period_ns: 50_000, cost_ns: 10_000 }];
        Setup {
            gate: Settings::new(config).unwrap(),
            cores,
            receive_ring: rings,
            transmit_ring: rings,
            interrupt_gap_ns: gap_us * 1000,
            protocol_thread: thread,
            role: role(which, answers, mode, queue),
            beside: if mode == Mode::Dedicated { vec![] } else { all[..usize::from(beside % 3)].to_vec() },
            admission: admits.then(admission::Config::default),
            tick: (beside == 3).then_some(Tick { period_ns: 1_000_000, cost_ns: 50_000 }),
            load: Load { pps, shape, flows: 300 },
            seed,
            ..Setup::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Offered = served + dropped at a place + on its way, and processor time
    /// is spent at a level or idle, at every moment.
    #[test]
    fn nothing_is_lost(setup in setups(), parts in 1..4_u64) {
        let mut machine = Machine::new(&setup).unwrap();
        for _ in 0..parts {
            machine.run(3_000_000);
            let total = machine.total();
            prop_assert_eq!(total.unaccounted(), 0, "{:?}", total.drops);
            let spent: u64 = total.level_ns.iter().sum::<u64>() + total.idle_ns;
            prop_assert_eq!(spent, total.duration_ns * u64::from(setup.cores));
        }
        machine.set_load(Load { pps: 0, ..setup.load }).unwrap();
        machine.run(200_000_000);
        let total = machine.total();
        let hogged = setup.beside.contains(&Beside::Compute);
        prop_assert!(hogged || total.in_flight == 0, "everything comes to rest: {} are not", total.in_flight);
    }

    /// Readers that stop and die and a clock that jumps lose nothing either.
    #[test]
    fn nothing_is_lost_to_faults(
        setup in setups(),
        readers in 1..5_u32,
        faults in proptest::collection::vec((0..4_u8, 0..4_u32, any::<i64>()), 1..6),
    ) {
        let many = matches!(setup.role, Role::Udp { placement: Placement::Program, .. });
        let setup = Setup { readers: if many { readers } else { 1 }, ..setup };
        let mut machine = Machine::new(&setup).unwrap();
        for (fault, reader, jump_ns) in faults {
            machine.run(2_000_000);
            // Not every machine has the reader.
            let _ = match fault {
                0 => machine.set_reader(reader, ReaderState::Stopped),
                1 => machine.set_reader(reader, ReaderState::Reads),
                2 => machine.set_reader(reader, ReaderState::Dead),
                _ => {
                    machine.jump_clock(jump_ns >> (reader * 8));
                    Ok(())
                }
            };
            machine.run(1_000_000);
            let total = machine.total();
            prop_assert_eq!(total.unaccounted(), 0, "{:?}", total.drops);
            let spent: u64 = total.level_ns.iter().sum::<u64>() + total.idle_ns;
            prop_assert_eq!(spent, total.duration_ns * u64::from(setup.cores));
        }
    }

    /// The same seed gives the same figures, however the time is cut.
    #[test]
    fn a_run_repeats_from_its_seed(setup in setups()) {
        let mut machine = Machine::new(&setup).unwrap();
        machine.run(1_234_567);
        machine.run(2_765_433);
        let mut again = Machine::new(&setup).unwrap();
        again.run(4_000_000);
        let (mut first, mut second) = (machine.total(), again.total());
        first.latency_ns.reset();
        second.latency_ns.reset();
        prop_assert_eq!(first, second);
    }
}
