//! The two schemes of Rivera's thesis: one list under one lock (section 4.1), and one list per
//! reader with a lock each, visited round robin by producers and readers (section 4.2).

use crate::list::List;
use crate::lock::{Lock, LockKind, LockStatistics};
use crate::structure::{CachePadded, Packet, QueueShape, Structure, StructureParts};

/// One list under one lock.
pub struct SingleList<T: Packet, K: LockKind> {
    list: K::Lock<List<T>>,
}

impl<T: Packet, K: LockKind> Structure for SingleList<T, K> {
    type Packet = T;
    type Producer = ();
    type Reader = ();
    const KEEPS_ORDER: bool = true;

    fn open(shape: &QueueShape) -> StructureParts<Self> {
        StructureParts {
            structure: Self { list: K::Lock::new(List::new()) },
            producers: vec![(); shape.producers],
            readers: vec![(); shape.readers],
        }
    }

    #[inline]
    fn enqueue(&self, (): &mut (), packet: T) -> Result<usize, T> {
        self.list.with(|list| list.push_back(packet));
        Ok(0)
    }

    #[inline]
    fn dequeue(&self, (): &mut ()) -> Option<T> {
        self.list.with(List::pop_front)
    }

    fn statistics(&self) -> Option<LockStatistics> {
        self.list.statistics()
    }
}

/// A list for each reader, visited round robin by producers and readers.
pub struct MultiList<T: Packet, K: LockKind> {
    lists: Box<[LockedList<T, K>]>,
}

/// One list under its own lock.
type LockedList<T, K> = CachePadded<<K as LockKind>::Lock<List<T>>>;

/// Index of the list that a producer or a reader visits next.
pub struct ListCursor(usize);

impl ListCursor {
    /// Returns the current index and advances to the next list.
    #[inline]
    fn advance(&mut self, lists: usize) -> usize {
        let index = self.0;
        self.0 = if index + 1 == lists { 0 } else { index + 1 };
        index
    }
}

impl<T: Packet, K: LockKind> Structure for MultiList<T, K> {
    type Packet = T;
    type Producer = ListCursor;
    type Reader = ListCursor;
    const KEEPS_ORDER: bool = false;

    fn open(shape: &QueueShape) -> StructureParts<Self> {
        let lists = (0..shape.readers).map(|_| CachePadded(K::Lock::new(List::new())));
        // Each user begins at another list, so that they do not walk in step.
        let cursors = |count| (0..count).map(|at| ListCursor(at % shape.readers)).collect();
        StructureParts {
            structure: Self { lists: lists.collect() },
            producers: cursors(shape.producers),
            readers: cursors(shape.readers),
        }
    }

    #[inline]
    fn enqueue(&self, cursor: &mut ListCursor, packet: T) -> Result<usize, T> {
        let at = cursor.advance(self.lists.len());
        self.lists[at].0.with(|list| list.push_back(packet));
        Ok(0)
    }

    #[inline]
    fn dequeue(&self, cursor: &mut ListCursor) -> Option<T> {
        for _ in 0..self.lists.len() {
            let at = cursor.advance(self.lists.len());
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
