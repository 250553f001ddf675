//! Memory for payload: chunks of one size from a common pool, strung together.
//!
//! A connection holds chunks only while it holds data, and a chunk has memory
//! only once something was written to it: a byte that comes far ahead of the
//! rest costs one chunk, not all those before it. The pool has a limit, so all
//! connections together hold no more than was set aside for them.

/// The payload that one chunk holds.
pub(crate) const CHUNK_BYTES: usize = 2048;

const NONE: u32 = u32::MAX;

/// Chunks without data that keep their memory, at least; beyond that, as many
/// as are in use, and for a while up to this part of all.
const SPARE_CHUNKS: usize = 64;
const SPARE_PART: usize = 16;

/// Chunks whose memory goes back at a time.
const TRIM_CHUNKS: usize = 256;

/// What one connection may hold for each direction when memory is scarce.
const MODEST_BYTES: usize = 16 * CHUNK_BYTES;

/// Chunks in strands, with and without memory, for each that may have memory:
/// hollow ones cost a few bytes.
const HOLLOW_FACTOR: usize = 8;

/// The memory of a chunk; `None` when nothing was written to it yet.
type Memory = Option<Box<[u8; CHUNK_BYTES]>>;

/// All chunks.
pub(crate) struct Chunks {
    /// The memory of each.
    memory: Vec<Memory>,
    /// The one behind each.
    next: Vec<u32>,
    /// Those in no strand, with memory and without.
    spare: Vec<u32>,
    hollow: Vec<u32>,
    /// How many in strands have memory.
    used: usize,
    limit: usize,
}

