//! Packet conservation for any load and mode: every packet is accounted for.

use proptest::prelude::*;
use tidegate_gate::admission;
use tidegate_gate::{Config, Mode, Quota, Settings};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, FilterProcess, HostRole, IpFamily, Machine, OfferedLoad,
    Placement, ReaderState, Setup, Tick,
};

fn role(which: u8, answers: bool, mode: Mode, queue: u32) -> HostRole {
    // A dedicated core has no separate processes.
    let which = if mode == Mode::Dedicated { which % 3 } else { which };
    let family = if queue.is_multiple_of(2) { IpFamily::V4 } else { IpFamily::V6 };
    let placement = if mode == Mode::Dedicated { Placement::Inline } else { Placement::Process };
    match which {
        0 => HostRole::Udp { family, socket_queue: queue, answers, placement },
        1 => HostRole::Closed { family },
        2 => HostRole::Router { output_queue: queue, filter: None },
        _ => HostRole::Router { output_queue: 50, filter: Some(FilterProcess { queue }) },
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
        background in 0..4_u8,
        (gap_us, thread, admits) in (0..200_u64, any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) -> Setup {
        let mode = Mode::ALL[mode];
        let config = Config::default()
            .mode(mode)
            .feedback(feedback)
            .cpu_share_percent(if mode == Mode::Polled { share } else { 100 })
            .receive_quota(if quota == 0 { Quota::Unlimited } else { Quota::Packets(quota) });
        let shape = [ArrivalPattern::Constant, ArrivalPattern::Poisson, ArrivalPattern::Bursts(40)][usize::from(shape)];
        let all = [BackgroundTask::Compute, BackgroundTask::Send { period_ns: 50_000, cost_ns: 10_000 }];
        Setup {
            gate: Settings::new(config).unwrap(),
            cores,
            receive_ring: rings,
            transmit_ring: rings,
            interrupt_gap_ns: gap_us * 1000,
            protocol_thread: thread,
            role: role(which, answers, mode, queue),
            background: if mode == Mode::Dedicated { vec![] } else { all[..usize::from(background % 3)].to_vec() },
            admission: admits.then(admission::Config::default),
            tick: (background == 3).then_some(Tick { period_ns: 1_000_000, cost_ns: 50_000 }),
            load: OfferedLoad { pps, shape, flows: 300 },
            seed,
            ..Setup::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// At every moment, offered = served + dropped + in flight, and CPU time is spent at a level or
    /// idle.
    #[test]
    fn accounts_for_every_packet(setup in setups(), parts in 1..4_u64) {
        let mut machine = Machine::new(&setup).unwrap();
        for _ in 0..parts {
            machine.run(3_000_000);
            let total = machine.total();
            prop_assert_eq!(total.unaccounted(), 0, "{:?}", total.drops);
            let spent: u64 = total.level_ns.iter().sum::<u64>() + total.idle_ns;
            prop_assert_eq!(spent, total.duration_ns * u64::from(setup.cores));
        }
        machine.set_load(OfferedLoad { pps: 0, ..setup.load }).unwrap();
        machine.run(200_000_000);
        let total = machine.total();
        let hogged = setup.background.contains(&BackgroundTask::Compute);
        prop_assert!(hogged || total.in_flight == 0, "{} packets are still in flight", total.in_flight);
    }

    /// Stopped readers, exited readers and clock jumps lose no packet either.
    #[test]
    fn accounts_for_every_packet_under_faults(
        setup in setups(),
        readers in 1..5_u32,
        faults in proptest::collection::vec((0..4_u8, 0..4_u32, any::<i64>()), 1..6),
    ) {
        let many = matches!(setup.role, HostRole::Udp { placement: Placement::Process, .. });
        let setup = Setup { readers: if many { readers } else { 1 }, ..setup };
        let mut machine = Machine::new(&setup).unwrap();
        for (fault, reader, jump_ns) in faults {
            machine.run(2_000_000);
            // Not every machine has this reader.
            let _ = match fault {
                0 => machine.set_reader(reader, ReaderState::Stopped),
                1 => machine.set_reader(reader, ReaderState::Running),
                2 => machine.set_reader(reader, ReaderState::Exited),
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

    /// The same seed gives the same figures, however the time is divided into runs.
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
