//! A bounded ring between one producer and one consumer.
//!
//! The slots are made once and used again and again, so a slot may be large:
//! it is written and read in place. Work is done in batches: the producer
//! fills [`Producer::slot`] 0, 1, 2 ... and makes them visible with one
//! [`Producer::publish`]; the consumer reads [`Consumer::slot`] 0, 1, 2 ...
//! and gives them back with one [`Consumer::release`].
//!
//! Each side keeps a private copy of the other side's index and looks at the
//! shared one only when the copy says that there is too little, so that in
//! steady flow a cache line moves once per batch and not once per item.

use crate::fifo::{Run, Spare};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, UnsafeCell};

/// A value alone on its cache lines (two, since cards and processors fetch
/// them in pairs).
#[repr(align(128))]
struct Padded<T>(T);

struct Shared<T> {
    slots: Box<[UnsafeCell<T>]>,
    /// Slots published since the ring was made; written by the producer.
    published: Padded<AtomicUsize>,
    /// Slots released since the ring was made; written by the consumer.
    released: Padded<AtomicUsize>,
    /// One of the two sides is gone.
    closed: AtomicBool,
}

// SAFETY: a slot is reached by one side at a time: the producer touches only
// slots from `published` to `released + capacity`, the consumer only those
// from `released` to `published`, and each index is written by one side with
// release and read by the other with acquire.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// The `count` slots from number `first` since the ring was made on: up to
    /// the end of the memory, and on from its start.
    #[inline(always)]
    fn circle(&self, first: usize, count: usize) -> [&[UnsafeCell<T>]; 2] {
        let (start, end) = self.slots.split_at(first & self.mask());
        let before_end = count.min(end.len());
        [&end[..before_end], &start[..count - before_end]]
    }
}

/// The sending end.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    published: usize,
    released_seen: usize,
}

/// The receiving end.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    released: usize,
    published_seen: usize,
}

/// Makes a ring of `capacity` slots, each made by `make`.
///
/// # Panics
/// When `capacity` is not a power of two.
pub fn ring<T>(capacity: usize, mut make: impl FnMut() -> T) -> (Producer<T>, Consumer<T>) {
    assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
    let shared = Arc::new(Shared {
        slots: (0..capacity).map(|_| UnsafeCell::new(make())).collect(),
        published: Padded(AtomicUsize::new(0)),
        released: Padded(AtomicUsize::new(0)),
        closed: AtomicBool::new(false),
    });
    let producer = Producer { shared: Arc::clone(&shared), published: 0, released_seen: 0 };
    (producer, Consumer { shared, released: 0, published_seen: 0 })
}

impl<T> Producer<T> {
    /// Slots that can be written now, looking at the shared index only when
    /// fewer than `wanted` are known of.
    #[inline]
    pub fn free(&mut self, wanted: usize) -> usize {
        let mut used = self.published.wrapping_sub(self.released_seen);
        if self.shared.slots.len() - used < wanted {
            self.released_seen = self.shared.released.0.load(Ordering::Acquire);
            used = self.published.wrapping_sub(self.released_seen);
        }
        self.shared.slots.len() - used
    }

    /// Writes the free slot number `ahead`, counted from the first one not yet
    /// published.
    ///
    /// # Panics
    /// When fewer than `ahead + 1` slots are free.
    #[inline]
    pub fn slot<R>(&mut self, ahead: usize, write: impl FnOnce(&mut T) -> R) -> R {
        assert!(self.free(ahead + 1) > ahead, "the ring has no such free slot");
        let index = self.published.wrapping_add(ahead) & self.shared.mask();
        self.shared.slots[index].with_mut(|slot| {
            // SAFETY: the slot is free (checked), so the consumer does not
            // touch it before `publish`; `&mut self` excludes a second writer.
            write(unsafe { &mut *slot })
        })
    }

    /// Makes the first `count` written slots visible to the consumer.
    ///
    /// # Panics
    /// When fewer than `count` slots were free.
    #[inline]
    pub fn publish(&mut self, count: usize) {
        assert!(self.free(count) >= count, "more slots published than were free");
        self.published = self.published.wrapping_add(count);
        self.shared.published.0.store(self.published, Ordering::Release);
    }

