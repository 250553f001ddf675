//! Choosing local ports (RFC 6056).

use std::ops::RangeInclusive;

use crate::chance::Chance;

/// The ports that are chosen from. RFC 6056 section 3.2 advises as many as
/// possible; those below are left to servers.
pub(crate) const EPHEMERAL: RangeInclusive<u16> = 32_768..=65_535;

/// A random port that `is_free` allows: RFC 6056 section 3.3.1, algorithm 1.
/// Looks at every port once at most.
pub(crate) fn choose(chance: &mut Chance, is_free: impl Fn(u16) -> bool) -> Option<u16> {
    let (first, last) = (u32::from(*EPHEMERAL.start()), u32::from(*EPHEMERAL.end()));
    let count = last - first + 1;
    let start = chance.below(count);
    (0..count).map(|step| (first + (start + step) % count) as u16).find(|&port| is_free(port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_free_port_is_found_and_none_besides() {
        let mut chance = Chance::new([5; 16]);
        assert_eq!(choose(&mut chance, |port| port == 40_000), Some(40_000));
        assert_eq!(choose(&mut chance, |port| port == 65_535), Some(65_535));
        assert_eq!(choose(&mut chance, |_| false), None);
    }

    #[test]
    fn choices_are_spread() {
        let mut chance = Chance::new([6; 16]);
        let chosen: std::collections::HashSet<_> =
            (0..100).map(|_| choose(&mut chance, |_| true).unwrap()).collect();
        assert!(chosen.len() > 95, "{}", chosen.len());
        assert!(chosen.iter().all(|port| EPHEMERAL.contains(port)));
    }
}
