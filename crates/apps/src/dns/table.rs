//! Name table: keyed hash over lower-cased names, open addressing.

use super::name::MAX_NAME_BYTES;
use super::splitmix64::SplitMix64;

/// Number of eight-octet words that hold the longest name.
const MAX_NAME_WORDS: usize = MAX_NAME_BYTES.div_ceil(8);

/// Name in lower case, padded with zeros to whole words, with its hash. A name ends at its root
/// label, so padding cannot make two names equal.
pub(super) struct LowerName {
    words: [u64; MAX_NAME_WORDS],
    word_count: usize,
    hash: u32,
}

impl LowerName {
    /// Words that hold the name.
    #[inline]
    fn as_words(&self) -> &[u64] {
        &self.words[..self.word_count]
    }
}

/// Last one to seven octets of a name, which do not fill a word, as a zero-padded word.
#[inline]
fn partial_word(wire: &[u8], rest: &[u8]) -> u64 {
    match wire.last_chunk::<8>() {
        // One load; a shift drops the octets before `rest`.
        Some(chunk) => u64::from_le_bytes(*chunk) >> (64 - 8 * rest.len()),
        None => rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

/// Lower-cases the ASCII letters in eight octets.
#[inline]
fn to_lower(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH_BITS: u64 = 0x80 * ONES;
    let low_bits = word & !HIGH_BITS;
    let from_a = low_bits + (0x80 - u64::from(b'A')) * ONES;
    let past_z = low_bits + (0x7f - u64::from(b'Z')) * ONES;
    let is_upper = (from_a ^ past_z) & !word & HIGH_BITS;
    word | is_upper >> 2
}

/// Keyed hash function: a multilinear sum modulo 2^128, of which the top 32 bits are the hash.
/// Two names chosen without knowledge of the keys collide with probability 2^-32. Source:
/// Thorup, "High speed hashing for integers and strings", 2015; keys need at least 64 + 32 - 1
/// bits.
pub(super) struct NameHash {
    keys: Box<[u128; MAX_NAME_WORDS]>,
    addend: u128,
}

impl NameHash {
    /// Derives the keys from a seed.
    pub(super) fn new(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let mut next = || u128::from(random.next()) << 64 | u128::from(random.next());
        let mut keys = Box::new([0; MAX_NAME_WORDS]);
        keys.fill_with(&mut next);
        NameHash { keys, addend: next() }
    }

    /// Lower-cases and hashes a name in wire format of at most 255 octets.
    #[inline]
    pub(super) fn lower_and_hash(&self, wire: &[u8]) -> LowerName {
        let mut words = [0; MAX_NAME_WORDS];
        let mut sum = self.addend;
        let (whole, rest) = wire.as_chunks::<8>();
        let mut word_count = whole.len().min(MAX_NAME_WORDS);
        for at in 0..word_count {
            words[at] = to_lower(u64::from_le_bytes(whole[at]));
            sum = sum.wrapping_add(self.keys[at].wrapping_mul(words[at].into()));
        }
        if !rest.is_empty()
            && let (Some(word), Some(key)) = (words.get_mut(word_count), self.keys.get(word_count))
        {
            *word = to_lower(partial_word(wire, rest));
            sum = sum.wrapping_add(key.wrapping_mul((*word).into()));
            word_count += 1;
        }
        LowerName { words, word_count, hash: (sum >> 96) as u32 }
    }
}

/// Compares names word by word: names are too short to be worth a call.
#[inline]
fn eq_words(one: &[u64], other: &[u64]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one == other)
}

/// Slot of the hash table.
#[derive(Clone, Copy)]
struct Slot {
    hash: u32,
    /// Index of the node plus one; 0 marks an empty slot.
    node_plus_one: u32,
}

/// Hash table from names to node indices.
pub(super) struct NameTable {
    hash: NameHash,
    slots: Vec<Slot>,
    mask: usize,
    /// Start of each node's name in `words`, and one more entry at the end.
    word_starts: Vec<u32>,
    /// Words of all names, in the order of their nodes.
    words: Vec<u64>,
}

impl NameTable {
    /// Creates a table for `names` names. Nodes are numbered in the order of insertion.
    pub(super) fn with_capacity(names: usize, seed: u64) -> Self {
        let slots = (names * 2).next_power_of_two().max(8);
        NameTable {
            hash: NameHash::new(seed),
            slots: vec![Slot { hash: 0, node_plus_one: 0 }; slots],
            mask: slots - 1,
            word_starts: vec![0],
            words: Vec::with_capacity(names * 4),
        }
    }

    /// Inserts a name that is not in the table yet and returns the index of its node; `None` when
    /// the table is full.
    pub(super) fn insert(&mut self, wire: &[u8]) -> Option<u32> {
        let name = self.hash.lower_and_hash(wire);
        let node = u32::try_from(self.word_starts.len() - 1).ok()?;
        if node as usize >= self.slots.len() / 2 {
            return None;
        }
        self.words.extend_from_slice(name.as_words());
        self.word_starts.push(u32::try_from(self.words.len()).ok()?);
        let mut at = name.hash as usize & self.mask;
        while self.slots[at].node_plus_one != 0 {
            at = (at + 1) & self.mask;
        }
        self.slots[at] = Slot { hash: name.hash, node_plus_one: node + 1 };
        Some(node)
    }

    /// Returns the node of a name in wire format of at most 255 octets.
    #[inline]
    pub(super) fn find(&self, wire: &[u8]) -> Option<u32> {
        let name = self.hash.lower_and_hash(wire);
        let mut at = name.hash as usize & self.mask;
        // At most half of the slots are occupied, so the probe always ends.
        loop {
            let slot = self.slots[at];
            let node = slot.node_plus_one.checked_sub(1)?;
            if slot.hash == name.hash && eq_words(self.name_words(node), name.as_words()) {
                return Some(node);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Memory used by the table, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.word_starts.capacity() * size_of::<u32>()
            + self.words.capacity() * size_of::<u64>()
    }

    #[inline]
    fn name_words(&self, node: u32) -> &[u64] {
        let node = node as usize;
        &self.words[self.word_starts[node] as usize..self.word_starts[node + 1] as usize]
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
    fn finds_inserted_names_in_any_case() {
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
    fn different_seeds_give_different_hashes() {
        let name = wire("www.example");
        let hashes: std::collections::HashSet<u32> =
            (0..100).map(|seed| NameHash::new(seed).lower_and_hash(&name).hash).collect();
        assert!(hashes.len() > 95, "{}", hashes.len());
    }

    #[test]
    fn empty_table_finds_nothing() {
        assert_eq!(NameTable::with_capacity(0, 1).find(b"\0"), None);
    }

    proptest! {
        #[test]
        fn to_lower_matches_ascii_lowercase(bytes: [u8; 8]) {
            let lower = to_lower(u64::from_le_bytes(bytes)).to_le_bytes();
            prop_assert_eq!(lower.to_vec(), bytes.to_ascii_lowercase());
        }

        #[test]
        fn lowers_names_of_any_length(len in 1_usize..=255, byte: u8) {
            let bytes = vec![byte; len];
            let name = NameHash::new(1).lower_and_hash(&bytes);
            let words: Vec<u8> = name.as_words().iter().flat_map(|word| word.to_le_bytes()).collect();
            prop_assert_eq!(&words[..len], &bytes.to_ascii_lowercase()[..]);
            prop_assert!(words[len..].iter().all(|&pad| pad == 0));
        }
    }
}