    /// Writes free slots one after the other, as many as there are and at most
    /// `most`, until `write` says that it wrote none. Makes them visible
    /// together and returns how many.
    #[inline(always)]
    pub fn publish_each(&mut self, most: usize, mut write: impl FnMut(&mut T) -> bool) -> usize {
        let room = self.free(most).min(most);
        let mut count = 0;
        'all: for part in self.shared.circle(self.published, room) {
            for slot in part {
                // SAFETY: the slot is free (`room`), so the consumer does not
                // touch it before `publish`; `&mut self` excludes a second
                // writer.
                if !slot.with_mut(|slot| write(unsafe { &mut *slot })) {
                    break 'all;
                }
                count += 1;
            }
        }
        if count > 0 {
            self.publish(count);
        }
        count
    }

    /// Writes the values of a run to free slots, one to each, as many as there
    /// are, until `write` says that it wrote none: that value is gone. Makes
    /// them visible together and returns how many.
    #[inline(always)]
    pub fn publish_run<V>(
        &mut self,
        run: &mut Run<'_, V>,
        mut write: impl FnMut(&mut T, V) -> bool,
    ) -> usize {
        let room = self.free(run.len()).min(run.len());
        let mut count = 0;
        for part in self.shared.circle(self.published, room) {
            let written = run.take_each(part, |slot, value| {
                // SAFETY: the slot is free (`room`), so the consumer does not
                // touch it before `publish`; `&mut self` excludes a second
                // writer.
                slot.with_mut(|slot| write(unsafe { &mut *slot }, value))
            });
            count += written;
            if written < part.len() {
                break;
            }
        }
        if count > 0 {
            self.publish(count);
        }
        count
    }

    /// Puts one value in; gives it back when the ring is full.
    ///
    /// # Errors
    /// The value itself, when there is no free slot.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.free(1) == 0 {
            return Err(value);
        }
        self.slot(0, |slot| *slot = value);
        self.publish(1);
        Ok(())
    }

    /// Whether the consumer is gone.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }
}

impl<T> Consumer<T> {
    /// Slots that can be read now, looking at the shared index only when fewer
    /// than `wanted` are known of.
    #[inline]
    pub fn ready(&mut self, wanted: usize) -> usize {
        let mut ready = self.published_seen.wrapping_sub(self.released);
        if ready < wanted {
            self.published_seen = self.shared.published.0.load(Ordering::Acquire);
            ready = self.published_seen.wrapping_sub(self.released);
        }
        ready
    }

    /// Reads the slot number `ahead`, counted from the oldest one.
    ///
    /// # Panics
    /// When fewer than `ahead + 1` slots are ready.
    #[inline]
    pub fn slot<R>(&mut self, ahead: usize, read: impl FnOnce(&mut T) -> R) -> R {
        assert!(self.ready(ahead + 1) > ahead, "the ring has no such ready slot");
        let index = self.released.wrapping_add(ahead) & self.shared.mask();
        self.shared.slots[index].with_mut(|slot| {
            // SAFETY: the slot is published (checked), so the producer does not
            // touch it before `release`; `&mut self` excludes a second reader.
            read(unsafe { &mut *slot })
        })
    }

    /// Gives the oldest `count` slots back to the producer.
    ///
    /// # Panics
    /// When fewer than `count` slots were ready.
    #[inline]
    pub fn release(&mut self, count: usize) {
        assert!(self.ready(count) >= count, "more slots released than were ready");
        self.released = self.released.wrapping_add(count);
        self.shared.released.0.store(self.released, Ordering::Release);
    }

    /// Reads the slots that are ready from the oldest on, at most `most`. Gives
    /// them back together and returns how many.
    #[inline(always)]
    pub fn release_each(&mut self, most: usize, mut read: impl FnMut(&mut T)) -> usize {
        let count = self.ready(most).min(most);
        for part in self.shared.circle(self.released, count) {
            for slot in part {
                // SAFETY: the slot is published (`count`), so the producer does
                // not touch it before `release`; `&mut self` excludes a second
                // reader.
                slot.with_mut(|slot| read(unsafe { &mut *slot }));
            }
        }
        if count > 0 {
            self.release(count);
        }
        count
    }

