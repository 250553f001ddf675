//! How new flows are divided among cores.

use super::MOST_CORES;

/// How many parts there are to give away: enough that cores with one socket more
/// than others get about as much more.
const SLOTS: usize = 256;

/// The slot is nobody's.
const NOBODY: u8 = u8::MAX;

/// Which core gets the flows whose hash falls into a slot.
pub(super) struct Slots([u8; SLOTS]);

impl Slots {
    pub(super) fn new() -> Self {
        Self([NOBODY; SLOTS])
    }

    /// The core that has a flow of this hash; `None` while nobody takes any.
    pub(super) fn core(&self, hash: u64) -> Option<usize> {
        let core = self.0[hash as usize % SLOTS];
        (core != NOBODY).then_some(core.into())
    }

    /// Divides the slots among cores by how many sockets they have. A core keeps what
    /// it has, up to its part: so hardly more slots change than must.
    pub(super) fn divide(&mut self, sockets: &[(usize, u32)]) {
        let mut parts = [0; MOST_CORES];
        let all: u64 = sockets.iter().map(|&(_, sockets)| u64::from(sockets)).sum();
        let some = sockets.iter().filter(|&&(_, sockets)| sockets > 0);
        // Each gets one, however few sockets it has.
        let rest = (SLOTS - some.clone().count()) as u64;
        let mut before = 0;
        for &(core, sockets) in some {
            let behind = before + u64::from(sockets);
            parts[core] = 1 + (rest * behind / all - rest * before / all) as usize;
            before = behind;
        }
        for slot in &mut self.0 {
            match parts.get_mut(usize::from(*slot)) {
                Some(part) if *part > 0 => *part -= 1,
                _ => *slot = NOBODY,
            }
        }
        let mut free = self.0.iter_mut().filter(|slot| **slot == NOBODY);
        for (core, &part) in parts.iter().enumerate() {
            free.by_ref().take(part).for_each(|slot| *slot = core as u8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(slots: &Slots) -> [usize; 4] {
        let mut counts = [0; 4];
        (0..SLOTS as u64).filter_map(|at| slots.core(at)).for_each(|core| counts[core] += 1);
        counts
    }

    /// How many slots are another core's after a change.
    fn changed(slots: &mut Slots, sockets: &[(usize, u32)]) -> usize {
        let before = slots.0;
        slots.divide(sockets);
        before.iter().zip(&slots.0).filter(|(before, after)| before != after).count()
    }

    #[test]
    fn slots_are_divided_by_sockets_and_few_change() {
        let mut slots = Slots::new();
        assert_eq!(slots.core(7), None);
        slots.divide(&[(2, 1)]);
        assert_eq!(counts(&slots), [0, 0, 256, 0]);
        assert_eq!(changed(&mut slots, &[(2, 1), (0, 1)]), 128);
        assert_eq!(counts(&slots), [128, 0, 128, 0]);
        let taken = changed(&mut slots, &[(2, 1), (0, 1), (1, 2)]);
        assert!((127..=130).contains(&taken), "{taken}");
        assert_eq!(counts(&slots).iter().sum::<usize>(), SLOTS);
        // One of two goes from core 1 to core 3.
        let moved = changed(&mut slots, &[(2, 1), (0, 1), (1, 1), (3, 1)]);
        assert!((60..=68).contains(&moved), "{moved}");
        assert_eq!(counts(&slots), [64; 4]);
        slots.divide(&[(3, 0)]);
        assert_eq!(slots.core(7), None, "nobody is left");
    }

    #[test]
    fn nobody_is_forgotten_beside_many() {
        let mut slots = Slots::new();
        slots.divide(&[(0, 1_000_000), (1, 1), (3, u32::MAX)]);
        let [first, second, none, last] = counts(&slots);
        assert!(first >= 1 && second == 1 && none == 0 && last > 200);
    }
}
