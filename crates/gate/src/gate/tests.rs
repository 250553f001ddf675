use super::*;
use crate::config::{Config, Quota};

const MS: u64 = 1_000_000;
const ONE_RING_EACH: RingCounts = RingCounts { receive: 1, transmit: 1, application: 1 };

fn gate(rings: RingCounts, change: impl FnOnce(&mut Config)) -> Gate {
    let mut config = Config::default();
    change(&mut config);
    Gate::new(Settings::new(config).unwrap(), rings, 0)
}

/// Asks for the next turn and serves it with `taken` packets.
fn serve(gate: &mut Gate, now_ns: u64, taken: u32) -> Ring {
    match gate.next(now_ns) {
        GateAction::Serve(turn) => {
            gate.on_served(turn, taken.min(turn.quota), now_ns);
            turn.ring
        }
        other => panic!("{other:?} instead of a turn"),
    }
}

#[test]
fn rings_take_turns_until_they_are_empty() {
    let mut gate = gate(RingCounts { receive: 2, transmit: 2, application: 1 }, |c| {
        c.receive_quota = Quota::Packets(5);
    });
    gate.on_all_ready();
    let full: Vec<Ring> = (0..5).map(|_| serve(&mut gate, 0, u32::MAX)).collect();
    assert_eq!(
        full,
        [
            Ring::Receive(0),
            Ring::Transmit(0),
            Ring::Receive(1),
            Ring::Transmit(1),
            Ring::Application(0)
        ]
    );
    assert_eq!(serve(&mut gate, 0, 4), Ring::Receive(0), "full rings have another turn");
    for _ in 0..4 {
        serve(&mut gate, 0, 0);
    }
    assert_eq!(gate.next(0), GateAction::Wait { paused_until_ns: None });
    assert_eq!(gate.on_interrupt(0, 1), InterruptAction::StartPolling);
    assert_eq!(serve(&mut gate, 0, 1), Ring::Receive(1));
}

#[test]
fn transmit_is_not_starved_by_receive() {
    let mut gate = gate(ONE_RING_EACH, |_| ());
    let (mut received, mut transmitted) = (0, 0);
    for _ in 0..1000 {
        gate.on_ready(Ring::Transmit(0));
        gate.on_ready(Ring::Receive(0));
        match serve(&mut gate, 0, u32::MAX) {
            Ring::Receive(_) => received += 1,
            Ring::Transmit(_) => transmitted += 1,
            Ring::Application(_) => {}
        }
    }
    assert_eq!((received, transmitted), (500, 500));
}

#[test]
fn interrupt_modes_receive_at_interrupt_priority() {
    let mut interrupt = gate(ONE_RING_EACH, |c| c.mode = Mode::Interrupt);
    assert_eq!(interrupt.on_interrupt(0, 0), InterruptAction::Take { limit: u32::MAX });
    assert_eq!(interrupt.next_interrupt_ns(1), 1);
    let mut moderated = gate(ONE_RING_EACH, |c| c.mode = Mode::Moderated);
    assert_eq!(moderated.on_interrupt(0, 0), InterruptAction::Take { limit: 128 });
    assert_eq!(moderated.next_interrupt_ns(1), 125_000);
    assert_eq!(moderated.next(0), GateAction::Wait { paused_until_ns: None }, "nothing is polled");
}

#[test]
fn napi_yields_when_budget_or_time_is_spent() {
    let mut gate = gate(ONE_RING_EACH, |c| c.mode = Mode::Napi);
    gate.on_ready(Ring::Receive(0));
    for turn in 0..5 {
        assert_eq!(serve(&mut gate, 0, 64), Ring::Receive(0), "turn {turn}");
    }
    assert_eq!(gate.next(0), GateAction::Yield, "320 of 300");
    assert_eq!(serve(&mut gate, 0, 64), Ring::Receive(0), "a new round");
    assert_eq!(gate.next(2 * MS), GateAction::Yield, "two milliseconds");
    assert_eq!(serve(&mut gate, 2 * MS, 1), Ring::Receive(0));
    assert_eq!(gate.next(2 * MS), GateAction::Wait { paused_until_ns: None });
    assert_eq!(gate.counters().yields, 2);
}

