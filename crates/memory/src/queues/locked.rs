//! The two schemes of Rivera's thesis: one list under one lock (section 4.1),
//! and as many lists as readers, a lock each, gone through round robin on both
//! sides (section 4.2).

use super::list::List;
use super::lock::{Lock, LockKind, LockStatistics};
use super::structure::{Opened, Packet, Padded, Shape, Structure};

/// One list under one lock.
pub struct Single<T: Packet, K: LockKind> {
    list: K::Lock<List<T>>,
}

impl<T: Packet, K: LockKind> Structure for Single<T, K> {
    type Packet = T;
    type Producer = ();
    type Reader = ();
    const KEEPS_ORDER: bool = true;

    fn open(shape: &Shape) -> Opened<Self> {
        Opened {
            structure: Self { list: K::Lock::new(List::new()) },
            producers: vec![(); shape.producers],
            readers: vec![(); shape.readers],
        }
    }

    #[inline]
    fn put(&self, (): &mut (), packet: T) -> Result<usize, T> {
        self.list.with(|list| list.push_back(packet));
        Ok(0)
    }

    #[inline]
    fn take(&self, (): &mut ()) -> Option<T> {
        self.list.with(List::pop_front)
    }

    fn statistics(&self) -> Option<LockStatistics> {
        self.list.statistics()
    }
}

/// A list for each reader, round robin on both sides.
pub struct Multi<T: Packet, K: LockKind> {
    lists: Box<[Lane<T, K>]>,
}

/// One list under a lock of its own.
type Lane<T, K> = Padded<<K as LockKind>::Lock<List<T>>>;

/// The list where a producer or a reader goes on.
pub struct Place(usize);

impl Place {
    /// This place; the next one is the one after it.
    #[inline]
    fn advance(&mut self, lists: usize) -> usize {
        let place = self.0;
        self.0 = if place + 1 == lists { 0 } else { place + 1 };
        place
    }
}

impl<T: Packet, K: LockKind> Structure for Multi<T, K> {
    type Packet = T;
    type Producer = Place;
    type Reader = Place;
    const KEEPS_ORDER: bool = false;

    fn open(shape: &Shape) -> Opened<Self> {
        let lists = (0..shape.readers).map(|_| Padded(K::Lock::new(List::new())));
        // Each begins at another list, so that they do not walk in step.
        let places = |count| (0..count).map(|at| Place(at % shape.readers)).collect();
        Opened {
            structure: Self { lists: lists.collect() },
            producers: places(shape.producers),
            readers: places(shape.readers),
        }
    }

    #[inline]
    fn put(&self, place: &mut Place, packet: T) -> Result<usize, T> {
        let at = place.advance(self.lists.len());
        self.lists[at].0.with(|list| list.push_back(packet));
        Ok(0)
    }

    #[inline]
    fn take(&self, place: &mut Place) -> Option<T> {
        for _ in 0..self.lists.len() {
            let at = place.advance(self.lists.len());
            let packet = self.lists[at].0.with(List::pop_front);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }

    fn statistics(&self) -> Option<LockStatistics> {
        let each = self.lists.iter().map(|list| list.0.statistics());
        each.reduce(|sum, other| {
            let (mut sum, other) = (sum?, other?);
            sum.merge(&other);
            Some(sum)
        })?
    }
}
