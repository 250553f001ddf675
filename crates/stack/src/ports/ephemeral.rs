//! Selection of ephemeral ports (RFC 6056).

use std::ops::RangeInclusive;

use crate::random::SecretRng;

/// Range of ephemeral ports. RFC 6056 section 3.2 advises a range as large as possible; the ports
/// below are left to servers.
pub(crate) const EPHEMERAL_PORTS: RangeInclusive<u16> = 32_768..=65_535;

/// Selects a random port that `is_free` accepts: RFC 6056 section 3.3.1, algorithm 1. Checks each
/// port at most once.
pub(crate) fn choose(rng: &mut SecretRng, is_free: impl Fn(u16) -> bool) -> Option<u16> {
    let (first, last) = (u32::from(*EPHEMERAL_PORTS.start()), u32::from(*EPHEMERAL_PORTS.end()));
    let count = last - first + 1;
    let start = rng.below(count);
    (0..count).map(|step| (first + (start + step) % count) as u16).find(|&port| is_free(port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_only_free_ports() {
        let mut rng = SecretRng::new([5; 16]);
        assert_eq!(choose(&mut rng, |port| port == 40_000), Some(40_000));
        assert_eq!(choose(&mut rng, |port| port == 65_535), Some(65_535));
        assert_eq!(choose(&mut rng, |_| false), None);
    }

    #[test]
    fn spreads_choices_over_the_range() {
        let mut rng = SecretRng::new([6; 16]);
        let chosen: std::collections::HashSet<_> =
            (0..100).map(|_| choose(&mut rng, |_| true).unwrap()).collect();
        assert!(chosen.len() > 95, "{}", chosen.len());
        assert!(chosen.iter().all(|port| EPHEMERAL_PORTS.contains(port)));
    }
}
