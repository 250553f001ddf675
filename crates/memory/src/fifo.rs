//! First-in, first-out queue with a single owner.
//!
//! It replaces `std`'s `VecDeque`, without the features that frames never need. Push and pop
//! are a dozen instructions without a call, since they happen several times to each packet.

use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ops::{Bound, Index, IndexMut, RangeBounds};
use std::slice;

/// A queue that grows on demand and never shrinks.
pub struct Fifo<T> {
    /// Slots: zero or a power of two of them. The slots from `head` to `tail`, modulo their
    /// number, hold values.
    slots: Box<[MaybeUninit<T>]>,
    /// Free-running index of the next slot to push to.
    tail: usize,
    /// Free-running index of the front value.
    head: usize,
}

impl<T> Fifo<T> {
    /// Creates an empty queue; allocates no memory yet.
    pub fn new() -> Self {
        Self { slots: Box::default(), tail: 0, head: 0 }
    }

    /// Creates an empty queue with space for at least `capacity` values.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut queue = Self::new();
        if capacity > 0 {
            queue.grow_to(capacity);
        }
        queue
    }

    /// Number of queued values.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    /// True if the queue is empty.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// Slot of the free-running index `count`. Meaningless without slots.
    #[inline(always)]
    fn slot_index(&self, count: usize) -> usize {
        count & self.slots.len().wrapping_sub(1)
    }

    /// Appends a value at the back.
    #[inline(always)]
    pub fn push_back(&mut self, value: T) {
        if self.len() == self.slots.len() {
            self.grow_to(self.slots.len() + 1);
        }
        let slot = self.slot_index(self.tail);
        // SAFETY: there is at least one slot, as `grow_to` made more than there are values, and
        // `slot` is less than their number.
        unsafe { self.slots.get_unchecked_mut(slot) }.write(value);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Puts a value in front of all others.
    #[inline]
    pub fn push_front(&mut self, value: T) {
        if self.len() == self.slots.len() {
            self.grow_to(self.slots.len() + 1);
        }
        self.head = self.head.wrapping_sub(1);
        let slot = self.slot_index(self.head);
        self.slots[slot].write(value);
    }

    /// Removes and returns the value at the front.
    #[inline(always)]
    pub fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let slot = self.slot_index(self.head);
        self.head = self.head.wrapping_add(1);
        // SAFETY: the queue is not empty, so there are slots, `slot` is less than their number, and
        // this slot held a value. `head` has moved past the slot, so that no second value is made
        // of it.
        Some(unsafe { self.slots.get_unchecked(slot).assume_init_read() })
    }

    /// Value number `index` from the front.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let slot = &self.slots[self.slot_index(self.head.wrapping_add(index))];
        // SAFETY: the slots of queued values are initialized.
        Some(unsafe { slot.assume_init_ref() })
    }

    /// Mutable form of [`Fifo::get`].
    #[inline]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        if index >= self.len() {
            return None;
        }
        let slot = self.slot_index(self.head.wrapping_add(index));
        // SAFETY: as in `get`.
        Some(unsafe { self.slots[slot].assume_init_mut() })
    }

    /// Value at the front.
    #[inline]
    pub fn front(&self) -> Option<&T> {
        self.get(0)
    }

    /// Iterates over the values, from the front.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &T> {
        (0..self.len()).map(|index| &self[index])
    }

    /// Mutable form of [`Fifo::iter`].
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let (front, back) = self.as_mut_slices();
        front.iter_mut().chain(back)
    }

    /// Removes the values of a range that begins at the front and iterates over them. Values not
    /// consumed are dropped with the iterator.
    ///
    /// # Panics
    /// When the range does not begin at 0 or ends behind the last value.
    #[inline]
    pub fn drain(&mut self, range: impl RangeBounds<usize>) -> Drain<'_, T> {
        let front = matches!(range.start_bound(), Bound::Unbounded | Bound::Included(0));
        assert!(front, "the drained range must begin at 0");
        let remaining = match range.end_bound() {
            Bound::Unbounded => self.len(),
            Bound::Excluded(&end) => end,
            Bound::Included(&last) => last + 1,
        };
        assert!(remaining <= self.len(), "more values drained than there are");
        Drain { queue: self, remaining }
    }

    /// Values as two contiguous slices: from the front to the end of the memory, and the wrapped
    /// rest.
    #[inline(always)]
    pub fn as_mut_slices(&mut self) -> (&mut [T], &mut [T]) {
        let (len, first) = (self.len(), self.slot_index(self.head).min(self.slots.len()));
        let (back, front) = self.slots.split_at_mut(first);
        let in_front = len.min(front.len());
        let behind = len - in_front;
        let (front, back) = (&mut front[..in_front], &mut back[..behind]);
        // SAFETY: the slots of queued values are initialized, wrapping around from `first` on, and
        // values have the layout of their slots.
        unsafe {
            (
                slice::from_raw_parts_mut(front.as_mut_ptr().cast(), in_front),
                slice::from_raw_parts_mut(back.as_mut_ptr().cast(), behind),
            )
        }
    }

    /// Begins a batch of pops from the contiguous slots at the front: cheaper than popping one by
    /// one. More values may follow after the batch. Values not taken from the batch stay queued.
    #[inline(always)]
    pub fn pop_batch(&mut self) -> PopBatch<'_, T> {
        self.pop_batch_up_to(usize::MAX)
    }

    /// Same as [`Fifo::pop_batch`], with at most `max` values.
    #[inline(always)]
    pub fn pop_batch_up_to(&mut self, max: usize) -> PopBatch<'_, T> {
        let first = self.slot_index(self.head).min(self.slots.len());
        let len = self.len().min(self.slots.len() - first).min(max);
        // Counted as popped until `PopBatch` is dropped, so that no value could be taken twice if
        // the batch were never dropped.
        self.head = self.head.wrapping_add(len);
        PopBatch { values: self.slots[first..first + len].iter_mut(), head: &mut self.head }
    }

    /// Begins a batch of pushes to contiguous free slots at the back, as long as at most `limit`
    /// values are queued.
    ///
    /// The batch has at least one slot unless the queue is at its limit: a queue without a free
    /// slot, or an empty queue with fewer than `wanted` slots, grows for `wanted` more values.
    #[inline(always)]
    pub fn push_batch(&mut self, limit: usize, wanted: usize) -> PushBatch<'_, T> {
        if self.is_empty() {
            (self.tail, self.head) = (0, 0);
        }
        let len = self.len();
        let short = len == self.slots.len() || len == 0 && self.slots.len() < wanted;
        if short && len < limit {
            self.grow_to(limit.min(len + wanted.max(1)));
        }
        let first = self.slot_index(self.tail);
        let max = (self.slots.len() - len).min(limit.saturating_sub(len));
        let last = self.slots.len().min(first + max);
        let slots = self.slots[first..last].iter_mut();
        PushBatch { uncounted: slots.len(), slots, tail: &mut self.tail }
    }

    /// Grows to at least `capacity` slots.
    #[cold]
    #[inline(never)]
    fn grow_to(&mut self, capacity: usize) {
        let capacity = capacity.next_power_of_two().max(4);
        let mut slots: Box<[MaybeUninit<T>]> =
            std::iter::repeat_with(MaybeUninit::uninit).take(capacity).collect();
        let len = self.len();
        for slot in &mut slots[..len] {
            if let Some(value) = self.pop_front() {
                slot.write(value);
            }
        }
        (self.slots, self.head, self.tail) = (slots, 0, len);
    }
}