    /// Reads the slots that are ready from the oldest on, at most `most`, and
    /// adds what `read` makes of them to a queue, as long as there are places.
    /// Gives the slots back together and returns how many.
    #[inline(always)]
    pub fn release_into<V>(
        &mut self,
        most: usize,
        to: &mut Spare<'_, V>,
        mut read: impl FnMut(&mut T) -> Option<V>,
    ) -> usize {
        let count = self.ready(most).min(most).min(to.left());
        for part in self.shared.circle(self.released, count) {
            to.push_each(part, |slot| {
                // SAFETY: the slot is published (`count`), so the producer does
                // not touch it before `release`; `&mut self` excludes a second
                // reader.
                slot.with_mut(|slot| read(unsafe { &mut *slot }))
            });
        }
        if count > 0 {
            self.release(count);
        }
        count
    }

    /// Takes the oldest value out and leaves a default in its slot.
    #[inline]
    pub fn pop(&mut self) -> Option<T>
    where
        T: Default,
    {
        if self.ready(1) == 0 {
            return None;
        }
        let value = self.slot(0, std::mem::take);
        self.release(1);
        Some(value)
    }

    /// Whether the producer is gone. Values published before may still wait.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::Fifo;

    #[test]
    fn a_full_ring_gives_the_value_back() {
        let (mut producer, mut consumer) = ring(2, || 0);
        assert_eq!(producer.push(1), Ok(()));
        assert_eq!(producer.push(2), Ok(()));
        assert_eq!(producer.push(3), Err(3));
        assert_eq!(consumer.pop(), Some(1));
        assert_eq!(producer.push(3), Ok(()));
        assert_eq!((consumer.pop(), consumer.pop(), consumer.pop()), (Some(2), Some(3), None));
    }

    #[test]
    fn runs_go_around_the_ring_and_come_back_in_order() {
        let (mut producer, mut consumer) = ring(4, || 0);
        let (mut from, mut to) = (Fifo::new(), Fifo::new());
        let (mut next, mut expected) = (0, 0);
        for round in 0..20 {
            for _ in 0..round % 7 {
                from.push_back(next);
                next += 1;
            }
            let mut run = from.run();
            let (there, written) = (
                run.len(),
                producer.publish_run(&mut run, |slot, value| {
                    *slot = value;
                    value % 5 != 3
                }),
            );
            let refused = there.min(4) > written;
            assert_eq!(run.len(), there - written - usize::from(refused));
            drop(run);
            // What was written while its value was refused is written again.
            let mut spare = to.spare(3, 0);
            let read =
                consumer.release_into(9, &mut spare, |slot| (*slot % 4 != 1).then_some(*slot));
            assert_eq!(read, written.min(3));
            drop(spare);
            while consumer.pop().is_some_and(|value| {
                to.push_back(value);
                true
            }) {}
            for value in to.drain(..) {
                assert!(value >= expected && value % 5 != 3, "{value} after {expected}");
                expected = value + 1;
            }
        }
        assert!(expected > 20);
    }

    #[test]
    fn each_side_sees_the_other_leave() {
        let (producer, consumer) = ring(2, || 0);
        assert!(!consumer.is_closed());
        drop(producer);
        assert!(consumer.is_closed());
        let (producer, consumer) = ring(2, || 0);
        drop(consumer);
        assert!(producer.is_closed());
    }

    #[test]
    #[should_panic(expected = "more slots published than were free")]
    fn publishing_past_the_consumer_is_refused() {
        let (mut producer, _consumer) = ring(2, || 0);
        producer.publish(3);
    }

