//! Indirection table: distribution of new flows over cores, as in RSS.

use super::MAX_CORES;

/// Number of slots: enough that cores with one socket more than others get about as many more
/// flows.
const SLOTS: usize = 256;

/// Marks a slot without a core.
const UNASSIGNED: u8 = u8::MAX;

/// Indirection table: the core of each slot. A flow's hash selects the slot.
#[derive(Clone)]
pub(super) struct IndirectionTable([u8; SLOTS]);

impl IndirectionTable {
    pub(super) fn new() -> Self {
        Self([UNASSIGNED; SLOTS])
    }

    /// Core for a flow with this hash; `None` while no core has a socket.
    pub(super) fn core(&self, hash: u64) -> Option<usize> {
        let core = self.0[hash as usize % SLOTS];
        (core != UNASSIGNED).then_some(core.into())
    }

    /// Assigns the slots to cores in proportion to their sockets. A core keeps its slots up to its
    /// share, so few slots move beyond the necessary.
    pub(super) fn assign(&mut self, sockets: &[(usize, u32)]) {
        let mut shares = [0; MAX_CORES];
        let total: u64 = sockets.iter().map(|&(_, sockets)| u64::from(sockets)).sum();
        let with_sockets = sockets.iter().filter(|&&(_, sockets)| sockets > 0);
        // Every core with a socket gets a slot, however few sockets it has.
        let rest = (SLOTS - with_sockets.clone().count()) as u64;
        let mut before = 0;
        for &(core, sockets) in with_sockets {
            let after = before + u64::from(sockets);
            shares[core] = 1 + (rest * after / total - rest * before / total) as usize;
            before = after;
        }
        for slot in &mut self.0 {
            match shares.get_mut(usize::from(*slot)) {
                Some(share) if *share > 0 => *share -= 1,
                _ => *slot = UNASSIGNED,
            }
        }
        let mut free = self.0.iter_mut().filter(|slot| **slot == UNASSIGNED);
        for (core, &share) in shares.iter().enumerate() {
            free.by_ref().take(share).for_each(|slot| *slot = core as u8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(table: &IndirectionTable) -> [usize; 4] {
        let mut counts = [0; 4];
        (0..SLOTS as u64).filter_map(|at| table.core(at)).for_each(|core| counts[core] += 1);
        counts
    }

    /// Number of slots that change their core.
    fn changed(table: &mut IndirectionTable, sockets: &[(usize, u32)]) -> usize {
        let before = table.0;
        table.assign(sockets);
        before.iter().zip(&table.0).filter(|(before, after)| before != after).count()
    }

    #[test]
    fn assigns_slots_by_socket_count_with_few_changes() {
        let mut table = IndirectionTable::new();
        assert_eq!(table.core(7), None);
        table.assign(&[(2, 1)]);
        assert_eq!(counts(&table), [0, 0, 256, 0]);
        assert_eq!(changed(&mut table, &[(2, 1), (0, 1)]), 128);
        assert_eq!(counts(&table), [128, 0, 128, 0]);
        let taken = changed(&mut table, &[(2, 1), (0, 1), (1, 2)]);
        assert!((127..=130).contains(&taken), "{taken}");
        assert_eq!(counts(&table).iter().sum::<usize>(), SLOTS);
        // One of the two sockets of core 1 moves to core 3.
        let moved = changed(&mut table, &[(2, 1), (0, 1), (1, 1), (3, 1)]);
        assert!((60..=68).contains(&moved), "{moved}");
        assert_eq!(counts(&table), [64; 4]);
        table.assign(&[(3, 0)]);
        assert_eq!(table.core(7), None, "no core has a socket");
    }

    #[test]
    fn every_core_with_a_socket_gets_a_slot() {
        let mut table = IndirectionTable::new();
        table.assign(&[(0, 1_000_000), (1, 1), (3, u32::MAX)]);
        let [first, second, none, last] = counts(&table);
        assert!(first >= 1 && second == 1 && none == 0 && last > 200);
    }
}