impl Chunks {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let limit = (limit_bytes / CHUNK_BYTES).clamp(1, NONE as usize / HOLLOW_FACTOR - 1);
        let (memory, next, spare, hollow) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { memory, next, spare, hollow, used: 0, limit }
    }

    /// How many hold something.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// How many more may hold something.
    pub(crate) fn left(&self) -> usize {
        self.limit - self.used
    }

    /// Whether so little is left that what can be had again (segments out of
    /// order) must do without.
    pub(crate) fn is_scarce(&self) -> bool {
        self.left() < self.limit / 4
    }

    /// Whether there is enough for those who found none before.
    pub(crate) fn has_reserve(&self) -> bool {
        self.left() > self.limit / 8
    }

    /// What a connection may hold in one direction now: the last quarter is
    /// for those who hold little, so that readers who do not read cannot stop
    /// the others.
    pub(crate) fn allowance_bytes(&self) -> usize {
        if self.is_scarce() { MODEST_BYTES } else { usize::MAX }
    }

    /// How many more chunks without memory there are.
    fn hollow_left(&self) -> usize {
        self.hollow.len() + self.spare.len() + self.limit * HOLLOW_FACTOR - self.memory.len()
    }

    fn is_filled(&self, chunk: u32) -> bool {
        self.memory.get(chunk as usize).is_some_and(Option::is_some)
    }

    /// A chunk of a strand and those behind it.
    fn following(&self, first: u32) -> impl Iterator<Item = u32> {
        let next = |&chunk: &u32| self.next.get(chunk as usize).copied();
        std::iter::successors(Some(first), next).take_while(|&chunk| chunk != NONE)
    }

    /// A chunk without memory.
    fn take(&mut self) -> Option<u32> {
        if let Some(chunk) = self.hollow.pop() {
            return Some(chunk);
        }
        if self.memory.len() >= self.limit * HOLLOW_FACTOR {
            let chunk = self.spare.pop()?;
            self.memory[chunk as usize] = None;
            return Some(chunk);
        }
        self.memory.push(None);
        self.next.push(NONE);
        Some((self.memory.len() - 1) as u32)
    }

    /// Makes sure that a chunk has memory. `false` when there is none.
    fn fill(&mut self, chunk: u32) -> bool {
        if self.is_filled(chunk) {
            return true;
        }
        if self.used >= self.limit {
            return false;
        }
        let spare = self.spare.pop().and_then(|spare| {
            self.hollow.push(spare);
            self.memory[spare as usize].take()
        });
        self.memory[chunk as usize] = Some(spare.unwrap_or_else(|| Box::new([0; CHUNK_BYTES])));
        self.used += 1;
        true
    }

    /// A chunk with memory.
    #[inline]
    fn take_filled(&mut self) -> Option<u32> {
        if self.used >= self.limit {
            return None;
        }
        if let Some(chunk) = self.spare.pop() {
            self.used += 1;
            return Some(chunk);
        }
        let chunk = self.take()?;
        self.fill(chunk);
        Some(chunk)
    }

    fn give(&mut self, chunk: u32) {
        self.next[chunk as usize] = NONE;
        if self.memory[chunk as usize].is_none() {
            return self.hollow.push(chunk);
        }
        self.used -= 1;
        self.spare.push(chunk);
        if self.spare.len() > SPARE_CHUNKS.max(self.limit / SPARE_PART) {
            // There is one spare more and one used less.
            self.give_back(2);
        }
    }

    /// Frees memory that was not needed of late, some of it at a time.
    pub(crate) fn trim(&mut self) {
        if self.is_slack() {
            self.give_back(TRIM_CHUNKS);
        }
    }

    /// Whether there is more spare memory than [`Chunks::trim`] leaves.
    #[inline]
    pub(crate) fn is_slack(&self) -> bool {
        self.spare.len() > SPARE_CHUNKS.max(self.used)
    }

    /// Frees memory that is spare, as far as it is more than is in use.
    #[cold]
    fn give_back(&mut self, most: usize) {
        for _ in 0..most {
            if self.is_slack()
                && let Some(chunk) = self.spare.pop()
            {
                self.memory[chunk as usize] = None;
                self.hollow.push(chunk);
            }
        }
    }

    /// Whether there is room for what other pools have let go of.
    pub(crate) fn has_room_for<'a>(&self, loose: impl Iterator<Item = &'a Loose>) -> bool {
        let (mut all, mut filled) = (0, 0);
        for loose in loose {
            all += loose.memory.len();
            filled += loose.memory.iter().flatten().count();
        }
        filled <= self.left() && all <= self.hollow_left()
    }

    /// Lets go of a chunk of a strand, with its memory.
    fn let_go(&mut self, chunk: u32) -> Memory {
        let memory = self.memory[chunk as usize].take();
        self.used -= usize::from(memory.is_some());
        self.next[chunk as usize] = NONE;
        self.hollow.push(chunk);
        memory
    }

    /// Takes memory over that another pool has let go of.
    fn take_over(&mut self, memory: Memory) -> Option<u32> {
        if memory.is_none() {
            return self.take();
        }
        // What is spare makes room for it.
        let chunk = self.spare.pop().or_else(|| self.take())?;
        self.memory[chunk as usize] = memory;
        self.used += 1;
        Some(chunk)
    }

    fn bytes(&self, chunk: u32) -> &[u8] {
        self.memory.get(chunk as usize).and_then(|memory| memory.as_deref()).map_or(&[], |m| &m[..])
    }

    fn bytes_mut(&mut self, chunk: u32) -> &mut [u8] {
        let memory = self.memory.get_mut(chunk as usize).and_then(|memory| memory.as_deref_mut());
        memory.map_or(&mut [], |m| &mut m[..])
    }
}

/// A strand on its way from one pool to another: its memory, and where in it
/// the first byte is. Nothing is copied.
pub(crate) struct Loose {
    memory: Vec<Memory>,
    start: u32,
}

/// A string of chunks: bytes in order, written anywhere, taken from the front.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strand {
    head: u32,
    tail: u32,
    count: u32,
    /// Where the first byte is in the first chunk.
    start: u32,
    /// The chunk that was used last, and which one it is: most of what comes
    /// next is there or right behind.
    cursor: u32,
    cursor_at: u32,
}

impl Strand {
    pub(crate) const EMPTY: Strand =
        Strand { head: NONE, tail: NONE, count: 0, start: 0, cursor: NONE, cursor_at: 0 };

    /// Bytes that there is room for without another chunk.
    fn room(&self) -> usize {
        self.count as usize * CHUNK_BYTES - self.start as usize
    }

    /// Makes room for the bytes from `at` to `end`, with memory. Takes no memory
    /// when the pool has not enough.
    #[must_use = "the pool may be empty"]
    pub(crate) fn grow(&mut self, chunks: &mut Chunks, at: usize, end: usize) -> bool {
        if at >= end {
            return true;
        }
        // Most of what comes finds the queue empty and fits in a chunk.
        if self.count == 0 && end <= CHUNK_BYTES {
            let Some(chunk) = chunks.take_filled() else { return false };
            *self = Self { head: chunk, tail: chunk, count: 1, ..Self::EMPTY };
            return true;
        }
        self.grow_by_more(chunks, at, end)
    }

