//! The table of names: a keyed hash over lower-cased names, open addressing.

use super::name::MAX_NAME_BYTES;
use super::random::Random;

/// Words of eight octets that hold the longest name.
const WORDS: usize = MAX_NAME_BYTES.div_ceil(8);

/// A name in lower case, padded with zeros to whole words, and its hash. A
/// name ends at its root, so no name is another one with padding.
pub(super) struct LowerName {
    words: [u64; WORDS],
    count: usize,
    hash: u32,
}

impl LowerName {
    /// The words that hold the name.
    #[inline]
    fn used(&self) -> &[u64] {
        &self.words[..self.count]
    }
}

/// The last octets of a name that do not fill a word: fewer than eight, not
/// none.
#[inline]
fn last_word(wire: &[u8], rest: &[u8]) -> u64 {
    match wire.last_chunk::<8>() {
        // One load, and the octets before the rest shifted out.
        Some(chunk) => u64::from_le_bytes(*chunk) >> (64 - 8 * rest.len()),
        None => rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

/// Lower-cases the ASCII letters among eight octets.
#[inline]
fn to_lower(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x80 * ONES;
    let low_bits = word & !HIGH;
    let from_a = low_bits + (0x80 - u64::from(b'A')) * ONES;
    let past_z = low_bits + (0x7f - u64::from(b'Z')) * ONES;
    let is_upper = (from_a ^ past_z) & !word & HIGH;
    word | is_upper >> 2
}

/// A secret hash function: a multilinear sum modulo 2^128 of which the top 32
/// bits count. For any two names chosen without knowing the keys, they are the
/// same with a chance of 2^-32 (Thorup, "High speed hashing for integers and
/// strings", 2015: keys of at least 64 + 32 - 1 bits).
pub(super) struct NameHash {
    keys: Box<[u128; WORDS]>,
    last: u128,
}

impl NameHash {
    /// The function that belongs to a seed.
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut next = || u128::from(random.next()) << 64 | u128::from(random.next());
        let mut keys = Box::new([0; WORDS]);
        keys.fill_with(&mut next);
        NameHash { keys, last: next() }
    }

    /// Lower-cases and hashes a name in wire format of at most 255 octets.
    #[inline]
    pub(super) fn lower(&self, wire: &[u8]) -> LowerName {
        let mut words = [0; WORDS];
        let mut sum = self.last;
        let (whole, rest) = wire.as_chunks::<8>();
        let mut count = whole.len().min(WORDS);
        for at in 0..count {
            words[at] = to_lower(u64::from_le_bytes(whole[at]));
            sum = sum.wrapping_add(self.keys[at].wrapping_mul(words[at].into()));
        }
        if !rest.is_empty()
            && let (Some(word), Some(key)) = (words.get_mut(count), self.keys.get(count))
        {
            *word = to_lower(last_word(wire, rest));
            sum = sum.wrapping_add(key.wrapping_mul((*word).into()));
            count += 1;
        }
        LowerName { words, count, hash: (sum >> 96) as u32 }
    }
}

/// Compares names word by word: they are too short for a call to be worth it.
#[inline]
fn is_same(one: &[u64], other: &[u64]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one == other)
}

/// One place of the hash table.
#[derive(Clone, Copy)]
struct Slot {
    hash: u32,
    /// The index of the node plus one; 0 is an empty slot.
    node: u32,
}

/// From names to the indices of nodes.
pub(super) struct NameTable {
    hash: NameHash,
    slots: Vec<Slot>,
    mask: usize,
    /// Where the name of each node begins in `words`; one more at the end.
    starts: Vec<u32>,
    /// The words of all names, in the order of their nodes.
    words: Vec<u64>,
}

impl NameTable {
    /// A table for `names` names. Nodes are numbered as they are added.
    pub(super) fn with_capacity(names: usize, seed: u64) -> Self {
        let slots = (names * 2).next_power_of_two().max(8);
        NameTable {
            hash: NameHash::new(seed),
            slots: vec![Slot { hash: 0, node: 0 }; slots],
            mask: slots - 1,
            starts: vec![0],
            words: Vec::with_capacity(names * 4),
        }
    }

    /// Adds a name that is not in the table yet and returns the index of its
    /// node. `None` when the table holds all that it was made for.
    pub(super) fn insert(&mut self, wire: &[u8]) -> Option<u32> {
        let name = self.hash.lower(wire);
        let node = u32::try_from(self.starts.len() - 1).ok()?;
        if node as usize >= self.slots.len() / 2 {
            return None;
        }
        self.words.extend_from_slice(name.used());
        self.starts.push(u32::try_from(self.words.len()).ok()?);
        let mut at = name.hash as usize & self.mask;
        while self.slots[at].node != 0 {
            at = (at + 1) & self.mask;
        }
        self.slots[at] = Slot { hash: name.hash, node: node + 1 };
        Some(node)
    }

    /// The node with this name in wire format, of at most 255 octets.
    #[inline]
    pub(super) fn find(&self, wire: &[u8]) -> Option<u32> {
        let name = self.hash.lower(wire);
        let mut at = name.hash as usize & self.mask;
        // At most half of the slots are taken, so there is always an end.
        loop {
            let slot = self.slots[at];
            let node = slot.node.checked_sub(1)?;
            if slot.hash == name.hash && is_same(self.words_of(node), name.used()) {
                return Some(node);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// How much memory the table takes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.starts.capacity() * size_of::<u32>()
            + self.words.capacity() * size_of::<u64>()
    }

    #[inline]
    fn words_of(&self, node: u32) -> &[u64] {
        let node = node as usize;
        &self.words[self.starts[node] as usize..self.starts[node + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::super::name::Name;
    use super::*;
    use proptest::prelude::*;

    fn wire(text: &str) -> Box<[u8]> {
        Name::from_text(text).unwrap().wire().into()
    }

    #[test]
    fn names_are_found_in_any_case_and_only_those() {
        let mut table = NameTable::with_capacity(300, 7);
        for number in 0..300 {
            assert_eq!(table.insert(&wire(&format!("host{number}.example"))), Some(number));
        }
        for number in 0..300 {
            let found = table.find(&wire(&format!("HoSt{number}.EXAMPLE")));
            assert_eq!(found, Some(number));
            let other = table.find(&wire(&format!("most{number}.example")));
            assert_eq!(other, None);
        }
    }

    #[test]
    fn other_seeds_are_other_functions() {
        let name = wire("www.example");
        let hashes: std::collections::HashSet<u32> =
            (0..100).map(|seed| NameHash::new(seed).lower(&name).hash).collect();
        assert!(hashes.len() > 95, "{}", hashes.len());
    }

    #[test]
    fn an_empty_table_finds_nothing() {
        assert_eq!(NameTable::with_capacity(0, 1).find(b"\0"), None);
    }

    proptest! {
        #[test]
        fn lower_case_is_that_of_ascii(bytes: [u8; 8]) {
            let lower = to_lower(u64::from_le_bytes(bytes)).to_le_bytes();
            prop_assert_eq!(lower.to_vec(), bytes.to_ascii_lowercase());
        }

        #[test]
        fn the_longest_and_shortest_names_fit(len in 1_usize..=255, byte: u8) {
            let bytes = vec![byte; len];
            let name = NameHash::new(1).lower(&bytes);
            let words: Vec<u8> = name.used().iter().flat_map(|word| word.to_le_bytes()).collect();
            prop_assert_eq!(&words[..len], &bytes.to_ascii_lowercase()[..]);
            prop_assert!(words[len..].iter().all(|&pad| pad == 0));
        }
    }
}
