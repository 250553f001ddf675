//! Payload memory: fixed-size buffers from a shared pool, linked into byte queues.
//!
//! A connection holds buffers only while it holds data. A buffer gets memory only when data is
//! written to it: a byte far ahead of the rest costs one buffer, not all before it. The pool is
//! bounded, so all connections together hold at most the configured memory.

/// Payload bytes of one buffer.
pub(crate) const BUFFER_BYTES: usize = 2048;

/// Null link: no buffer.
const NO_BUFFER: u32 = u32::MAX;

/// Bounds for spare buffers, which have memory but no data. [`BufferPool::trim`] leaves this
/// minimum, or as many as are in use. Until then up to `limit / MAX_SPARE_DIVISOR` are kept.
const MIN_SPARE_BUFFERS: usize = 64;
const MAX_SPARE_DIVISOR: usize = 16;

/// Buffers whose memory is freed at a time.
const TRIM_BUFFERS: usize = 256;

/// Limit for one connection in one direction while memory is scarce, in bytes.
const SCARCE_LIMIT_BYTES: usize = 16 * BUFFER_BYTES;

/// The same limit while only the reserve is left.
const RESERVE_LIMIT_BYTES: usize = 2 * BUFFER_BYTES;

/// Buffers that may exist for each that may have memory. An unbacked buffer (one without
/// memory) costs a few bytes.
const BUFFERS_PER_BACKED: usize = 8;

/// Memory of a buffer; `None` until data is written.
type Memory = Option<Box<[u8; BUFFER_BYTES]>>;

/// Pool of buffers, bounded by the number that have memory.
pub(crate) struct BufferPool {
    /// Memory of each buffer.
    memory: Vec<Memory>,
    /// Link from each buffer to the next in its queue.
    next: Vec<u32>,
    /// Buffers in no queue: with memory and without.
    spare: Vec<u32>,
    unbacked: Vec<u32>,
    /// Buffers in queues that have memory.
    used: usize,
    /// Most buffers with memory in queues.
    limit: usize,
}