/// Pops values from the front of a [`Fifo`]; created by [`Fifo::pop_batch`].
pub struct PopBatch<'a, T> {
    values: slice::IterMut<'a, MaybeUninit<T>>,
    head: &'a mut usize,
}

impl<T> PopBatch<'_, T> {
    /// Returns the next value without removing it.
    #[inline(always)]
    pub fn first(&self) -> Option<&T> {
        let slot = self.values.as_slice().first()?;
        // SAFETY: the slots of the batch are initialized until they are read.
        Some(unsafe { slot.assume_init_ref() })
    }

    /// Removes and returns the next value if `wanted` accepts it; otherwise it stays queued.
    #[inline(always)]
    pub fn next_if(&mut self, wanted: impl FnOnce(&T) -> bool) -> Option<T> {
        if wanted(self.first()?) { self.next() } else { None }
    }

    /// Moves values to another queue, as long as it has free slots and `change` converts them. A
    /// value that `change` returns as an error stays queued. When `change` panics, the values of
    /// the batch are lost.
    #[inline(always)]
    pub fn move_while<U>(
        &mut self,
        to: &mut PushBatch<'_, U>,
        mut change: impl FnMut(T) -> Result<U, T>,
    ) {
        let slots = mem::take(&mut to.slots).into_slice();
        // No slot is counted in the tail during the loop: if `change` panics, the values written
        // so far are lost, but none can be taken twice.
        to.uncounted -= slots.len();
        let from = mem::take(&mut self.values).into_slice();
        let count = from.len().min(slots.len());
        let (mut values, mut slot) = (from[..count].iter_mut(), slots.as_mut_ptr());
        let mut rejected = 0;
        for value in &mut values {
            // SAFETY: the slots of the batch were initialized, and each is read once: the
            // queue counts them as popped.
            match change(unsafe { value.assume_init_read() }) {
                // SAFETY: there are at least as many slots as values were visited.
                Ok(changed) => unsafe {
                    (*slot).write(changed);
                    slot = slot.add(1);
                },
                Err(back) => {
                    value.write(back);
                    rejected = 1;
                    break;
                }
            }
        }
        let moved = count - values.len() - rejected;
        to.uncounted += slots.len();
        to.slots = slots[moved..].iter_mut();
        self.values = from[moved..].iter_mut();
    }
}

