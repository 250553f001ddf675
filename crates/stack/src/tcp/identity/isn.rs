//! Initial sequence numbers (RFC 6528, RFC 9293 section 3.4.1) and initial time stamps
//! (RFC 7323 section 5.4).

use super::prf::Secret;
use crate::tcp::segment::FourTuple;
use crate::tcp::seq::Seq;

/// Initial sequence number: ISN = M + F(four-tuple, secret), where M counts units of 4.096 us.
pub(crate) fn initial(secret: &Secret, now_ns: u64, tuple: &FourTuple) -> Seq {
    let f = secret.hash(&tuple.to_bytes()) as u32;
    Seq(f.wrapping_add((now_ns >> 12) as u32))
}

/// Offset of the time stamp clock: equal for all connections between two addresses, so that
/// later connections have later time stamps.
pub(crate) fn timestamp_offset(secret: &Secret, tuple: &FourTuple) -> u32 {
    let bytes = tuple.to_bytes();
    (secret.hash(&bytes[..32]) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    #[test]
    fn rfc6528_isn_grows_per_tuple_and_reveals_no_other() {
        let secret = Secret::new(&mut SecretRng::new([7; 16]));
        let tuple = |port: u16| {
            FourTuple::new("192.0.2.1:80".parse().unwrap(), ([192, 0, 2, 2], port).into())
        };
        let first = initial(&secret, 0, &tuple(4000));
        let later = initial(&secret, 1_000_000_000, &tuple(4000));
        assert_eq!(later.since(first), 1_000_000_000 >> 12);
        let apart = initial(&secret, 0, &tuple(4001)).0.wrapping_sub(first.0);
        let again =
            initial(&secret, 0, &tuple(4002)).0.wrapping_sub(initial(&secret, 0, &tuple(4001)).0);
        assert!(apart > 1 << 16 && apart != again);
        assert_eq!(timestamp_offset(&secret, &tuple(1)), timestamp_offset(&secret, &tuple(2)));
    }
}
