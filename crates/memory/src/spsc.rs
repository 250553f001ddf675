//! A bounded ring between one producer and one consumer.
//!
//! The slots are made once and reused, so a slot may be large: it is written and read in place.
//! Work is done in batches. The producer fills [`Producer::slot`] 0, 1, 2 ... and makes them
//! visible with one [`Producer::publish`]; the consumer reads [`Consumer::slot`] 0, 1, 2 ...
//! and frees them with one [`Consumer::release`].
//!
//! Each side keeps a private copy of the other side's index. It loads the shared index only
//! when the copy shows too few slots, so that in steady flow a cache line moves once per batch
//! and not once per item.

use crate::fifo::{PopBatch, PushBatch};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, UnsafeCell};

/// A value alone on its cache lines (two, since NICs and processors fetch them in pairs).
#[repr(align(128))]
struct CachePadded<T>(T);

struct Shared<T> {
    slots: Box<[UnsafeCell<T>]>,
    /// Slots published since the ring was created; written by the producer.
    published: CachePadded<AtomicUsize>,
    /// Slots released since the ring was created; written by the consumer.
    released: CachePadded<AtomicUsize>,
    /// True once one of the two ends is dropped.
    closed: AtomicBool,
}

// SAFETY: a slot is reached by one side at a time: the producer touches only slots from
// `published` to `released + capacity`, the consumer only slots from `released` to `published`,
// and each index is written by one side with release and read by the other with acquire.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// The `count` slots from the free-running index `first` on, as two slices: up to the end of
    /// the memory, and the wrapped rest.
    #[inline(always)]
    fn slot_slices(&self, first: usize, count: usize) -> [&[UnsafeCell<T>]; 2] {
        let (start, end) = self.slots.split_at(first & self.mask());
        let before_end = count.min(end.len());
        [&end[..before_end], &start[..count - before_end]]
    }
}

/// Producer end of a ring.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    published: usize,
    released_seen: usize,
}

/// Consumer end of a ring.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    released: usize,
    published_seen: usize,
}

/// Creates a ring of `capacity` slots, each initialized by `make`.
///
/// # Panics
/// When `capacity` is not a power of two.
pub fn ring<T>(capacity: usize, mut make: impl FnMut() -> T) -> (Producer<T>, Consumer<T>) {
    assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
    let shared = Arc::new(Shared {
        slots: (0..capacity).map(|_| UnsafeCell::new(make())).collect(),
        published: CachePadded(AtomicUsize::new(0)),
        released: CachePadded(AtomicUsize::new(0)),
        closed: AtomicBool::new(false),
    });
    let producer = Producer { shared: Arc::clone(&shared), published: 0, released_seen: 0 };
    (producer, Consumer { shared, released: 0, published_seen: 0 })
}

impl<T> Producer<T> {
    /// Number of slots that can be written now. Loads the shared index only when fewer than
    /// `wanted` are known to be free.
    #[inline]
    pub fn free_slots(&mut self, wanted: usize) -> usize {
        let mut used = self.published.wrapping_sub(self.released_seen);
        if self.shared.slots.len() - used < wanted {
            self.released_seen = self.shared.released.0.load(Ordering::Acquire);
            used = self.published.wrapping_sub(self.released_seen);
        }
        self.shared.slots.len() - used
    }

    /// Number of slots of the ring.
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Writes the free slot at distance `ahead` from the first slot not yet published.
    ///
    /// # Panics
    /// When fewer than `ahead + 1` slots are free.
    #[inline]
    pub fn slot<R>(&mut self, ahead: usize, write: impl FnOnce(&mut T) -> R) -> R {
        assert!(self.free_slots(ahead + 1) > ahead, "the ring has no such free slot");
        let index = self.published.wrapping_add(ahead) & self.shared.mask();
        self.shared.slots[index].with_mut(|slot| {
            // SAFETY: the slot is free (checked), so the consumer does not touch it before
            // `publish`; `&mut self` excludes a second writer.
            write(unsafe { &mut *slot })
        })
    }