impl<T> PopBatch<'_, T> {
    /// Passes values to `take`, each paired with one of `others`, until either runs out or `take`
    /// rejects a value, which is then lost. Returns the number of accepted values. When `take`
    /// panics, the values of the batch are lost.
    #[inline(always)]
    pub(crate) fn take_each<U>(
        &mut self,
        others: &[U],
        mut take: impl FnMut(&U, T) -> bool,
    ) -> usize {
        let values = mem::take(&mut self.values).into_slice();
        let (mut taken, mut refused) = (0, 0);
        for (value, other) in values.iter_mut().zip(others) {
            // SAFETY: the slots of the batch were initialized, and each is read once: the
            // queue counts them as popped.
            if !take(other, unsafe { value.assume_init_read() }) {
                refused = 1;
                break;
            }
            taken += 1;
        }
        self.values = values[taken + refused..].iter_mut();
        taken
    }
}

impl<T> Iterator for PopBatch<'_, T> {
    type Item = T;

    #[inline(always)]
    fn next(&mut self) -> Option<T> {
        let slot = self.values.next()?;
        // SAFETY: the slots of the batch were initialized, and each is read once: the
        // queue counts them as popped.
        Some(unsafe { slot.assume_init_read() })
    }

    #[inline(always)]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.values.size_hint()
    }
}

impl<T> ExactSizeIterator for PopBatch<'_, T> {}

impl<T> Drop for PopBatch<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.head = self.head.wrapping_sub(self.len());
    }
}

/// Pushes values at the back of a [`Fifo`]; created by [`Fifo::push_batch`].
pub struct PushBatch<'a, T> {
    slots: slice::IterMut<'a, MaybeUninit<T>>,
    /// Slots of the batch, free or used, that are not yet counted in `tail`.
    uncounted: usize,
    tail: &'a mut usize,
}