    #[test]
    fn two_threads_pass_every_value_in_order() {
        let count = if cfg!(miri) { 200 } else { 100_000 };
        let (mut producer, mut consumer) = ring(64, || 0u64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut next = 0;
                while next < count {
                    let batch = producer.free(16).min((count - next) as usize);
                    for ahead in 0..batch {
                        producer.slot(ahead, |slot| *slot = next + ahead as u64);
                    }
                    producer.publish(batch);
                    next += batch as u64;
                    std::thread::yield_now();
                }
            });
            let mut expected = 0;
            while expected < count {
                let batch = consumer.ready(1);
                for ahead in 0..batch {
                    consumer.slot(ahead, |slot| assert_eq!(*slot, expected + ahead as u64));
                }
                consumer.release(batch);
                expected += batch as u64;
                std::thread::yield_now();
            }
        });
    }

    /// Whether to push or to take, one by one or each at once, how many, and
    /// after how many to stop.
    fn any_step() -> impl Strategy<Value = (bool, bool, usize, usize)> {
        (any::<bool>(), any::<bool>(), 0usize..20, 0usize..20)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Against a plain queue as the model.
        #[test]
        fn behaves_like_a_bounded_queue(
            shift in 0u32..5,
            steps in prop::collection::vec(any_step(), 0..if cfg!(miri) { 40 } else { 100 }),
        ) {
            let capacity = 1 << shift;
            let (mut producer, mut consumer) = ring(capacity, || 0u32);
            let (mut model, mut next) = (VecDeque::new(), 0);
            for (push, each, wanted, stop) in steps {
                if push && each {
                    let mut written = 0;
                    let batch = producer.publish_each(wanted, |slot| {
                        if written == stop {
                            return false;
                        }
                        *slot = next;
                        model.push_back(next);
                        next += 1;
                        written += 1;
                        true
                    });
                    prop_assert_eq!(batch, written);
                    prop_assert!(written == wanted.min(stop) || model.len() == capacity);
                } else if push {
                    let batch = producer.free(wanted).min(wanted);
                    prop_assert_eq!(batch, wanted.min(capacity - model.len()));
                    for ahead in 0..batch {
                        producer.slot(ahead, |slot| *slot = next);
                        model.push_back(next);
                        next += 1;
                    }
                    producer.publish(batch);
                } else if each {
                    let mut taken = Vec::new();
                    let batch = consumer.release_each(wanted, |slot| taken.push(*slot));
                    prop_assert_eq!(batch, wanted.min(model.len()));
                    prop_assert!(taken.into_iter().eq(model.drain(..batch)));
                } else {
                    let batch = consumer.ready(wanted).min(wanted);
                    prop_assert_eq!(batch, wanted.min(model.len()));
                    for ahead in 0..batch {
                        prop_assert_eq!(consumer.slot(ahead, |slot| *slot), model.pop_front().unwrap());
                    }
                    consumer.release(batch);
                }
            }
        }
    }
}

/// Every interleaving of a small run: `RUSTFLAGS="--cfg loom" cargo test -p tidegate-memory --release`.
#[cfg(all(test, loom))]
mod model {
    use super::*;

    #[test]
    fn nothing_is_lost_or_torn() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(2, || 0usize);
            let sender = loom::thread::spawn(move || {
                for value in 1..=3 {
                    while producer.push(value).is_err() {
                        loom::thread::yield_now();
                    }
                }
            });
            for expected in 1..=3 {
                let value = loop {
                    if let Some(value) = consumer.pop() {
                        break value;
                    }
                    loom::thread::yield_now();
                };
                assert_eq!(value, expected);
            }
            sender.join().unwrap();
            assert!(consumer.is_closed());
        });
    }

    #[test]
    fn a_batch_becomes_visible_whole() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(4, || 0usize);
            let sender = loom::thread::spawn(move || {
                producer.slot(0, |slot| *slot = 1);
                producer.slot(1, |slot| *slot = 2);
                producer.publish(2);
            });
            let ready = consumer.ready(2);
            assert!(ready == 0 || ready == 2);
            for ahead in 0..ready {
                assert_eq!(consumer.slot(ahead, |slot| *slot), ahead + 1);
            }
            consumer.release(ready);
            sender.join().unwrap();
        });
    }
}
