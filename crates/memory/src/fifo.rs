//! A queue of one owner: first in, first out.
//!
//! It does what `std`'s `VecDeque` does, less what frames never need. Adding
//! and taking are a dozen instructions without a call, for they happen to each
//! packet several times.

use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ops::{Bound, Index, IndexMut, RangeBounds};
use std::slice;

/// A queue that grows when it must and never shrinks.
pub struct Fifo<T> {
    /// A power of two of them, or none. Those from `taken` to `added`, modulo
    /// their number, hold values.
    slots: Box<[MaybeUninit<T>]>,
    /// Values added since the queue was made.
    added: usize,
    /// Values taken since the queue was made.
    taken: usize,
}

impl<T> Fifo<T> {
    /// An empty queue, for which no memory is taken yet.
    pub fn new() -> Self {
        Self { slots: Box::default(), added: 0, taken: 0 }
    }

    /// An empty queue with room for at least `capacity` values.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut queue = Self::new();
        if capacity > 0 {
            queue.grow_to(capacity);
        }
        queue
    }

    /// How many values wait.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.added.wrapping_sub(self.taken)
    }

    /// Whether no value waits.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.added == self.taken
    }

    /// The place of the value that is number `count` since the queue was made.
    /// Meaningless without slots.
    #[inline(always)]
    fn place(&self, count: usize) -> usize {
        count & self.slots.len().wrapping_sub(1)
    }

    /// Adds a value at the back.
    #[inline(always)]
    pub fn push_back(&mut self, value: T) {
        if self.len() == self.slots.len() {
            self.grow_to(self.slots.len() + 1);
        }
        let place = self.place(self.added);
        // SAFETY: there is at least one slot, as `grow_to` made more than
        // there are values, and `place` is less than their number.
        unsafe { self.slots.get_unchecked_mut(place) }.write(value);
        self.added = self.added.wrapping_add(1);
    }

    /// Puts a value back in front of all others.
    #[inline]
    pub fn push_front(&mut self, value: T) {
        if self.len() == self.slots.len() {
            self.grow_to(self.slots.len() + 1);
        }
        self.taken = self.taken.wrapping_sub(1);
        let place = self.place(self.taken);
        self.slots[place].write(value);
    }

    /// Takes the value at the front.
    #[inline(always)]
    pub fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let place = self.place(self.taken);
        self.taken = self.taken.wrapping_add(1);
        // SAFETY: the queue is not empty, so there are slots, `place` is less
        // than their number, and this one held a value. From now on it does
        // not, so that no second value is made of it.
        Some(unsafe { self.slots.get_unchecked(place).assume_init_read() })
    }

    /// The value that is number `index` from the front.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let slot = &self.slots[self.place(self.taken.wrapping_add(index))];
        // SAFETY: the slots of the values that wait hold values.
        Some(unsafe { slot.assume_init_ref() })
    }

    /// As [`Fifo::get`], to be changed.
    #[inline]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        if index >= self.len() {
            return None;
        }
        let place = self.place(self.taken.wrapping_add(index));
        // SAFETY: as in `get`.
        Some(unsafe { self.slots[place].assume_init_mut() })
    }

    /// The value at the front.
    #[inline]
    pub fn front(&self) -> Option<&T> {
        self.get(0)
    }

    /// The values, from the front.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &T> {
        (0..self.len()).map(|index| &self[index])
    }

    /// As [`Fifo::iter`], to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let (front, back) = self.as_mut_slices();
        front.iter_mut().chain(back)
    }

    /// Takes the values of a range that begins at the front, one by one. Those
    /// that the iterator was not asked for are dropped with it.
    ///
    /// # Panics
    /// When the range does not begin at 0 or ends behind the last value.
    #[inline]
    pub fn drain(&mut self, range: impl RangeBounds<usize>) -> Drain<'_, T> {
        let front = matches!(range.start_bound(), Bound::Unbounded | Bound::Included(0));
        assert!(front, "a queue is emptied from the front");
        let left = match range.end_bound() {
            Bound::Unbounded => self.len(),
            Bound::Excluded(&end) => end,
            Bound::Included(&last) => last + 1,
        };
        assert!(left <= self.len(), "more values drained than there are");
        Drain { queue: self, left }
    }

    /// The values, from the front: those that lie side by side, and behind them the
    /// others, which do too.
    #[inline(always)]
    pub fn as_mut_slices(&mut self) -> (&mut [T], &mut [T]) {
        let (len, first) = (self.len(), self.place(self.taken).min(self.slots.len()));
        let (back, front) = self.slots.split_at_mut(first);
        let in_front = len.min(front.len());
        let behind = len - in_front;
        let (front, back) = (&mut front[..in_front], &mut back[..behind]);
        // SAFETY: the slots of the values that wait hold values, in a circle from `first`
        // on, and values have the layout of their slots.
        unsafe {
            (
                slice::from_raw_parts_mut(front.as_mut_ptr().cast(), in_front),
                slice::from_raw_parts_mut(back.as_mut_ptr().cast(), behind),
            )
        }
    }

    /// Takes values from the front as long as they lie side by side: many cost
    /// less so than one by one. When it ends, there may be more. Those that it
    /// was not asked for stay.
    #[inline(always)]
    pub fn run(&mut self) -> Run<'_, T> {
        self.run_of(usize::MAX)
    }

    /// As [`Fifo::run`], of at most `most` values.
    #[inline(always)]
    pub fn run_of(&mut self, most: usize) -> Run<'_, T> {
        let first = self.place(self.taken).min(self.slots.len());
        let len = self.len().min(self.slots.len() - first).min(most);
        // All are taken until `Run` says otherwise, so that none could be
        // taken twice if that were never said.
        self.taken = self.taken.wrapping_add(len);
        Run { values: self.slots[first..first + len].iter_mut(), taken: &mut self.taken }
    }

    /// Places for new values at the back, as many as lie side by side, and at
    /// most so many that `limit` values wait. Some, unless the queue is at its
    /// limit: room is made for `wanted` where there is none.
    #[inline(always)]
    pub fn spare(&mut self, limit: usize, wanted: usize) -> Spare<'_, T> {
        if self.is_empty() {
            (self.added, self.taken) = (0, 0);
        }
        let len = self.len();
        let short = len == self.slots.len() || len == 0 && self.slots.len() < wanted;
        if short && len < limit {
            self.grow_to(limit.min(len + wanted.max(1)));
        }
        let first = self.place(self.added);
        let most = (self.slots.len() - len).min(limit.saturating_sub(len));
        let last = self.slots.len().min(first + most);
        let places = self.slots[first..last].iter_mut();
        Spare { unused: places.len(), places, added: &mut self.added }
    }

    /// Makes room for at least `capacity` values.
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
        (self.slots, self.taken, self.added) = (slots, 0, len);
    }
}