impl<T> PushBatch<'_, T> {
    /// True if no free slot is left.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.slots.len() == 0
    }

    /// Number of free slots left.
    #[inline(always)]
    pub fn remaining(&self) -> usize {
        self.slots.len()
    }

    /// Number of values pushed so far.
    #[inline(always)]
    pub fn pushed(&self) -> usize {
        self.uncounted - self.slots.len()
    }

    /// Appends a value at the back of the queue.
    ///
    /// # Errors
    /// The value itself when no free slot is left.
    #[inline(always)]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        match self.slots.next() {
            Some(slot) => {
                slot.write(value);
                Ok(())
            }
            None => Err(value),
        }
    }
}

impl<T> PushBatch<'_, T> {
    /// Converts each of `others` with `make` and appends the results; there must be a free slot
    /// for each. When `make` panics, the values made so far are lost.
    ///
    /// # Panics
    /// When there are fewer free slots.
    #[inline(always)]
    pub(crate) fn push_each<U>(&mut self, others: &[U], mut make: impl FnMut(&U) -> Option<T>) {
        assert!(others.len() <= self.slots.len(), "more values than free slots");
        let slots = mem::take(&mut self.slots).into_slice();
        // Counted after the loop: see `PopBatch::move_while`.
        self.uncounted -= slots.len();
        let mut made = 0;
        for other in others {
            if let Some(value) = make(other) {
                // SAFETY: `made` is less than the number of others visited, and there are as
                // many slots.
                unsafe { slots.get_unchecked_mut(made) }.write(value);
                made += 1;
            }
        }
        self.uncounted += slots.len();
        self.slots = slots[made..].iter_mut();
    }
}

impl<T> Drop for PushBatch<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // The first slots hold values now.
        *self.tail = self.tail.wrapping_add(self.pushed());
    }
}

/// Removes values from the front of a [`Fifo`]; created by [`Fifo::drain`].
pub struct Drain<'a, T> {
    queue: &'a mut Fifo<T>,
    remaining: usize,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    #[inline(always)]
    fn next(&mut self) -> Option<T> {
        self.remaining = self.remaining.checked_sub(1)?;
        self.queue.pop_front()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl<T> ExactSizeIterator for Drain<'_, T> {}

impl<T> Drop for Drain<'_, T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

impl<T> Drop for Fifo<T> {
    fn drop(&mut self) {
        if mem::needs_drop::<T>() {
            drop(self.drain(..));
        }
    }
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for Fifo<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T> Index<usize> for Fifo<T> {
    type Output = T;

    /// # Panics
    /// When `index` is not less than the length.
    fn index(&self, index: usize) -> &T {
        self.get(index).expect("queue index out of bounds")
    }
}

impl<T> IndexMut<usize> for Fifo<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        self.get_mut(index).expect("queue index out of bounds")
    }
}

impl<T> Extend<T> for Fifo<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push_back(value));
    }
}

impl<T> FromIterator<T> for Fifo<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut queue = Self::new();
        queue.extend(values);
        queue
    }
}

impl<T, const N: usize> From<[T; N]> for Fifo<T> {
    fn from(values: [T; N]) -> Self {
        values.into_iter().collect()
    }
}

/// Iterator that owns the values of a [`Fifo`].
pub struct IntoIter<T>(Fifo<T>);

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.0.pop_front()
    }
}

