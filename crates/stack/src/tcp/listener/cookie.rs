//! SYN cookies (RFC 4987 section 3.6). When the SYN queue is full, the state of a SYN is encoded
//! in the numbers of the SYN-ACK and comes back with the acknowledgement.
//!
//! Sequence number: a keyed hash of the four-tuple, the peer's initial sequence number and the
//! time in steps of 69 seconds, with three bits for the MSS. Time stamp, if the peer sends
//! them: five bits for window scale and SACK.

use crate::tcp::identity::Secret;
use crate::tcp::options::MAX_WINDOW_SHIFT;
use crate::tcp::segment::{FourTuple, Segment};
use crate::tcp::seq::Seq;

/// Time step of a cookie: 2^36 ns, 69 seconds.
const TIME_STEP_SHIFT: u32 = 36;
/// MSS values that a cookie can encode.
const MSS_TABLE: [u16; 8] = [216, 536, 966, 1220, 1400, 1440, 1460, 8940];
/// Bits of the time stamp that encode options.
const OPTION_MASK: u32 = 0x1f;
const SACK_BIT: u32 = 0x10;
/// Window scale that means: none was offered.
const NO_WINDOW_SCALE: u32 = 0xf;

/// Options of a SYN that a cookie encodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CookieOptions {
    pub(crate) mss: u16,
    pub(crate) window_shift: Option<u8>,
    pub(crate) sack: bool,
}

/// Keyed hash of a cookie, without the three bits of the MSS.
fn cookie_hash(
    secret: &Secret,
    step: u64,
    tuple: &FourTuple,
    peer_isn: Seq,
    mss_index: u32,
) -> u32 {
    let mut bytes = [0; 52];
    bytes[..36].copy_from_slice(&tuple.to_bytes());
    bytes[36..40].copy_from_slice(&peer_isn.0.to_be_bytes());
    bytes[40..44].copy_from_slice(&mss_index.to_be_bytes());
    bytes[44..].copy_from_slice(&step.to_be_bytes());
    secret.hash(&bytes) as u32 & !7
}

/// Returns the initial sequence number that encodes a SYN.
pub(crate) fn encode(secret: &Secret, now_ns: u64, tuple: &FourTuple, syn: &Segment<'_>) -> Seq {
    let mss = syn.options.mss.unwrap_or(MSS_TABLE[1]);
    let mss_index = MSS_TABLE.iter().rposition(|&size| size <= mss).unwrap_or(0) as u32;
    Seq(cookie_hash(secret, now_ns >> TIME_STEP_SHIFT, tuple, syn.seq, mss_index) | mss_index)
}

/// Returns a time stamp at or before `now` whose low bits encode the options of a SYN.
pub(crate) fn timestamp(now: u32, syn: &Segment<'_>) -> u32 {
    let scale = syn.options.window_shift.map_or(NO_WINDOW_SCALE, u32::from);
    let bits = scale | if syn.options.sack_permitted { SACK_BIT } else { 0 };
    let stamp = now & !OPTION_MASK | bits;
    if Seq(now).is_before(Seq(stamp)) { stamp.wrapping_sub(OPTION_MASK + 1) } else { stamp }
}

/// Decodes the cookie of an acknowledgement; `None` when the cookie is not ours or too old.
pub(crate) fn decode(
    secret: &Secret,
    now_ns: u64,
    tuple: &FourTuple,
    segment: &Segment<'_>,
) -> Option<CookieOptions> {
    let cookie = (segment.ack - 1).0;
    let (mss_index, peer_isn) = (cookie & 7, segment.seq - 1);
    let step = now_ns >> TIME_STEP_SHIFT;
    let is_ours = [step, step.wrapping_sub(1)]
        .into_iter()
        .any(|step| cookie_hash(secret, step, tuple, peer_isn, mss_index) == cookie & !7);
    if !is_ours {
        return None;
    }
    let mss = MSS_TABLE[mss_index as usize];
    let Some((_, echo)) = segment.options.timestamps else {
        return Some(CookieOptions { mss, window_shift: None, sack: false });
    };
    let scale = echo & NO_WINDOW_SCALE;
    let window_shift = (scale <= u32::from(MAX_WINDOW_SHIFT)).then_some(scale as u8);
    Some(CookieOptions { mss, window_shift, sack: echo & SACK_BIT != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;
    use crate::tcp::options::ParsedOptions;
    use tidegate_wire::tcp::TcpFlags;

    fn tuple() -> FourTuple {
        FourTuple::new("192.0.2.1:80".parse().unwrap(), "192.0.2.2:4000".parse().unwrap())
    }

    fn segment(seq: u32, ack: u32, options: ParsedOptions<'static>) -> Segment<'static> {
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
    fn cookie_returns_options_for_at_most_two_time_steps() {
        let secret = Secret::new(&mut SecretRng::new([1; 16]));
        let offered = ParsedOptions {
            mss: Some(1460),
            window_shift: Some(7),
            sack_permitted: true,
            timestamps: Some((5, 0)),
            ..ParsedOptions::default()
        };
        let syn = segment(1000, 0, offered);
        let now_ns = 100 << TIME_STEP_SHIFT;
        let cookie = encode(&secret, now_ns, &tuple(), &syn);
        let stamp = timestamp(123_456, &syn);
        assert!(stamp <= 123_456 && stamp > 123_456 - 64);
        let back = ParsedOptions { timestamps: Some((6, stamp)), ..ParsedOptions::default() };
        let ack = segment(1001, cookie.0.wrapping_add(1), back);
        let options = CookieOptions { mss: 1460, window_shift: Some(7), sack: true };
        for (step, expected) in [(100, Some(options)), (101, Some(options)), (102, None)] {
            assert_eq!(decode(&secret, step << TIME_STEP_SHIFT, &tuple(), &ack), expected);
        }
        for other in [segment(1002, ack.ack.0, back), segment(1001, ack.ack.0 ^ 1, back)] {
            assert_eq!(decode(&secret, now_ns, &tuple(), &other), None);
        }
        let bare = segment(1001, ack.ack.0, ParsedOptions::default());
        let options = CookieOptions { mss: 1460, window_shift: None, sack: false };
        assert_eq!(decode(&secret, now_ns, &tuple(), &bare), Some(options));
    }

    #[test]
    fn mss_is_rounded_down_to_a_table_entry() {
        let secret = Secret::new(&mut SecretRng::new([1; 16]));
        for (offered, encoded) in [(1, 216), (536, 536), (1459, 1440), (1460, 1460), (65_535, 8940)]
        {
            let options = ParsedOptions { mss: Some(offered), ..ParsedOptions::default() };
            let cookie = encode(&secret, 0, &tuple(), &segment(9, 0, options));
            let ack = segment(10, cookie.0.wrapping_add(1), ParsedOptions::default());
            assert_eq!(decode(&secret, 0, &tuple(), &ack).unwrap().mss, encoded);
        }
    }
}