/// Takes values from the front of a [`Fifo`]; made by [`Fifo::run`].
pub struct Run<'a, T> {
    values: slice::IterMut<'a, MaybeUninit<T>>,
    taken: &'a mut usize,
}

impl<T> Run<'_, T> {
    /// The next value, which stays.
    #[inline(always)]
    pub fn first(&self) -> Option<&T> {
        let slot = self.values.as_slice().first()?;
        // SAFETY: the slots of the run hold values until they are read.
        Some(unsafe { slot.assume_init_ref() })
    }

    /// The next value, if it is such a one; otherwise it stays.
    #[inline(always)]
    pub fn next_if(&mut self, wanted: impl FnOnce(&T) -> bool) -> Option<T> {
        if wanted(self.first()?) { self.next() } else { None }
    }

    /// Moves values to another queue, as long as there are places there and
    /// `change` makes of each what shall go there. A value that it gives back
    /// stays. When it panics, the values of the run are lost.
    #[inline(always)]
    pub fn move_while<U>(
        &mut self,
        to: &mut Spare<'_, U>,
        mut change: impl FnMut(T) -> Result<U, T>,
    ) {
        let places = mem::take(&mut to.places).into_slice();
        // What is still to be counted at the end: nothing is counted now, so
        // that no value could be had twice if it never came to that.
        to.unused -= places.len();
        let from = mem::take(&mut self.values).into_slice();
        let count = from.len().min(places.len());
        let (mut values, mut place) = (from[..count].iter_mut(), places.as_mut_ptr());
        let mut given_back = 0;
        for value in &mut values {
            // SAFETY: the slots of the run held values, and each is read once:
            // the queue counts them as taken.
            match change(unsafe { value.assume_init_read() }) {
                // SAFETY: there are at least as many places as values are
                // gone through.
                Ok(changed) => unsafe {
                    (*place).write(changed);
                    place = place.add(1);
                },
                Err(back) => {
                    value.write(back);
                    given_back = 1;
                    break;
                }
            }
        }
        let moved = count - values.len() - given_back;
        to.unused += places.len();
        to.places = places[moved..].iter_mut();
        self.values = from[moved..].iter_mut();
    }
}

impl<T> Run<'_, T> {
    /// Hands values over, each with one of `others`, as many as there are of
    /// both, until `take` refuses one, which is gone. Returns how many it took.
    /// When it panics, the values of the run are lost.
    #[inline(always)]
    pub(crate) fn take_each<U>(
        &mut self,
        others: &[U],
        mut take: impl FnMut(&U, T) -> bool,
    ) -> usize {
        let values = mem::take(&mut self.values).into_slice();
        let (mut taken, mut refused) = (0, 0);
        for (value, other) in values.iter_mut().zip(others) {
            // SAFETY: the slots of the run held values, and each is read once:
            // the queue counts them as taken.
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

impl<T> Iterator for Run<'_, T> {
    type Item = T;

    #[inline(always)]
    fn next(&mut self) -> Option<T> {
        let slot = self.values.next()?;
        // SAFETY: the slots of the run held values, and each is read once: the
        // queue counts them as taken.
        Some(unsafe { slot.assume_init_read() })
    }

    #[inline(always)]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.values.size_hint()
    }
}

