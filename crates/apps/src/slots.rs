//! Table of values by small reusable indices.

/// Values at fixed indices; freed indices are reused.
pub(crate) struct Slots<T> {
    values: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { values: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Index that the next inserted value gets.
    pub(crate) fn next_slot(&self) -> usize {
        self.free.last().map_or(self.values.len(), |&slot| slot as usize)
    }

    pub(crate) fn insert(&mut self, value: T) {
        match self.free.pop() {
            Some(slot) => self.values[slot as usize] = Some(value),
            None => self.values.push(Some(value)),
        }
    }

    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut T> {
        self.values.get_mut(slot)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.values.iter().enumerate().filter_map(|(slot, value)| Some((slot, value.as_ref()?)))
    }

    pub(crate) fn remove(&mut self, slot: usize) {
        if self.values.get_mut(slot).and_then(Option::take).is_some() {
            self.free.push(slot as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_freed_slots() {
        let mut slots = Slots::default();
        for n in 0..3 {
            assert_eq!(slots.next_slot(), n);
            slots.insert(n);
        }
        slots.remove(1);
        slots.remove(1);
        assert_eq!(slots.get_mut(1), None);
        assert_eq!(slots.next_slot(), 1);
        slots.insert(7);
        assert_eq!(slots.get_mut(1), Some(&mut 7));
        assert_eq!(slots.next_slot(), 3);
        slots.remove(9);
        assert_eq!(slots.get_mut(9), None);
    }
}