#[test]
fn full_queue_pauses_receiving_only() {
    let mut gate = gate(ONE_RING_EACH, |_| ());
    gate.on_all_ready();
    gate.on_queue_level(0, 7, 32, 32);
    assert_eq!(serve(&mut gate, 0, 0), Ring::Transmit(0));
    assert_eq!(serve(&mut gate, 0, 0), Ring::Application(0));
    assert_eq!(gate.next(0), GateAction::Wait { paused_until_ns: Some(MS) });
    gate.on_queue_level(10, 7, 8, 32);
    assert_eq!(serve(&mut gate, 10, 64), Ring::Receive(0));
    gate.on_queue_level(20, 7, 32, 32);
    gate.on_queue_closed(7);
    assert_eq!(serve(&mut gate, 20, 64), Ring::Receive(0), "its reader exited");
}

#[test]
fn full_queue_is_ignored_without_feedback() {
    let mut gate = gate(ONE_RING_EACH, |c| c.feedback = false);
    gate.on_ready(Ring::Receive(0));
    gate.on_queue_level(0, 7, 32, 32);
    assert_eq!(serve(&mut gate, 0, 64), Ring::Receive(0));
}

#[test]
fn cpu_share_limits_the_time_spent() {
    let mut gate = gate(ONE_RING_EACH, |c| c.cpu_share_percent = 25);
    assert!(gate.needs_turn_end_time());
    let mut now_ns = 0;
    let (mut spent_ns, mut packets) = (0, 0);
    while now_ns < 1000 * MS {
        gate.on_ready(Ring::Receive(0));
        match gate.next(now_ns) {
            GateAction::Serve(turn) => {
                now_ns += 300_000;
                spent_ns += 300_000;
                packets += turn.quota;
                gate.on_served(turn, turn.quota, now_ns);
            }
            GateAction::Wait { paused_until_ns } => {
                now_ns = paused_until_ns.expect("receiving is paused");
            }
            GateAction::Yield => unreachable!(),
        }
    }
    let percent = spent_ns * 100 / now_ns;
    assert!((24..=26).contains(&percent), "{percent} % for {packets} packets");
}

#[test]
fn idle_processor_lifts_the_cpu_share() {
    let mut gate = gate(ONE_RING_EACH, |c| c.cpu_share_percent = 1);
    gate.on_ready(Ring::Receive(0));
    let GateAction::Serve(turn) = gate.next(0) else { panic!("a turn") };
    gate.on_served(turn, turn.quota, MS);
    assert_eq!(gate.next(MS), GateAction::Wait { paused_until_ns: Some(10 * MS) });
    gate.on_idle_processor(MS);
    assert!(matches!(gate.next(MS), GateAction::Serve(_)));
    assert_eq!(gate.counters().share_lifted, 1);
}

#[test]
fn dedicated_core_never_waits() {
    let mut gate = gate(ONE_RING_EACH, |c| c.mode = Mode::Dedicated);
    gate.on_all_ready();
    for _ in 0..100 {
        assert!(matches!(gate.next(0), GateAction::Serve(turn) if {
            gate.on_served(turn, 0, 0);
            true
        }));
    }
}

