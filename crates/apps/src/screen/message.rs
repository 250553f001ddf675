//! What router and screen say to each other.
//!
//! A message of either side is a run of records. A request: the packet's
//! number, four bytes, the length of what follows, two bytes, and the packet's
//! beginning. A verdict: the number, and a byte. Numbers are in the byte order
//! of this machine, on which both sides are.

use super::Verdict;

/// The most bytes of a packet that the screen is shown: an IPv6 header, two
/// extension headers and the ports.
pub(super) const SNAP_BYTES: usize = 96;
const REQUEST_HEAD_BYTES: usize = 6;
const VERDICT_BYTES: usize = 5;
/// The longest message of requests.
pub(super) const REQUESTS_MAX_BYTES: usize =
    super::QUEUE_PACKETS * (REQUEST_HEAD_BYTES + SNAP_BYTES);
/// The longest message of verdicts: those that waited, and one message more.
pub(super) const VERDICTS_MAX_BYTES: usize = 2 * super::QUEUE_PACKETS * VERDICT_BYTES;

const PASS: u8 = 1;
const REFUSE: u8 = 0;

/// Appends a request about a packet.
pub(super) fn put_request(message: &mut Vec<u8>, number: u32, packet: &[u8]) {
    let shown = &packet[..packet.len().min(SNAP_BYTES)];
    message.extend_from_slice(&number.to_ne_bytes());
    message.extend_from_slice(&(shown.len() as u16).to_ne_bytes());
    message.extend_from_slice(shown);
}

/// The requests of a message, up to the first that is cut off.
pub(super) fn requests(mut message: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = message.split_first_chunk::<REQUEST_HEAD_BYTES>()?;
        let [a, b, c, d, low, high] = *head;
        let len = u16::from_ne_bytes([low, high]).into();
        let (shown, rest) = rest.split_at_checked(len)?;
        message = rest;
        Some((u32::from_ne_bytes([a, b, c, d]), shown))
    })
}

/// Appends a verdict.
pub(super) fn put_verdict(message: &mut Vec<u8>, number: u32, verdict: Verdict) {
    message.extend_from_slice(&number.to_ne_bytes());
    message.push(if verdict == Verdict::Pass { PASS } else { REFUSE });
}

/// The verdicts of a message. Whatever is not "pass" refuses.
pub(super) fn verdicts(message: &[u8]) -> impl Iterator<Item = (u32, Verdict)> {
    let (records, _) = message.as_chunks::<VERDICT_BYTES>();
    records.iter().map(|&[a, b, c, d, verdict]| {
        let verdict = if verdict == PASS { Verdict::Pass } else { Verdict::Refuse };
        (u32::from_ne_bytes([a, b, c, d]), verdict)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_are_read_as_written(
            packets in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)), 0..8),
        ) {
            let mut message = Vec::new();
            packets.iter().for_each(|(number, packet)| put_request(&mut message, *number, packet));
            let read: Vec<_> = requests(&message).collect();
            prop_assert_eq!(read.len(), packets.len());
            for ((number, shown), (wanted, packet)) in read.iter().zip(&packets) {
                prop_assert_eq!(number, wanted);
                prop_assert_eq!(*shown, &packet[..packet.len().min(SNAP_BYTES)]);
            }
        }

        #[test]
        fn any_bytes_are_read_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(requests(&bytes).count() <= bytes.len() / REQUEST_HEAD_BYTES);
            prop_assert_eq!(verdicts(&bytes).count(), bytes.len() / VERDICT_BYTES);
        }
    }

    #[test]
    fn verdicts_are_read_as_written() {
        let mut message = Vec::new();
        put_verdict(&mut message, 7, Verdict::Pass);
        put_verdict(&mut message, u32::MAX, Verdict::Refuse);
        let read: Vec<_> = verdicts(&message).collect();
        assert_eq!(read, [(7, Verdict::Pass), (u32::MAX, Verdict::Refuse)]);
        message[4] = 2;
        assert_eq!(verdicts(&message).next(), Some((7, Verdict::Refuse)));
    }
}