impl<T> ExactSizeIterator for Run<'_, T> {}

impl<T> Drop for Run<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.taken = self.taken.wrapping_sub(self.len());
    }
}

/// Places for new values at the back of a [`Fifo`]; made by [`Fifo::spare`].
pub struct Spare<'a, T> {
    places: slice::IterMut<'a, MaybeUninit<T>>,
    /// The places there were, less those whose values are counted in `added`.
    unused: usize,
    added: &'a mut usize,
}

impl<T> Spare<'_, T> {
    /// Whether there is no place left.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.places.len() == 0
    }

    /// How many places are left.
    #[inline(always)]
    pub fn left(&self) -> usize {
        self.places.len()
    }

    /// How many values were added.
    #[inline(always)]
    pub fn used(&self) -> usize {
        self.unused - self.places.len()
    }

    /// Adds a value at the back of the queue.
    ///
    /// # Errors
    /// The value itself when there is no place left.
    #[inline(always)]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        match self.places.next() {
            Some(place) => {
                place.write(value);
                Ok(())
            }
            None => Err(value),
        }
    }
}

impl<T> Spare<'_, T> {
    /// Adds what `make` makes of each of `others`, for each of which there is a
    /// place. When it panics, what it made is lost.
    ///
    /// # Panics
    /// When there are fewer places.
    #[inline(always)]
    pub(crate) fn push_each<U>(&mut self, others: &[U], mut make: impl FnMut(&U) -> Option<T>) {
        assert!(others.len() <= self.places.len(), "more values than places");
        let places = mem::take(&mut self.places).into_slice();
        // Counted at the end: see `Run::move_while`.
        self.unused -= places.len();
        let mut made = 0;
        for other in others {
            if let Some(value) = make(other) {
                // SAFETY: `made` is less than the number of others gone
                // through, and there are as many places.
                unsafe { places.get_unchecked_mut(made) }.write(value);
                made += 1;
            }
        }
        self.unused += places.len();
        self.places = places[made..].iter_mut();
    }
}

impl<T> Drop for Spare<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // The first places hold values now.
        *self.added = self.added.wrapping_add(self.used());
    }
}

/// Takes values from the front of a [`Fifo`]; made by [`Fifo::drain`].
pub struct Drain<'a, T> {
    queue: &'a mut Fifo<T>,
    left: usize,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    #[inline(always)]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        self.queue.pop_front()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
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
    /// When there are no more than `index` values.
    fn index(&self, index: usize) -> &T {
        self.get(index).expect("an index behind the last value of a queue")
    }
}

impl<T> IndexMut<usize> for Fifo<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        self.get_mut(index).expect("an index behind the last value of a queue")
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

/// Takes the values of a [`Fifo`] that is given away.
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
        Run(usize),
        Spare(usize, usize, usize),
        Move(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::PushBack),
            1 => Just(Step::PushFront),
            4 => Just(Step::Pop),
            1 => (0usize..9, 0usize..9).prop_map(|(n, asked)| Step::Drain(n, asked)),
            1 => (0usize..9).prop_map(Step::Change),
            2 => (0usize..9).prop_map(Step::Run),
            2 => (0usize..20, 0usize..9, 0usize..9).prop_map(|(a, b, c)| Step::Spare(a, b, c)),
            2 => (0usize..9).prop_map(Step::Move),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 8 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Against `VecDeque`, with values that own memory.
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
                    Step::Run(asked) => {
                        let run = queue.run();
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
                        let mut run = queue.run();
                        let (there, mut left) = (run.len(), asked);
                        run.move_while(&mut other.spare(6, 0), |value| match left.checked_sub(1) {
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
                    Step::Spare(limit, wanted, asked) => {
                        let mut spare = queue.spare(limit, wanted);
                        let left = spare.left();
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
    fn what_waits_is_dropped_with_the_queue_and_with_a_drain() {
        let value = Rc::new(());
        let mut queue: Fifo<_> = (0..5).map(|_| Rc::clone(&value)).collect();
        drop(queue.drain(..3));
        assert_eq!(Rc::strong_count(&value), 3);
        drop(queue);
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    #[should_panic(expected = "more values drained than there are")]
    fn draining_past_the_end_is_refused() {
        Fifo::from([1, 2]).drain(..3);
    }
}