impl<T> IntoIterator for Fifo<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        PushBack,
        PushFront,
        Pop,
        Drain(usize, usize),
        Change(usize),
        PopBatch(usize),
        PushBatch(usize, usize, usize),
        Move(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::PushBack),
            1 => Just(Step::PushFront),
            4 => Just(Step::Pop),
            1 => (0usize..9, 0usize..9).prop_map(|(n, asked)| Step::Drain(n, asked)),
            1 => (0usize..9).prop_map(Step::Change),
            2 => (0usize..9).prop_map(Step::PopBatch),
            2 => (0usize..20, 0usize..9, 0usize..9).prop_map(|(a, b, c)| Step::PushBatch(a, b, c)),
            2 => (0usize..9).prop_map(Step::Move),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 8 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Compares with `VecDeque`, with values that own memory.
        #[test]
        fn behaves_like_a_deque(capacity in 0usize..9, steps in prop::collection::vec(step(), 0..200)) {
            let (mut queue, mut model) = (Fifo::with_capacity(capacity), VecDeque::new());
            let mut other = Fifo::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::PushBack => {
                        queue.push_back(Box::new(number));
                        model.push_back(Box::new(number));
                    }
                    Step::PushFront => {
                        queue.push_front(Box::new(number));
                        model.push_front(Box::new(number));
                    }
                    Step::Pop => prop_assert_eq!(queue.pop_front(), model.pop_front()),
                    Step::Drain(n, asked) => {
                        let n = n.min(model.len());
                        let drained: Vec<_> = queue.drain(..n).take(asked).collect();
                        let expected: Vec<_> = model.drain(..n).take(asked).collect();
                        prop_assert_eq!(drained, expected);
                    }
                    Step::PopBatch(asked) => {
                        let run = queue.pop_batch();
                        prop_assert!(run.len() > 0 || model.is_empty());
                        let mut run = run;
                        prop_assert_eq!(run.next_if(|_| false), None);
                        if asked > 5 {
                            prop_assert_eq!(run.next_if(|_| true), model.pop_front());
                        }
                        let taken: Vec<_> = run.take(asked).collect();
                        let expected: Vec<_> = model.drain(..taken.len()).collect();
                        prop_assert_eq!(taken, expected);
                    }
                    Step::Move(asked) => {
                        let mut run = queue.pop_batch();
                        let (there, mut left) = (run.len(), asked);
                        run.move_while(&mut other.push_batch(6, 0), |value| match left.checked_sub(1) {
                            Some(less) => {
                                left = less;
                                Ok(value)
                            }
                            None => Err(value),
                        });
                        let moved = asked - left;
                        prop_assert_eq!(run.len(), there - moved);
                        drop(run);
                        prop_assert!(moved == asked.min(there) || moved > 0);
                        prop_assert!(other.drain(..).eq(model.drain(..moved)));
                    }
                    Step::PushBatch(limit, wanted, asked) => {
                        let mut spare = queue.push_batch(limit, wanted);
                        let left = spare.remaining();
                        prop_assert!(left > 0 || model.len() >= limit);
                        prop_assert!(left + model.len() <= limit.max(model.len()));
                        let whole = model.is_empty();
                        prop_assert!(!whole || left >= wanted.min(limit));
                        for more in 0..asked {
                            let value = Box::new(number * 100 + more);
                            prop_assert_eq!(spare.is_full(), more >= left);
                            match spare.push(value.clone()) {
                                Ok(()) => model.push_back(value),
                                Err(back) => prop_assert_eq!(back, value),
                            }
                        }
                    }
                    Step::Change(index) => {
                        prop_assert_eq!(queue.get(index), model.get(index));
                        let (front, back) = queue.as_mut_slices();
                        prop_assert!(!front.is_empty() || back.is_empty());
                        prop_assert!(front.iter().chain(back.iter()).eq(model.iter()));
                        let (last, same) = (back.last_mut().or(front.last_mut()), model.back_mut());
                        if let (Some(a), Some(b)) = (last, same) {
                            (**a, **b) = (number + 2000, number + 2000);
                        }
                        if let (Some(a), Some(b)) = (queue.get_mut(index), model.get_mut(index)) {
                            (**a, **b) = (number + 1000, number + 1000);
                        }
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.is_empty(), model.is_empty());
                prop_assert!(queue.iter().eq(model.iter()));
                prop_assert!(queue.iter_mut().eq(model.iter_mut()));
            }
            prop_assert!(queue.into_iter().eq(model));
        }
    }

    #[test]
    fn drops_queued_values_with_the_queue_and_with_a_drain() {
        let value = Rc::new(());
        let mut queue: Fifo<_> = (0..5).map(|_| Rc::clone(&value)).collect();
        drop(queue.drain(..3));
        assert_eq!(Rc::strong_count(&value), 3);
        drop(queue);
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    #[should_panic(expected = "more values drained than there are")]
    fn panics_when_draining_past_the_end() {
        Fifo::from([1, 2]).drain(..3);
    }
}