    /// Makes the first `count` written slots visible to the consumer.
    ///
    /// # Panics
    /// When fewer than `count` slots were free.
    #[inline]
    pub fn publish(&mut self, count: usize) {
        assert!(self.free_slots(count) >= count, "more slots published than were free");
        self.published = self.published.wrapping_add(count);
        self.shared.published.0.store(self.published, Ordering::Release);
    }

    /// Writes free slots in order, at most `max`, until `write` returns false without having
    /// written. Publishes them together and returns their number.
    #[inline(always)]
    pub fn publish_each(&mut self, max: usize, mut write: impl FnMut(&mut T) -> bool) -> usize {
        let space = self.free_slots(max).min(max);
        let mut count = 0;
        'all: for part in self.shared.slot_slices(self.published, space) {
            for slot in part {
                // SAFETY: the slot is free (`space`), so the consumer does not touch it before
                // `publish`; `&mut self` excludes a second writer.
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

    /// Writes the values of a batch to free slots, one to each, until either runs out or `write`
    /// returns false; the value of that call is lost. Publishes the slots together and returns
    /// their number.
    #[inline(always)]
    pub fn publish_batch<V>(
        &mut self,
        batch: &mut PopBatch<'_, V>,
        mut write: impl FnMut(&mut T, V) -> bool,
    ) -> usize {
        let space = self.free_slots(batch.len()).min(batch.len());
        let mut count = 0;
        for part in self.shared.slot_slices(self.published, space) {
            let written = batch.take_each(part, |slot, value| {
                // SAFETY: the slot is free (`space`), so the consumer does not touch it before
                // `publish`; `&mut self` excludes a second writer.
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

    /// Appends one value.
    ///
    /// # Errors
    /// The value itself, when there is no free slot.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.free_slots(1) == 0 {
            return Err(value);
        }
        self.slot(0, |slot| *slot = value);
        self.publish(1);
        Ok(())
    }

    /// True once the consumer is dropped.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }
}

impl<T> Consumer<T> {
    /// Number of slots that can be read now. Loads the shared index only when fewer than `wanted`
    /// are known to be ready.
    #[inline]
    pub fn ready_slots(&mut self, wanted: usize) -> usize {
        let mut ready = self.published_seen.wrapping_sub(self.released);
        if ready < wanted {
            self.published_seen = self.shared.published.0.load(Ordering::Acquire);
            ready = self.published_seen.wrapping_sub(self.released);
        }
        ready
    }

    /// Reads the slot at distance `ahead` from the oldest one.
    ///
    /// # Panics
    /// When fewer than `ahead + 1` slots are ready.
    #[inline]
    pub fn slot<R>(&mut self, ahead: usize, read: impl FnOnce(&mut T) -> R) -> R {
        assert!(self.ready_slots(ahead + 1) > ahead, "the ring has no such ready slot");
        let index = self.released.wrapping_add(ahead) & self.shared.mask();
        self.shared.slots[index].with_mut(|slot| {
            // SAFETY: the slot is published (checked), so the producer does not
            // touch it before `release`; `&mut self` excludes a second reader.
            read(unsafe { &mut *slot })
        })
    }

    /// Frees the oldest `count` slots for the producer.
    ///
    /// # Panics
    /// When fewer than `count` slots were ready.
    #[inline]
    pub fn release(&mut self, count: usize) {
        assert!(self.ready_slots(count) >= count, "more slots released than were ready");
        self.released = self.released.wrapping_add(count);
        self.shared.released.0.store(self.released, Ordering::Release);
    }

    /// Reads the ready slots in order, at most `max`. Frees them together and returns their
    /// number.
    #[inline(always)]
    pub fn release_each(&mut self, max: usize, mut read: impl FnMut(&mut T)) -> usize {
        let count = self.ready_slots(max).min(max);
        for part in self.shared.slot_slices(self.released, count) {
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

    /// Reads the ready slots in order, at most `max` and at most as many as `to` has free slots,
    /// and appends the results of `read` to `to`. Frees the slots together and returns their
    /// number.
    #[inline(always)]
    pub fn release_into<V>(
        &mut self,
        max: usize,
        to: &mut PushBatch<'_, V>,
        mut read: impl FnMut(&mut T) -> Option<V>,
    ) -> usize {
        let count = self.ready_slots(max).min(max).min(to.remaining());
        for part in self.shared.slot_slices(self.released, count) {
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

    /// Removes and returns the oldest value; leaves a default in its slot.
    #[inline]
    pub fn pop(&mut self) -> Option<T>
    where
        T: Default,
    {
        if self.ready_slots(1) == 0 {
            return None;
        }
        let value = self.slot(0, std::mem::take);
        self.release(1);
        Some(value)
    }

    /// True once the producer is dropped. Values published before may still be queued.
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
    fn full_ring_returns_the_value() {
        let (mut producer, mut consumer) = ring(2, || 0);
        assert_eq!(producer.push(1), Ok(()));
        assert_eq!(producer.push(2), Ok(()));
        assert_eq!(producer.push(3), Err(3));
        assert_eq!(consumer.pop(), Some(1));
        assert_eq!(producer.push(3), Ok(()));
        assert_eq!((consumer.pop(), consumer.pop(), consumer.pop()), (Some(2), Some(3), None));
    }

    #[test]
    fn batches_wrap_around_the_ring_in_order() {
        let (mut producer, mut consumer) = ring(4, || 0);
        let (mut from, mut to) = (Fifo::new(), Fifo::new());
        let (mut next, mut expected) = (0, 0);
        for round in 0..20 {
            for _ in 0..round % 7 {
                from.push_back(next);
                next += 1;
            }
            let mut batch = from.pop_batch();
            let (there, written) = (
                batch.len(),
                producer.publish_batch(&mut batch, |slot, value| {
                    *slot = value;
                    value % 5 != 3
                }),
            );
            let refused = there.min(4) > written;
            assert_eq!(batch.len(), there - written - usize::from(refused));
            drop(batch);
            // A slot whose value was refused is written again with the next value.
            let mut batch = to.push_batch(3, 0);
            let read =
                consumer.release_into(9, &mut batch, |slot| (*slot % 4 != 1).then_some(*slot));
            assert_eq!(read, written.min(3));
            drop(batch);
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
    fn each_side_sees_the_other_close() {
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
    fn panics_when_publishing_more_than_free() {
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
                    let batch = producer.free_slots(16).min((count - next) as usize);
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
                let batch = consumer.ready_slots(1);
                for ahead in 0..batch {
                    consumer.slot(ahead, |slot| assert_eq!(*slot, expected + ahead as u64));
                }
                consumer.release(batch);
                expected += batch as u64;
                std::thread::yield_now();
            }
        });
    }

    /// One step: push or pop, one by one or in a batch, how many, and after how many to stop.
    fn any_step() -> impl Strategy<Value = (bool, bool, usize, usize)> {
        (any::<bool>(), any::<bool>(), 0usize..20, 0usize..20)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Compares with a plain queue as the model.
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
                    let batch = producer.free_slots(wanted).min(wanted);
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
                    let batch = consumer.ready_slots(wanted).min(wanted);
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

/// Explores every interleaving of a small run:
/// `RUSTFLAGS="--cfg loom" cargo test -p tidegate-memory --release`.
#[cfg(all(test, loom))]
mod model {
    use super::*;

    #[test]
    fn delivers_each_value_once_in_order() {
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
    fn publishes_a_batch_atomically() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(4, || 0usize);
            let sender = loom::thread::spawn(move || {
                producer.slot(0, |slot| *slot = 1);
                producer.slot(1, |slot| *slot = 2);
                producer.publish(2);
            });
            let ready = consumer.ready_slots(2);
            assert!(ready == 0 || ready == 2);
            for ahead in 0..ready {
                assert_eq!(consumer.slot(ahead, |slot| *slot), ahead + 1);
            }
            consumer.release(ready);
            sender.join().unwrap();
        });
    }
}
