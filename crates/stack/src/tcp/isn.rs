//! Initial sequence numbers (RFC 6528, RFC 9293 section 3.4.1) and where the
//! clock of the time stamps begins (RFC 7323 section 5.4).

use super::prf::Secret;
use super::segment::Ends;
use super::seq::Seq;

/// ISN = M + F(ends, secret): M counts every four microseconds or so.
pub(crate) fn initial(secret: &Secret, now_ns: u64, ends: &Ends) -> Seq {
    let f = secret.of(&ends.to_bytes()) as u32;
    Seq(f.wrapping_add((now_ns >> 12) as u32))
}

/// What is added to the clock of time stamps: the same for every connection
/// between two addresses, so that later ones have later stamps.
pub(crate) fn timestamp_offset(secret: &Secret, ends: &Ends) -> u32 {
    let bytes = ends.to_bytes();
    (secret.of(&bytes[..32]) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn rfc6528_numbers_grow_for_the_same_ends_and_tell_nothing_about_others() {
        let secret = Secret::new(&mut Chance::new([7; 16]));
        let ends =
            |port: u16| Ends::new("192.0.2.1:80".parse().unwrap(), ([192, 0, 2, 2], port).into());
        let first = initial(&secret, 0, &ends(4000));
        let later = initial(&secret, 1_000_000_000, &ends(4000));
        assert_eq!(later.since(first), 1_000_000_000 >> 12);
        let apart = initial(&secret, 0, &ends(4001)).0.wrapping_sub(first.0);
        let again =
            initial(&secret, 0, &ends(4002)).0.wrapping_sub(initial(&secret, 0, &ends(4001)).0);
        assert!(apart > 1 << 16 && apart != again);
        assert_eq!(timestamp_offset(&secret, &ends(1)), timestamp_offset(&secret, &ends(2)));
    }
}