impl BufferPool {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let limit =
            (limit_bytes / BUFFER_BYTES).clamp(1, NO_BUFFER as usize / BUFFERS_PER_BACKED - 1);
        let (memory, next, spare, unbacked) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { memory, next, spare, unbacked, used: 0, limit }
    }

    /// Buffers in queues that have memory.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Buffers that may still get memory.
    pub(crate) fn available(&self) -> usize {
        // Sockets that returned from another stack may exceed the limit.
        self.limit.saturating_sub(self.used)
    }

    /// True when less than a quarter is left. Data that the peer would send again (segments out of
    /// order) is then not stored.
    pub(crate) fn is_scarce(&self) -> bool {
        self.available() < self.limit / 4
    }

    /// True when more than an eighth is left: enough to wake writers that wait for memory. With
    /// less, only the reserve is left: memory for new connections.
    pub(crate) fn has_reserve(&self) -> bool {
        self.available() > self.limit / 8
    }

    /// Bytes that a connection may hold in one direction now. The last quarter of the pool is
    /// for connections that hold little, and the last eighth for connections that hold hardly
    /// anything. So neither peers nor applications that do not read can starve the others.
    pub(crate) fn allowance_bytes(&self) -> usize {
        match () {
            () if !self.is_scarce() => usize::MAX,
            () if self.has_reserve() => SCARCE_LIMIT_BYTES,
            () => RESERVE_LIMIT_BYTES,
        }
    }

    /// Size up to which the buffers of connections grow, in bytes: an eighth of the memory, and
    /// nothing while memory is scarce.
    pub(crate) fn max_queue_bytes(&self) -> usize {
        if self.is_scarce() { 0 } else { self.limit * BUFFER_BYTES / 8 }
    }

    /// Unbacked buffers that can still be allocated.
    fn unbacked_available(&self) -> usize {
        let new = (self.limit * BUFFERS_PER_BACKED).saturating_sub(self.memory.len());
        self.unbacked.len() + self.spare.len() + new
    }

    fn is_backed(&self, buffer: u32) -> bool {
        self.memory.get(buffer as usize).is_some_and(Option::is_some)
    }

    /// Iterates over the buffers of a queue from `first` on.
    fn chain_from(&self, first: u32) -> impl Iterator<Item = u32> {
        let next = |&buffer: &u32| self.next.get(buffer as usize).copied();
        std::iter::successors(Some(first), next).take_while(|&buffer| buffer != NO_BUFFER)
    }

    /// Allocates a buffer without memory.
    fn alloc_unbacked(&mut self) -> Option<u32> {
        if let Some(buffer) = self.unbacked.pop() {
            return Some(buffer);
        }
        if self.memory.len() >= self.limit * BUFFERS_PER_BACKED {
            let buffer = self.spare.pop()?;
            self.memory[buffer as usize] = None;
            return Some(buffer);
        }
        Some(self.new_buffer())
    }

    fn new_buffer(&mut self) -> u32 {
        self.memory.push(None);
        self.next.push(NO_BUFFER);
        (self.memory.len() - 1) as u32
    }

    /// Gives a buffer memory unless it has some. Returns false when the pool is exhausted.
    fn ensure_backed(&mut self, buffer: u32) -> bool {
        if self.is_backed(buffer) {
            return true;
        }
        if self.used >= self.limit {
            return false;
        }
        let spare = self.spare.pop().and_then(|spare| {
            self.unbacked.push(spare);
            self.memory[spare as usize].take()
        });
        self.memory[buffer as usize] = Some(spare.unwrap_or_else(|| Box::new([0; BUFFER_BYTES])));
        self.used += 1;
        true
    }

    /// Allocates a buffer with memory.
    #[inline(always)]
    fn alloc_backed(&mut self) -> Option<u32> {
        if self.used >= self.limit {
            return None;
        }
        if let Some(buffer) = self.spare.pop() {
            self.used += 1;
            return Some(buffer);
        }
        let buffer = self.alloc_unbacked()?;
        self.ensure_backed(buffer);
        Some(buffer)
    }

    /// Returns a buffer to the pool.
    fn free(&mut self, buffer: u32) {
        self.next[buffer as usize] = NO_BUFFER;
        if self.memory[buffer as usize].is_none() {
            return self.unbacked.push(buffer);
        }
        self.used -= 1;
        self.spare.push(buffer);
        if self.spare.len() > MIN_SPARE_BUFFERS.max(self.limit / MAX_SPARE_DIVISOR) {
            // One more is spare and one less is used: two may exceed the bound.
            self.free_spare(2);
        }
    }

    /// Frees spare memory, [`TRIM_BUFFERS`] buffers at a time.
    pub(crate) fn trim(&mut self) {
        if self.has_excess_spare() {
            self.free_spare(TRIM_BUFFERS);
        }
    }

    /// True when there is more spare memory than [`BufferPool::trim`] leaves.
    #[inline]
    pub(crate) fn has_excess_spare(&self) -> bool {
        self.spare.len() > MIN_SPARE_BUFFERS.max(self.used)
    }

    /// Frees spare memory beyond what is in use, at most `max` buffers.
    #[cold]
    fn free_spare(&mut self, max: usize) {
        for _ in 0..max {
            if self.has_excess_spare()
                && let Some(buffer) = self.spare.pop()
            {
                self.memory[buffer as usize] = None;
                self.unbacked.push(buffer);
            }
        }
    }

    /// True when the pool can take the detached buffers of other pools.
    pub(crate) fn has_space_for<'a>(
        &self,
        detached: impl Iterator<Item = &'a DetachedBuffer>,
    ) -> bool {
        let (mut all, mut backed) = (0, 0);
        for detached in detached {
            all += detached.memory.len();
            backed += detached.memory.iter().flatten().count();
        }
        backed <= self.available() && all <= self.unbacked_available()
    }

    /// Removes a buffer of a queue from the pool; returns its memory.
    fn detach_buffer(&mut self, buffer: u32) -> Memory {
        let memory = self.memory[buffer as usize].take();
        self.used -= usize::from(memory.is_some());
        self.next[buffer as usize] = NO_BUFFER;
        self.unbacked.push(buffer);
        memory
    }

    /// Adds memory detached from another pool, also beyond the limit. Returns its buffer.
    fn attach_buffer(&mut self, memory: Memory) -> u32 {
        // A spare buffer gives up its memory, so that the total stays within the limit.
        let spare = memory.is_some().then(|| self.spare.pop()).flatten();
        let buffer = spare.or_else(|| self.alloc_unbacked()).unwrap_or_else(|| self.new_buffer());
        self.used += usize::from(memory.is_some());
        self.memory[buffer as usize] = memory;
        buffer
    }

    fn bytes(&self, buffer: u32) -> &[u8] {
        self.memory
            .get(buffer as usize)
            .and_then(|memory| memory.as_deref())
            .map_or(&[], |m| &m[..])
    }

    fn bytes_mut(&mut self, buffer: u32) -> &mut [u8] {
        let memory = self.memory.get_mut(buffer as usize).and_then(|memory| memory.as_deref_mut());
        memory.map_or(&mut [], |m| &mut m[..])
    }
}

