//! Contention: whether a refused packet makes room for another packet that is wanted.
//!
//! While one class alone wants the capacity, refusing its packets early serves nobody: the ring of
//! the device drops what is too much at no cost. Refusing is of use only if another class wants the
//! rest, or if the packets would be dropped later, after work was spent on them.

use super::class::{MAX_CLASSES, PerClass};

/// Packets in about a second from which a class wants a part of the capacity. Fewer are the
/// occasional packets of neighbour discovery, which repeats them.
const MIN_WANTED_PACKETS: u64 = 20;
/// Maximum factor by which packets lost unexamined are added to the packets that arrived.
const MAX_LOSS_FACTOR: u64 = 10;
/// Time constant of the measurement.
const WINDOW_NS: u64 = 1_000_000_000;
/// Time for which late losses call for limits. The time doubles when they recur.
const MIN_HOLD_NS: u64 = 1_000_000_000;
const MAX_HOLD_NS: u64 = 32_000_000_000;

/// Measurement of the classes that want a part of the capacity, and of late losses.
#[derive(Clone, Debug)]
pub(super) struct Contention {
    /// Packets that arrived in about the last second, in thousandths.
    recent: PerClass<u64>,
    hold_ns: u64,
    hold_left_ns: u64,
}

impl Contention {
    pub(super) fn new() -> Self {
        Self { recent: [0; MAX_CLASSES], hold_ns: 0, hold_left_ns: 0 }
    }

    /// Records the packets of a class that arrived in a period, of which `received_permille` were
    /// examined.
    pub(super) fn on_arrivals(
        &mut self,
        class: usize,
        arrived: u64,
        received_permille: u64,
        elapsed_ns: u64,
    ) {
        let factor_permille =
            (1_000_000 / received_permille.max(1)).clamp(1000, 1000 * MAX_LOSS_FACTOR);
        let recent = &mut self.recent[class];
        let faded = u128::from(*recent) * u128::from(elapsed_ns.min(WINDOW_NS));
        *recent -= (faded / u128::from(WINDOW_NS)) as u64;
        *recent = recent.saturating_add(arrived.saturating_mul(factor_permille));
    }

    /// Records whether packets were lost after work was spent on them.
    pub(super) fn on_late_losses(&mut self, lost: bool, elapsed_ns: u64) {
        if !lost {
            self.hold_left_ns = self.hold_left_ns.saturating_sub(elapsed_ns);
            return;
        }
        if self.hold_left_ns == 0 {
            self.hold_ns = (self.hold_ns * 2).clamp(MIN_HOLD_NS, MAX_HOLD_NS);
        }
        self.hold_left_ns = self.hold_ns;
    }

    /// True if refusing packets early makes room for other packets, or saves work.
    pub(super) fn calls_for_limits(&self) -> bool {
        let wants = |&&recent: &&u64| recent >= 1000 * MIN_WANTED_PACKETS;
        self.hold_left_ns > 0 || self.recent.iter().filter(wants).count() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD_NS: u64 = 5_000_000;

    #[test]
    fn one_class_alone_calls_for_no_limits() {
        let mut contention = Contention::new();
        let second = |contention: &mut Contention, packets: [u64; 2]| {
            for period in 0..200 {
                for (class, packets) in packets.into_iter().enumerate() {
                    let arrived = packets * (period + 1) / 200 - packets * period / 200;
                    contention.on_arrivals(class, arrived, 1000, PERIOD_NS);
                }
            }
            contention.calls_for_limits()
        };
        assert!(!second(&mut contention, [0, 1_000_000]));
        assert!(!second(&mut contention, [3, 1_000_000]), "a few neighbour requests");
        assert!(second(&mut contention, [50, 1_000_000]));
        assert!(!second(&mut contention, [0, 1_000_000]), "the other class has stopped");
    }

    #[test]
    fn packets_lost_unexamined_count_as_wanted() {
        let mut contention = Contention::new();
        contention.on_arrivals(0, 4, 200, PERIOD_NS);
        contention.on_arrivals(1, 4000, 200, PERIOD_NS);
        assert!(contention.calls_for_limits());
    }

    #[test]
    fn late_losses_call_for_limits_ever_longer() {
        let mut contention = Contention::new();
        let mut held_s = Vec::new();
        for _ in 0..7 {
            contention.on_late_losses(true, PERIOD_NS);
            let mut held_ns = 0;
            while contention.calls_for_limits() {
                contention.on_late_losses(false, PERIOD_NS);
                held_ns += PERIOD_NS;
            }
            held_s.push(held_ns / 1_000_000_000);
        }
        assert_eq!(held_s, [1, 2, 4, 8, 16, 32, 32]);
    }
}
