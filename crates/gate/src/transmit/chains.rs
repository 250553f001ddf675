//! Many FIFO queues in one allocation.

/// End of a chain.
const NONE: u32 = u32::MAX;

/// FIFO queue whose values are in [`Chains`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    first: u32,
    last: u32,
}

impl Default for Chain {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

/// The values of all chains. The memory grows to the largest number of values at one time.
pub(super) struct Chains<T> {
    slots: Vec<Slot<T>>,
    /// First free slot.
    free: u32,
}

struct Slot<T> {
    value: Option<T>,
    next: u32,
}

impl<T> Chains<T> {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: NONE }
    }

    /// Appends a value to a chain.
    #[inline]
    pub(super) fn push(&mut self, chain: &mut Chain, value: T) {
        let slot = Slot { value: Some(value), next: NONE };
        let index = match self.slots.get_mut(self.free as usize) {
            Some(free) => {
                let index = std::mem::replace(&mut self.free, free.next);
                *free = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        match self.slots.get_mut(chain.last as usize) {
            Some(last) => last.next = index,
            None => chain.first = index,
        }
        chain.last = index;
    }

    /// Removes the first value of a chain.
    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Option<T> {
        let index = chain.first;
        let slot = self.slots.get_mut(index as usize)?;
        chain.first = std::mem::replace(&mut slot.next, self.free);
        self.free = index;
        if chain.first == NONE {
            chain.last = NONE;
        }
        slot.value.take()
    }

    /// All values, in no particular order.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free = NONE;
        self.slots.drain(..).filter_map(|slot| slot.value)
    }

    /// Number of slots that were allocated.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_keep_their_order_and_reuse_slots() {
        let mut chains = Chains::new();
        let (mut even, mut odd) = (Chain::default(), Chain::default());
        for round in 0..3 {
            for number in 0..10 {
                chains.push(if number % 2 == 0 { &mut even } else { &mut odd }, number);
            }
            let taken = |chains: &mut Chains<u32>, chain: &mut Chain| -> Vec<u32> {
                std::iter::from_fn(|| chains.pop(chain)).collect()
            };
            assert_eq!(taken(&mut chains, &mut even), [0, 2, 4, 6, 8], "round {round}");
            assert_eq!(taken(&mut chains, &mut odd), [1, 3, 5, 7, 9], "round {round}");
        }
        assert_eq!(chains.capacity(), 10);
    }
}