/// Buffers of a queue in transit between pools: their memory and the offset of the first byte.
/// Nothing is copied.
pub(crate) struct DetachedBuffer {
    memory: Vec<Memory>,
    start: u32,
}

/// Byte queue in a linked list of buffers: written at any offset, consumed from the front.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteQueue {
    head: u32,
    tail: u32,
    count: u32,
    /// Offset of the first byte in the first buffer.
    start: u32,
    /// Buffer that was accessed last, and its index in the queue: most accesses that follow are to
    /// this buffer or the next.
    cursor: u32,
    cursor_index: u32,
}

impl ByteQueue {
    pub(crate) const EMPTY: ByteQueue = ByteQueue {
        head: NO_BUFFER,
        tail: NO_BUFFER,
        count: 0,
        start: 0,
        cursor: NO_BUFFER,
        cursor_index: 0,
    };

    /// Bytes that fit without another buffer.
    fn capacity_bytes(&self) -> usize {
        self.count as usize * BUFFER_BYTES - self.start as usize
    }

    /// Reserves memory for the bytes from `at` to `end`. Returns false when the pool has not
    /// enough; then no memory is taken.
    #[must_use = "the pool may be empty"]
    #[inline(always)]
    pub(crate) fn reserve(&mut self, pool: &mut BufferPool, at: usize, end: usize) -> bool {
        if at >= end {
            return true;
        }
        // Common case: the queue is empty and the data fits in one buffer.
        if self.count == 0 && end <= BUFFER_BYTES {
            let Some(buffer) = pool.alloc_backed() else { return false };
            *self = Self { head: buffer, tail: buffer, count: 1, ..Self::EMPTY };
            return true;
        }
        self.reserve_slow(pool, at, end)
    }

    fn reserve_slow(&mut self, pool: &mut BufferPool, at: usize, end: usize) -> bool {
        let missing = end.saturating_sub(self.capacity_bytes()).div_ceil(BUFFER_BYTES);
        if missing > pool.unbacked_available() {
            return false;
        }
        for _ in 0..missing {
            let Some(buffer) = pool.alloc_unbacked() else { return false };
            if self.count == 0 {
                self.head = buffer;
            } else {
                pool.next[self.tail as usize] = buffer;
            }
            self.tail = buffer;
            self.count += 1;
        }
        let (first, within) = self.locate(pool, at);
        let pieces = (within + end - at).div_ceil(BUFFER_BYTES);
        if pieces == 1 {
            return pool.ensure_backed(first);
        }
        let unbacked =
            pool.chain_from(first).take(pieces).filter(|&buffer| !pool.is_backed(buffer));
        if unbacked.count() > pool.available() {
            return false;
        }
        let mut buffer = first;
        for _ in 0..pieces {
            pool.ensure_backed(buffer);
            buffer = pool.next[buffer as usize];
        }
        true
    }

    /// Bytes that can be appended at offset `end` now.
    pub(crate) fn appendable_bytes(&self, pool: &BufferPool, end: usize) -> usize {
        let begun = (self.start as usize + end) % BUFFER_BYTES;
        let rest = if begun > 0 { BUFFER_BYTES - begun } else { 0 };
        rest + pool.available() * BUFFER_BYTES
    }

    /// Contiguous bytes from offset `end` on, once memory is reserved.
    pub(crate) fn contiguous_bytes(&self, end: usize) -> usize {
        BUFFER_BYTES - (self.start as usize + end) % BUFFER_BYTES
    }