/// Serves turns of 0.1 ms as often as allowed; the clock jumps by `jump_ns` in the middle of
/// one turn. Returns how long receiving was paused after that.
fn paused_after_jump(gate: &mut Gate, start_ns: u64, jump_ns: i64) -> u64 {
    let mut now_ns = start_ns;
    let mut turn_at = |now_ns: &mut u64, spent_ns: i64| {
        gate.on_ready(Ring::Receive(0));
        gate.on_queue_level(*now_ns, 7, 32, 32);
        match gate.next(*now_ns) {
            GateAction::Serve(turn) => {
                *now_ns = now_ns.strict_add_signed(spent_ns);
                gate.on_served(turn, turn.quota, *now_ns);
                0
            }
            GateAction::Wait { paused_until_ns } => {
                let paused_ns = paused_until_ns.expect("receiving is paused") - *now_ns;
                *now_ns += paused_ns;
                paused_ns
            }
            GateAction::Yield => 0,
        }
    };
    for _ in 0..1000 {
        turn_at(&mut now_ns, 100_000);
    }
    while turn_at(&mut now_ns, jump_ns) > 0 {}
    let mut paused_ns = 0;
    loop {
        match turn_at(&mut now_ns, 100_000) {
            0 => return paused_ns,
            more_ns => paused_ns += more_ns,
        }
    }
}

#[test]
fn clock_jump_inside_a_turn_does_not_pause_for_long() {
    const HOUR_NS: u64 = 3600 * 1000 * MS;
    for mode in Mode::ALL.into_iter().filter(|mode| !mode.has_input_queue()) {
        for jump_ns in [-(HOUR_NS as i64), -(MS as i64), MS as i64, 5 * HOUR_NS as i64] {
            let mut gate = gate(ONE_RING_EACH, |c| {
                c.mode = mode;
                c.cpu_share_percent = if mode == Mode::Polled { 25 } else { 100 };
            });
            let paused_ns = paused_after_jump(&mut gate, 2 * HOUR_NS, jump_ns);
            assert!(paused_ns <= 450 * MS, "{mode:?} {jump_ns}: {} ms", paused_ns / MS);
        }
    }
}

#[test]
fn settings_change_at_run_time() {
    let mut gate = gate(ONE_RING_EACH, |_| ());
    gate.on_ready(Ring::Receive(0));
    let config = Config { receive_quota: Quota::Packets(7), ..Config::default() };
    gate.apply_settings(Settings::new(config).unwrap());
    assert_eq!(gate.next(0), GateAction::Serve(Turn { ring: Ring::Receive(0), quota: 7 }));
    assert_eq!(gate.settings().config().receive_quota, Quota::Packets(7));
}

mod any_order {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// After any events and clock jumps, a ring with work is served again after at most one
        /// timeout or period.
        #[test]
        fn receiving_is_never_paused_forever(
            events in proptest::collection::vec((0..5_u8, any::<u32>(), 0..100_u32), 0..200),
            mode in 0..5_usize,
            share in 1..=100_u32,
        ) {
            let mode = Mode::ALL[mode];
            let share = if mode == Mode::Polled { share } else { 100 };
            let mut gate = gate(ONE_RING_EACH, |c| {
                c.mode = mode;
                c.cpu_share_percent = share;
            });
            let mut now_ns = 0_u64;
            for (event, time, level) in events {
                now_ns = u64::from(time) * 1000;
                match event {
                    0 => { gate.on_interrupt(now_ns, 0); }
                    1 => gate.on_queue_level(now_ns, u64::from(level % 4), level, 100),
                    2 => gate.on_idle_processor(now_ns),
                    3 => gate.on_all_ready(),
                    _ => if let GateAction::Serve(turn) = gate.next(now_ns) {
                        gate.on_served(turn, level.min(turn.quota), now_ns + u64::from(level) * 1000);
                    }
                }
            }
            gate.on_ready(Ring::Receive(0));
            // A share overdrawn by one turn is repaid over time.
            for _ in 0..1000 {
                match gate.next(now_ns) {
                    GateAction::Serve(Turn { ring: Ring::Receive(0), .. }) => return Ok(()),
                    GateAction::Serve(turn) => gate.on_served(turn, 0, now_ns),
                    GateAction::Yield => {}
                    GateAction::Wait { paused_until_ns } => {
                        let until_ns = paused_until_ns.expect("a ring has work");
                        prop_assert!(until_ns > now_ns && until_ns - now_ns <= 10 * MS);
                        now_ns = until_ns;
                    }
                }
            }
            prop_assert!(false, "receive was never served");
        }
    }
}