    fn grow_by_more(&mut self, chunks: &mut Chunks, at: usize, end: usize) -> bool {
        let missing = end.saturating_sub(self.room()).div_ceil(CHUNK_BYTES);
        if missing > chunks.hollow_left() {
            return false;
        }
        for _ in 0..missing {
            let Some(chunk) = chunks.take() else { return false };
            if self.count == 0 {
                self.head = chunk;
            } else {
                chunks.next[self.tail as usize] = chunk;
            }
            self.tail = chunk;
            self.count += 1;
        }
        let (first, within) = self.locate(chunks, at);
        let pieces = (within + end - at).div_ceil(CHUNK_BYTES);
        if pieces == 1 {
            return chunks.fill(first);
        }
        let hollow = chunks.following(first).take(pieces).filter(|&chunk| !chunks.is_filled(chunk));
        if hollow.count() > chunks.left() {
            return false;
        }
        let mut chunk = first;
        for _ in 0..pieces {
            chunks.fill(chunk);
            chunk = chunks.next[chunk as usize];
        }
        true
    }

    /// How many bytes can be appended behind `end` now.
    pub(crate) fn appendable(&self, chunks: &Chunks, end: usize) -> usize {
        let begun = (self.start as usize + end) % CHUNK_BYTES;
        let rest = if begun > 0 { CHUNK_BYTES - begun } else { 0 };
        rest + chunks.left() * CHUNK_BYTES
    }

    /// How many bytes from `end` on lie together, once there is room for them.
    pub(crate) fn together(&self, end: usize) -> usize {
        CHUNK_BYTES - (self.start as usize + end) % CHUNK_BYTES
    }

    /// The chunk that holds byte `at`, and where in it. There must be room.
    fn locate(&mut self, chunks: &Chunks, at: usize) -> (u32, usize) {
        let place = self.start as usize + at;
        let wanted = (place / CHUNK_BYTES) as u32;
        let (mut chunk, mut index) = match () {
            () if wanted + 1 == self.count => (self.tail, wanted),
            () if self.cursor != NONE && self.cursor_at <= wanted => (self.cursor, self.cursor_at),
            () => (self.head, 0),
        };
        while index < wanted {
            chunk = chunks.next.get(chunk as usize).copied().unwrap_or(NONE);
            index += 1;
        }
        (self.cursor, self.cursor_at) = (chunk, index);
        (chunk, place % CHUNK_BYTES)
    }