    /// Returns the buffer that holds byte `at`, and the offset in that buffer. The byte must be
    /// within the capacity.
    fn locate(&mut self, pool: &BufferPool, at: usize) -> (u32, usize) {
        let offset = self.start as usize + at;
        let target = (offset / BUFFER_BYTES) as u32;
        let (mut buffer, mut index) = match () {
            () if target + 1 == self.count => (self.tail, target),
            () if self.cursor != NO_BUFFER && self.cursor_index <= target => {
                (self.cursor, self.cursor_index)
            }
            () => (self.head, 0),
        };
        while index < target {
            buffer = pool.next.get(buffer as usize).copied().unwrap_or(NO_BUFFER);
            index += 1;
        }
        (self.cursor, self.cursor_index) = (buffer, index);
        (buffer, offset % BUFFER_BYTES)
    }

    /// Returns the contiguous bytes from `at` on, at most `limit`. [`ByteQueue::reserve`] must have
    /// covered them.
    pub(crate) fn slice_mut<'c>(
        &mut self,
        pool: &'c mut BufferPool,
        at: usize,
        limit: usize,
    ) -> &'c mut [u8] {
        let (buffer, within) = self.locate(pool, at);
        let slice = pool.bytes_mut(buffer).get_mut(within..).unwrap_or(&mut []);
        let len = slice.len().min(limit);
        &mut slice[..len]
    }

    /// Writes `data` from byte `at` on. [`ByteQueue::reserve`] must have covered it.
    #[inline(always)]
    pub(crate) fn write(&mut self, pool: &mut BufferPool, at: usize, data: &[u8]) {
        debug_assert!(at + data.len() <= self.capacity_bytes(), "space was reserved");
        let offset = self.start as usize + at;
        // Common case: a message in the only buffer.
        if self.count == 1
            && let Some(space) = pool.bytes_mut(self.head).get_mut(offset..offset + data.len())
        {
            return space.copy_from_slice(data);
        }
        self.write_pieces(pool, at, data);
    }

    fn write_pieces(&mut self, pool: &mut BufferPool, mut at: usize, mut data: &[u8]) {
        while !data.is_empty() {
            let slice = self.slice_mut(pool, at, data.len());
            let piece = slice.len();
            if piece == 0 {
                debug_assert!(false, "memory was reserved");
                return;
            }
            slice.copy_from_slice(&data[..piece]);
            at += piece;
            data = &data[piece..];
        }
    }

    /// Fills `buf` from byte `at` on. All of these bytes must have been written.
    #[inline(always)]
    pub(crate) fn read(&mut self, pool: &BufferPool, at: usize, buf: &mut [u8]) {
        debug_assert!(at + buf.len() <= self.capacity_bytes(), "reads stay within the queue");
        let offset = self.start as usize + at;
        // Common case: a message in the only buffer.
        if self.count == 1
            && let Some(bytes) = pool.bytes(self.head).get(offset..offset + buf.len())
        {
            return buf.copy_from_slice(bytes);
        }
        self.read_pieces(pool, at, buf);
    }

    fn read_pieces(&mut self, pool: &BufferPool, mut at: usize, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let (buffer, within) = self.locate(pool, at);
            let slice = pool.bytes(buffer).get(within..).unwrap_or(&[]);
            let piece = slice.len().min(buf.len());
            if piece == 0 {
                debug_assert!(false, "reads cover written bytes only");
                return;
            }
            buf[..piece].copy_from_slice(&slice[..piece]);
            at += piece;
            buf = &mut std::mem::take(&mut buf)[piece..];
        }
    }

    /// Copies `bytes` bytes from byte `at` on, for a snapshot.
    pub(crate) fn copy_bytes(&self, pool: &BufferPool, at: u32, bytes: u32) -> Vec<u8> {
        let mut copy = vec![0; bytes as usize];
        let mut queue = *self;
        queue.read(pool, at as usize, &mut copy);
        copy
    }

    /// Creates a queue that holds `data`; `None` when the pool has not enough memory.
    pub(crate) fn holding(pool: &mut BufferPool, data: &[u8]) -> Option<Self> {
        let mut queue = Self::EMPTY;
        queue.reserve(pool, 0, data.len()).then(|| {
            queue.write(pool, 0, data);
            queue
        })
    }

    /// Returns the first contiguous bytes, at most `limit`.
    pub(crate) fn front<'c>(&self, pool: &'c BufferPool, limit: usize) -> &'c [u8] {
        if self.count == 0 {
            return &[];
        }
        let bytes = pool.bytes(self.head).get(self.start as usize..).unwrap_or(&[]);
        &bytes[..limit.min(bytes.len())]
    }

    /// Removes `n` bytes from the front. Once no data is left, call [`ByteQueue::clear`].
    pub(crate) fn consume(&mut self, pool: &mut BufferPool, n: usize) {
        let offset = self.start as usize + n;
        let whole = ((offset / BUFFER_BYTES) as u32).min(self.count);
        for _ in 0..whole {
            let next = pool.next.get(self.head as usize).copied().unwrap_or(NO_BUFFER);
            pool.free(self.head);
            self.head = next;
        }
        self.count -= whole;
        self.start = (offset % BUFFER_BYTES) as u32;
        if self.count == 0 {
            *self = Self::EMPTY;
        } else if self.cursor_index < whole {
            (self.cursor, self.cursor_index) = (self.head, 0);
        } else {
            self.cursor_index -= whole;
        }
    }

    /// Moves the buffers out of the pool and leaves the queue empty.
    pub(crate) fn detach(&mut self, pool: &mut BufferPool) -> DetachedBuffer {
        let queue = std::mem::replace(self, Self::EMPTY);
        let buffers: Vec<u32> = pool.chain_from(queue.head).take(queue.count as usize).collect();
        let memory = buffers.into_iter().map(|buffer| pool.detach_buffer(buffer)).collect();
        DetachedBuffer { memory, start: queue.start }
    }

    /// Adds detached buffers to another pool. [`BufferPool::has_space_for`] must have agreed.
    pub(crate) fn attach(pool: &mut BufferPool, detached: DetachedBuffer) -> Self {
        let mut queue = Self::EMPTY;
        for memory in detached.memory {
            let buffer = pool.attach_buffer(memory);
            if queue.count == 0 {
                (queue.head, queue.start) = (buffer, detached.start);
            } else {
                pool.next[queue.tail as usize] = buffer;
            }
            queue.tail = buffer;
            queue.count += 1;
        }
        queue
    }

    /// Frees all buffers.
    #[inline(always)]
    pub(crate) fn clear(&mut self, pool: &mut BufferPool) {
        match self.count {
            0 => {}
            1 => pool.free(self.head),
            count => {
                self.start = 0;
                self.consume(pool, count as usize * BUFFER_BYTES);
            }
        }
        *self = Self::EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pool_enforces_its_limit() {
        let mut pool = BufferPool::new(3 * BUFFER_BYTES);
        let (mut a, mut b) = (ByteQueue::EMPTY, ByteQueue::EMPTY);
        assert!(a.reserve(&mut pool, 0, 2 * BUFFER_BYTES));
        assert!(!b.reserve(&mut pool, 0, BUFFER_BYTES + 1));
        assert!(b.reserve(&mut pool, 0, BUFFER_BYTES));
        assert_eq!(pool.available(), 0);
        a.clear(&mut pool);
        b.clear(&mut pool);
        assert_eq!((pool.used(), pool.available()), (0, 3));
    }

    #[test]
    fn frees_spare_memory_beyond_the_reserve() {
        let mut pool = BufferPool::new(4 * MIN_SPARE_BUFFERS * BUFFER_BYTES);
        let mut queue = ByteQueue::EMPTY;
        assert!(queue.reserve(&mut pool, 0, 4 * MIN_SPARE_BUFFERS * BUFFER_BYTES));
        queue.clear(&mut pool);
        assert_eq!(pool.used(), 0);
        assert_eq!(pool.memory.iter().flatten().count(), MIN_SPARE_BUFFERS);
        assert_eq!(pool.spare.len(), MIN_SPARE_BUFFERS);
        assert!(queue.reserve(&mut pool, 0, 4 * MIN_SPARE_BUFFERS * BUFFER_BYTES));
        queue.clear(&mut pool);
    }

    #[test]
    fn byte_far_ahead_costs_one_buffer() {
        let mut pool = BufferPool::new(2 * BUFFER_BYTES);
        let mut queue = ByteQueue::EMPTY;
        let far = 10 * BUFFER_BYTES + 5;
        assert!(queue.reserve(&mut pool, far, far + 1));
        queue.write(&mut pool, far, b"x");
        assert_eq!(pool.used(), 1);
        assert!(queue.reserve(&mut pool, 0, 1) && !queue.reserve(&mut pool, 4000, 5000));
        let mut read = [0];
        queue.read(&pool, far, &mut read);
        assert_eq!(&read, b"x");
        assert!(
            !queue.reserve(&mut pool, 0, 16 * BUFFER_BYTES + 1),
            "unbacked buffers are limited too"
        );
        queue.clear(&mut pool);
        assert_eq!(pool.used(), 0);
        assert_eq!(pool.spare.len() + pool.unbacked.len(), pool.memory.len());
    }

    #[test]
    fn queue_moves_to_another_pool_with_memory_and_holes() {
        let mut from = BufferPool::new(8 * BUFFER_BYTES);
        let mut to = BufferPool::new(4 * BUFFER_BYTES);
        let mut queue = ByteQueue::EMPTY;
        assert!(queue.reserve(&mut from, 0, BUFFER_BYTES + 1));
        queue.write(&mut from, 0, &[7; BUFFER_BYTES + 1]);
        let far = 5 * BUFFER_BYTES;
        assert!(queue.reserve(&mut from, far, far + 1));
        queue.write(&mut from, far, b"x");
        queue.consume(&mut from, 9);
        let mut spare = ByteQueue::EMPTY;
        assert!(spare.reserve(&mut to, 0, 2 * BUFFER_BYTES));
        let detached = queue.detach(&mut from);
        assert_eq!((from.used(), queue.count), (0, 0));
        assert_eq!(from.unbacked.len() + from.spare.len(), from.memory.len());
        assert!(!to.has_space_for([&detached].into_iter()), "two of four buffers are in use");
        spare.clear(&mut to);
        assert!(to.has_space_for([&detached].into_iter()));
        let mut queue = ByteQueue::attach(&mut to, detached);
        assert_eq!(to.used(), 3);
        assert!(to.memory.iter().flatten().count() <= 4, "no more memory than the limit");
        let mut read = [0; BUFFER_BYTES - 8];
        queue.read(&to, 0, &mut read);
        assert_eq!(read, [7; BUFFER_BYTES - 8]);
        queue.read(&to, far - 9, &mut read[..1]);
        assert_eq!(read[0], b'x');
        queue.clear(&mut to);
        assert_eq!(to.used(), 0);
        let nothing = queue.detach(&mut to);
        assert_eq!(ByteQueue::attach(&mut from, nothing).count, 0);
    }

    proptest! {
        #[test]
        fn byte_queue_accepts_writes_at_any_offset(
            steps in prop::collection::vec((0usize..9000, 0usize..6000, 0usize..9000), 1..40),
        ) {
            let mut pool = BufferPool::new(1 << 20);
            let mut queue = ByteQueue::EMPTY;
            let mut model: Vec<u8> = Vec::new();
            for (step, (at, len, consumed)) in steps.into_iter().enumerate() {
                let data: Vec<u8> = (0..len).map(|n| (n * 7 + step) as u8).collect();
                let at = at.min(model.len());
                prop_assert!(queue.reserve(&mut pool, at, at + len));
                queue.write(&mut pool, at, &data);
                if model.len() < at + len {
                    model.resize(at + len, 0);
                }
                model[at..at + len].copy_from_slice(&data);
                let half = model.len() / 2;
                let mut read = vec![0; model.len() - half];
                queue.read(&pool, half, &mut read);
                prop_assert_eq!(&read, &model[half..]);
                let consumed = consumed.min(model.len());
                model.drain(..consumed);
                if model.is_empty() {
                    queue.clear(&mut pool);
                } else {
                    queue.consume(&mut pool, consumed);
                }
                let front = queue.front(&pool, model.len().min(5000));
                prop_assert_eq!(front, &model[..front.len()]);
                prop_assert!(model.is_empty() || !front.is_empty());
            }
            queue.clear(&mut pool);
            prop_assert_eq!(pool.used(), 0);
        }
    }
}
