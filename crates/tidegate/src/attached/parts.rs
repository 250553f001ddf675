//! Sockets that are one to the program and several to the daemon: one on each line,
//! which have their port together.

use std::collections::HashMap;

/// What comes to a socket comes to its parts; a part is known by its number.
#[derive(Default)]
pub(super) struct Parts {
    /// The parts of a socket, whose number is that of the first.
    all: HashMap<u64, Divided>,
    /// The socket that another part belongs to.
    whole: HashMap<u64, u64>,
}

struct Divided {
    numbers: Vec<u64>,
    /// Which of them is asked first.
    next: usize,
    /// Which of them gave something last.
    last: usize,
}

/// Which part gave something, if not the first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gave {
    First,
    Other,
}

impl Parts {
    /// A socket has these parts from now on. One alone needs none.
    pub(super) fn insert(&mut self, numbers: Vec<u64>) {
        let [first, others @ ..] = numbers.as_slice() else { return };
        if others.is_empty() {
            return;
        }
        self.whole.extend(others.iter().map(|&other| (other, *first)));
        self.all.insert(*first, Divided { numbers, next: 0, last: 0 });
    }

    /// The parts of a socket, which are it itself if it has no others.
    pub(super) fn of(&self, socket: u64) -> Vec<u64> {
        match self.all.get(&socket) {
            Some(divided) => divided.numbers.clone(),
            None => vec![socket],
        }
    }

    /// The part that is there in any case.
    #[inline]
    pub(super) fn first(&self, socket: u64) -> u64 {
        if self.all.is_empty() {
            return socket;
        }
        self.all.get(&socket).map_or(socket, |divided| divided.numbers[0])
    }

    /// The parts of a socket but for the first.
    #[inline]
    pub(super) fn others(&self, socket: u64) -> &[u64] {
        if self.all.is_empty() {
            return &[];
        }
        self.all.get(&socket).map_or(&[], |divided| &divided.numbers[1..])
    }

    /// The socket that a part belongs to.
    pub(super) fn whole(&self, part: u64) -> u64 {
        if self.all.is_empty() {
            return part;
        }
        self.whole.get(&part).copied().unwrap_or(part)
    }

    /// The socket is no more. Gives its parts, which are it itself if it has no others.
    pub(super) fn remove(&mut self, socket: u64) -> Vec<u64> {
        if self.all.is_empty() {
            return vec![socket];
        }
        let Some(divided) = self.all.remove(&socket) else { return vec![socket] };
        divided.numbers.iter().for_each(|part| _ = self.whole.remove(part));
        divided.numbers
    }

    /// The socket is from now on the part alone that gave something last. Gives that,
    /// and the others.
    pub(super) fn reduce(&mut self, socket: u64) -> (u64, Vec<u64>) {
        let Some(divided) = self.get_mut(socket) else { return (socket, Vec::new()) };
        let last = divided.numbers.swap_remove(divided.last);
        let others = std::mem::replace(&mut divided.numbers, vec![last]);
        (divided.next, divided.last) = (0, 0);
        others.iter().for_each(|other| _ = self.whole.remove(other));
        (last, others)
    }

    /// Asks the parts, one after the other, until one gives something; the next time
    /// the one after it is asked first, unless the same is to be given again.
    pub(super) fn ask<R>(
        &mut self,
        socket: u64,
        again: bool,
        mut ask: impl FnMut(u64, Gave) -> Option<R>,
    ) -> Option<R> {
        let Some(divided) = self.get_mut(socket) else { return ask(socket, Gave::First) };
        let count = divided.numbers.len();
        for turn in 0..count {
            let at = (divided.next + turn) % count;
            let gave = if at == 0 { Gave::First } else { Gave::Other };
            if let Some(given) = ask(divided.numbers[at], gave) {
                divided.last = at;
                divided.next = if again { at } else { (at + 1) % count };
                return Some(given);
            }
        }
        None
    }

    /// Offers something to the part that gave something last and then to the others,
    /// until one takes it.
    pub(super) fn offer<R>(
        &mut self,
        socket: u64,
        mut offer: impl FnMut(u64) -> Option<R>,
    ) -> Option<R> {
        let Some(divided) = self.get_mut(socket) else { return offer(socket) };
        let count = divided.numbers.len();
        (0..count).find_map(|turn| offer(divided.numbers[(divided.last + turn) % count]))
    }

    #[inline]
    fn get_mut(&mut self, socket: u64) -> Option<&mut Divided> {
        if self.all.is_empty() { None } else { self.all.get_mut(&socket) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_asked_in_turn_and_answered_where_they_asked() {
        let mut parts = Parts::default();
        parts.insert(vec![3, 4, 5]);
        let mut waiting = HashMap::from([(3, 2), (4, 2), (5, 0)]);
        let mut take = |part: u64, again: bool| {
            let count = waiting.get_mut(&part).filter(|count| **count > 0)?;
            *count -= u32::from(!again);
            Some(part)
        };
        let mut given = Vec::new();
        for again in [true, false, false, false, false, false] {
            given.push(parts.ask(3, again, |part, _| take(part, again)));
        }
        assert_eq!(given, [Some(3), Some(3), Some(4), Some(3), Some(4), None]);
        assert_eq!(parts.offer(3, Some), Some(4));
        assert_eq!(parts.offer(3, |part| (part != 4).then_some(part)), Some(5));
        assert_eq!((parts.whole(5), parts.whole(6)), (3, 6));
        assert_eq!((parts.of(3), parts.of(6)), (vec![3, 4, 5], vec![6]));
        assert_eq!(parts.reduce(3), (4, vec![3, 5]));
        assert_eq!((parts.first(3), parts.whole(4), parts.whole(5)), (4, 3, 5));
        assert_eq!(parts.ask(3, false, |part, _| Some(part)), Some(4));
        assert_eq!((parts.remove(3), parts.remove(3)), (vec![4], vec![3]));
        assert_eq!((parts.whole(4), parts.of(3), parts.first(3)), (4, vec![3], 3));
        assert_eq!(parts.ask(3, false, |part, _| Some(part)), Some(3));
    }

    #[test]
    fn one_part_is_no_division() {
        let mut parts = Parts::default();
        parts.insert(vec![3]);
        assert!(parts.all.is_empty() && parts.whole.is_empty());
    }
}
