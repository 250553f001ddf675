//! SYN cookies (RFC 4987 section 3.6): when the SYN queue is full, what must be
//! remembered about a SYN goes into the numbers of the answer, and comes back
//! with the acknowledgement.
//!
//! The number: a keyed hash of the ends, the peer's number and the time in
//! steps of about a minute, with three bits for the segment size. The time
//! stamp, if the peer has them: five bits for window scale and SACK.

use super::options::MAX_WINDOW_SHIFT;
use super::prf::Secret;
use super::segment::{Ends, Segment};
use super::seq::Seq;

/// One step of time: 2^36 ns, 69 seconds.
const STEP_BITS: u32 = 36;
/// The segment sizes that a cookie can name.
const SIZES: [u16; 8] = [216, 536, 966, 1220, 1400, 1440, 1460, 8940];
/// In the low bits of the time stamp.
const OPTION_BITS: u32 = 0x1f;
const SACK_BIT: u32 = 0x10;
/// A window scale that says: none was offered.
const NO_SCALE: u32 = 0xf;

/// What a cookie has kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) mss: u16,
    pub(crate) window_shift: Option<u8>,
    pub(crate) sack: bool,
}

fn mark(secret: &Secret, step: u64, ends: &Ends, peer: Seq, size: u32) -> u32 {
    let mut bytes = [0; 52];
    bytes[..36].copy_from_slice(&ends.to_bytes());
    bytes[36..40].copy_from_slice(&peer.0.to_be_bytes());
    bytes[40..44].copy_from_slice(&size.to_be_bytes());
    bytes[44..].copy_from_slice(&step.to_be_bytes());
    secret.of(&bytes) as u32 & !7
}

/// The number to begin with.
pub(crate) fn make(secret: &Secret, now_ns: u64, ends: &Ends, syn: &Segment<'_>) -> Seq {
    let mss = syn.options.mss.unwrap_or(SIZES[1]);
    let size = SIZES.iter().rposition(|&size| size <= mss).unwrap_or(0) as u32;
    Seq(mark(secret, now_ns >> STEP_BITS, ends, syn.seq, size) | size)
}

/// A time stamp not later than `now` whose low bits tell the options of a SYN.
pub(crate) fn timestamp(now: u32, syn: &Segment<'_>) -> u32 {
    let scale = syn.options.window_shift.map_or(NO_SCALE, u32::from);
    let bits = scale | if syn.options.sack_permitted { SACK_BIT } else { 0 };
    let stamp = now & !OPTION_BITS | bits;
    if Seq(now).is_before(Seq(stamp)) { stamp.wrapping_sub(OPTION_BITS + 1) } else { stamp }
}

/// What the cookie that an acknowledgement brings has kept; `None` when it is
/// none of ours or too old.
pub(crate) fn open(
    secret: &Secret,
    now_ns: u64,
    ends: &Ends,
    segment: &Segment<'_>,
) -> Option<Kept> {
    let cookie = (segment.ack - 1).0;
    let (size, peer) = (cookie & 7, segment.seq - 1);
    let step = now_ns >> STEP_BITS;
    let is_ours = [step, step.wrapping_sub(1)]
        .into_iter()
        .any(|step| mark(secret, step, ends, peer, size) == cookie & !7);
    if !is_ours {
        return None;
    }
    let mss = SIZES[size as usize];
    let Some((_, echo)) = segment.options.timestamps else {
        return Some(Kept { mss, window_shift: None, sack: false });
    };
    let scale = echo & NO_SCALE;
    let window_shift = (scale <= u32::from(MAX_WINDOW_SHIFT)).then_some(scale as u8);
    Some(Kept { mss, window_shift, sack: echo & SACK_BIT != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;
    use crate::tcp::options::Options;
    use tidegate_wire::tcp::TcpFlags;

    fn ends() -> Ends {
        Ends::new("192.0.2.1:80".parse().unwrap(), "192.0.2.2:4000".parse().unwrap())
    }

    fn segment(seq: u32, ack: u32, options: Options<'static>) -> Segment<'static> {
        Segment {
            seq: Seq(seq),
            ack: Seq(ack),
            flags: TcpFlags::ACK,
            window: 0,
            options,
            payload: &[],
            congestion_experienced: false,
        }
    }

    #[test]
    fn what_was_kept_comes_back_for_two_minutes_at_most() {
        let secret = Secret::new(&mut Chance::new([1; 16]));
        let offered = Options {
            mss: Some(1460),
            window_shift: Some(7),
            sack_permitted: true,
            timestamps: Some((5, 0)),
            ..Options::default()
        };
        let syn = segment(1000, 0, offered);
        let now_ns = 100 << STEP_BITS;
        let cookie = make(&secret, now_ns, &ends(), &syn);
        let stamp = timestamp(123_456, &syn);
        assert!(stamp <= 123_456 && stamp > 123_456 - 64);
        let back = Options { timestamps: Some((6, stamp)), ..Options::default() };
        let ack = segment(1001, cookie.0.wrapping_add(1), back);
        let kept = Kept { mss: 1460, window_shift: Some(7), sack: true };
        for (step, expected) in [(100, Some(kept)), (101, Some(kept)), (102, None)] {
            assert_eq!(open(&secret, step << STEP_BITS, &ends(), &ack), expected);
        }
        for other in [segment(1002, ack.ack.0, back), segment(1001, ack.ack.0 ^ 1, back)] {
            assert_eq!(open(&secret, now_ns, &ends(), &other), None);
        }
        let bare = segment(1001, ack.ack.0, Options::default());
        let kept = Kept { mss: 1460, window_shift: None, sack: false };
        assert_eq!(open(&secret, now_ns, &ends(), &bare), Some(kept));
    }

    #[test]
    fn the_size_is_the_next_that_a_cookie_can_name() {
        let secret = Secret::new(&mut Chance::new([1; 16]));
        for (offered, kept) in [(1, 216), (536, 536), (1459, 1440), (1460, 1460), (65_535, 8940)] {
            let options = Options { mss: Some(offered), ..Options::default() };
            let cookie = make(&secret, 0, &ends(), &segment(9, 0, options));
            let ack = segment(10, cookie.0.wrapping_add(1), Options::default());
            assert_eq!(open(&secret, 0, &ends(), &ack).unwrap().mss, kept);
        }
    }
}