    /// The bytes from `at` on, as many as lie together and no more than `limit`,
    /// where [`Strand::grow`] made room.
    pub(crate) fn place<'c>(
        &mut self,
        chunks: &'c mut Chunks,
        at: usize,
        limit: usize,
    ) -> &'c mut [u8] {
        let (chunk, within) = self.locate(chunks, at);
        let place = chunks.bytes_mut(chunk).get_mut(within..).unwrap_or(&mut []);
        let len = place.len().min(limit);
        &mut place[..len]
    }

    /// Writes `data` from byte `at` on, where [`Strand::grow`] made room.
    pub(crate) fn write(&mut self, chunks: &mut Chunks, mut at: usize, mut data: &[u8]) {
        debug_assert!(at + data.len() <= self.room(), "room was made");
        while !data.is_empty() {
            let place = self.place(chunks, at, data.len());
            let piece = place.len();
            if piece == 0 {
                debug_assert!(false, "memory was taken");
                return;
            }
            place.copy_from_slice(&data[..piece]);
            at += piece;
            data = &data[piece..];
        }
    }

    /// Reads from byte `at` on, as many as `buf` takes. They must be there.
    pub(crate) fn read(&mut self, chunks: &Chunks, mut at: usize, mut buf: &mut [u8]) {
        debug_assert!(at + buf.len() <= self.room(), "only what is there is read");
        while !buf.is_empty() {
            let (chunk, within) = self.locate(chunks, at);
            let place = chunks.bytes(chunk).get(within..).unwrap_or(&[]);
            let piece = place.len().min(buf.len());
            if piece == 0 {
                debug_assert!(false, "only what was written is read");
                return;
            }
            buf[..piece].copy_from_slice(&place[..piece]);
            at += piece;
            buf = &mut std::mem::take(&mut buf)[piece..];
        }
    }

    /// The first bytes that lie together, at most `limit`.
    pub(crate) fn front<'c>(&self, chunks: &'c Chunks, limit: usize) -> &'c [u8] {
        if self.count == 0 {
            return &[];
        }
        let bytes = chunks.bytes(self.head).get(self.start as usize..).unwrap_or(&[]);
        &bytes[..limit.min(bytes.len())]
    }

    /// Drops `n` bytes from the front. When nothing is left of interest, call
    /// [`Strand::clear`].
    pub(crate) fn consume(&mut self, chunks: &mut Chunks, n: usize) {
        let place = self.start as usize + n;
        let whole = ((place / CHUNK_BYTES) as u32).min(self.count);
        for _ in 0..whole {
            let next = chunks.next.get(self.head as usize).copied().unwrap_or(NONE);
            chunks.give(self.head);
            self.head = next;
        }
        self.count -= whole;
        self.start = (place % CHUNK_BYTES) as u32;
        if self.count == 0 {
            *self = Self::EMPTY;
        } else if self.cursor_at < whole {
            (self.cursor, self.cursor_at) = (self.head, 0);
        } else {
            self.cursor_at -= whole;
        }
    }

    /// Takes the memory out of the pool; the strand is empty then.
    pub(crate) fn loosen(&mut self, chunks: &mut Chunks) -> Loose {
        let strand = std::mem::replace(self, Self::EMPTY);
        let numbers: Vec<u32> = chunks.following(strand.head).take(strand.count as usize).collect();
        let memory = numbers.into_iter().map(|chunk| chunks.let_go(chunk)).collect();
        Loose { memory, start: strand.start }
    }

    /// The strand in another pool, which was asked whether it has room.
    pub(crate) fn join(chunks: &mut Chunks, loose: Loose) -> Self {
        let mut strand = Self::EMPTY;
        for memory in loose.memory {
            let Some(chunk) = chunks.take_over(memory) else {
                debug_assert!(false, "it was asked whether there is room");
                break;
            };
            if strand.count == 0 {
                (strand.head, strand.start) = (chunk, loose.start);
            } else {
                chunks.next[strand.tail as usize] = chunk;
            }
            strand.tail = chunk;
            strand.count += 1;
        }
        strand
    }

    /// Gives every chunk back.
    pub(crate) fn clear(&mut self, chunks: &mut Chunks) {
        match self.count {
            0 => {}
            1 => chunks.give(self.head),
            count => {
                self.start = 0;
                self.consume(chunks, count as usize * CHUNK_BYTES);
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
    fn the_pool_has_a_limit() {
        let mut chunks = Chunks::new(3 * CHUNK_BYTES);
        let (mut a, mut b) = (Strand::EMPTY, Strand::EMPTY);
        assert!(a.grow(&mut chunks, 0, 2 * CHUNK_BYTES));
        assert!(!b.grow(&mut chunks, 0, CHUNK_BYTES + 1));
        assert!(b.grow(&mut chunks, 0, CHUNK_BYTES));
        assert_eq!(chunks.left(), 0);
        a.clear(&mut chunks);
        b.clear(&mut chunks);
        assert_eq!((chunks.used(), chunks.left()), (0, 3));
    }

    #[test]
    fn memory_beyond_a_reserve_is_given_back() {
        let mut chunks = Chunks::new(4 * SPARE_CHUNKS * CHUNK_BYTES);
        let mut strand = Strand::EMPTY;
        assert!(strand.grow(&mut chunks, 0, 4 * SPARE_CHUNKS * CHUNK_BYTES));
        strand.clear(&mut chunks);
        assert_eq!(chunks.used(), 0);
        assert_eq!(chunks.memory.iter().flatten().count(), SPARE_CHUNKS);
        assert_eq!(chunks.spare.len(), SPARE_CHUNKS);
        assert!(strand.grow(&mut chunks, 0, 4 * SPARE_CHUNKS * CHUNK_BYTES));
        strand.clear(&mut chunks);
    }

    #[test]
    fn a_byte_far_ahead_costs_one_chunk() {
        let mut chunks = Chunks::new(2 * CHUNK_BYTES);
        let mut strand = Strand::EMPTY;
        let far = 10 * CHUNK_BYTES + 5;
        assert!(strand.grow(&mut chunks, far, far + 1));
        strand.write(&mut chunks, far, b"x");
        assert_eq!(chunks.used(), 1);
        assert!(strand.grow(&mut chunks, 0, 1) && !strand.grow(&mut chunks, 4000, 5000));
        let mut read = [0];
        strand.read(&chunks, far, &mut read);
        assert_eq!(&read, b"x");
        assert!(!strand.grow(&mut chunks, 0, 16 * CHUNK_BYTES + 1), "hollow ones have a limit too");
        strand.clear(&mut chunks);
        assert_eq!(chunks.used(), 0);
        assert_eq!(chunks.spare.len() + chunks.hollow.len(), chunks.memory.len());
    }

    #[test]
    fn a_strand_moves_to_another_pool_with_its_memory_and_its_holes() {
        let mut from = Chunks::new(8 * CHUNK_BYTES);
        let mut to = Chunks::new(4 * CHUNK_BYTES);
        let mut strand = Strand::EMPTY;
        assert!(strand.grow(&mut from, 0, CHUNK_BYTES + 1));
        strand.write(&mut from, 0, &[7; CHUNK_BYTES + 1]);
        let far = 5 * CHUNK_BYTES;
        assert!(strand.grow(&mut from, far, far + 1));
        strand.write(&mut from, far, b"x");
        strand.consume(&mut from, 9);
        let mut spare = Strand::EMPTY;
        assert!(spare.grow(&mut to, 0, 2 * CHUNK_BYTES));
        let loose = strand.loosen(&mut from);
        assert_eq!((from.used(), strand.count), (0, 0));
        assert_eq!(from.hollow.len() + from.spare.len(), from.memory.len());
        assert!(!to.has_room_for([&loose].into_iter()), "two of four are in use");
        spare.clear(&mut to);
        assert!(to.has_room_for([&loose].into_iter()));
        let mut strand = Strand::join(&mut to, loose);
        assert_eq!(to.used(), 3);
        assert!(to.memory.iter().flatten().count() <= 4, "no more memory than the limit");
        let mut read = [0; CHUNK_BYTES - 8];
        strand.read(&to, 0, &mut read);
        assert_eq!(read, [7; CHUNK_BYTES - 8]);
        strand.read(&to, far - 9, &mut read[..1]);
        assert_eq!(read[0], b'x');
        strand.clear(&mut to);
        assert_eq!(to.used(), 0);
        let nothing = strand.loosen(&mut to);
        assert_eq!(Strand::join(&mut from, nothing).count, 0);
    }

    proptest! {
        #[test]
        fn a_strand_is_a_queue_that_is_written_anywhere(
            steps in prop::collection::vec((0usize..9000, 0usize..6000, 0usize..9000), 1..40),
        ) {
            let mut chunks = Chunks::new(1 << 20);
            let mut strand = Strand::EMPTY;
            let mut model: Vec<u8> = Vec::new();
            for (step, (at, len, consumed)) in steps.into_iter().enumerate() {
                let data: Vec<u8> = (0..len).map(|n| (n * 7 + step) as u8).collect();
                let at = at.min(model.len());
                prop_assert!(strand.grow(&mut chunks, at, at + len));
                strand.write(&mut chunks, at, &data);
                if model.len() < at + len {
                    model.resize(at + len, 0);
                }
                model[at..at + len].copy_from_slice(&data);
                let half = model.len() / 2;
                let mut read = vec![0; model.len() - half];
                strand.read(&chunks, half, &mut read);
                prop_assert_eq!(&read, &model[half..]);
                let consumed = consumed.min(model.len());
                model.drain(..consumed);
                if model.is_empty() {
                    strand.clear(&mut chunks);
                } else {
                    strand.consume(&mut chunks, consumed);
                }
                let front = strand.front(&chunks, model.len().min(5000));
                prop_assert_eq!(front, &model[..front.len()]);
                prop_assert!(model.is_empty() || !front.is_empty());
            }
            strand.clear(&mut chunks);
            prop_assert_eq!(chunks.used(), 0);
        }
    }
}
