//! Message format between router and filter.
//!
//! A message in either direction is a sequence of records. A request has the packet's identifier
//! (four bytes), the length of the following bytes (two bytes), and the start of the packet. A
//! verdict has the identifier and one byte. Numbers are in native byte order, since both sides
//! run on the same machine.

use super::Verdict;

/// Most packets that wait for a verdict (Mogul and Ramakrishnan, section 6.6.1).
pub const QUEUE_PACKETS: usize = 32;
/// Most bytes of a packet that the filter gets: an IPv6 header, two extension headers and the
/// ports.
pub(super) const SNAP_BYTES: usize = 96;
const REQUEST_HEADER_BYTES: usize = 6;
const VERDICT_BYTES: usize = 5;
/// Longest message of requests, in bytes.
pub(super) const MAX_REQUESTS_BYTES: usize = QUEUE_PACKETS * (REQUEST_HEADER_BYTES + SNAP_BYTES);
/// Longest message of verdicts, in bytes: a full queue and one more message.
pub(super) const MAX_VERDICTS_BYTES: usize = 2 * QUEUE_PACKETS * VERDICT_BYTES;

const PASS: u8 = 1;
const REFUSE: u8 = 0;

/// Appends a request for a verdict on `packet`.
pub(super) fn put_request(message: &mut Vec<u8>, id: u32, packet: &[u8]) {
    let snap = &packet[..packet.len().min(SNAP_BYTES)];
    message.extend_from_slice(&id.to_ne_bytes());
    message.extend_from_slice(&(snap.len() as u16).to_ne_bytes());
    message.extend_from_slice(snap);
}

/// Parses the requests of a message, up to the first truncated request.
pub(super) fn requests(mut message: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = message.split_first_chunk::<REQUEST_HEADER_BYTES>()?;
        let [a, b, c, d, low, high] = *head;
        let len = u16::from_ne_bytes([low, high]).into();
        let (snap, rest) = rest.split_at_checked(len)?;
        message = rest;
        Some((u32::from_ne_bytes([a, b, c, d]), snap))
    })
}

/// Appends a verdict.
pub(super) fn put_verdict(message: &mut Vec<u8>, id: u32, verdict: Verdict) {
    message.extend_from_slice(&id.to_ne_bytes());
    message.push(if verdict == Verdict::Pass { PASS } else { REFUSE });
}

/// Parses the verdicts of a message. Any value other than "pass" refuses.
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
        fn requests_round_trip(
            packets in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)), 0..8),
        ) {
            let mut message = Vec::new();
            packets.iter().for_each(|(number, packet)| put_request(&mut message, *number, packet));
            let read: Vec<_> = requests(&message).collect();
            prop_assert_eq!(read.len(), packets.len());
            for ((number, head), (wanted, packet)) in read.iter().zip(&packets) {
                prop_assert_eq!(number, wanted);
                prop_assert_eq!(*head, &packet[..packet.len().min(SNAP_BYTES)]);
            }
        }

        #[test]
        fn parses_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(requests(&bytes).count() <= bytes.len() / REQUEST_HEADER_BYTES);
            prop_assert_eq!(verdicts(&bytes).count(), bytes.len() / VERDICT_BYTES);
        }
    }

    #[test]
    fn verdicts_round_trip() {
        let mut message = Vec::new();
        put_verdict(&mut message, 7, Verdict::Pass);
        put_verdict(&mut message, u32::MAX, Verdict::Refuse);
        let read: Vec<_> = verdicts(&message).collect();
        assert_eq!(read, [(7, Verdict::Pass), (u32::MAX, Verdict::Refuse)]);
        message[4] = 2;
        assert_eq!(verdicts(&message).next(), Some((7, Verdict::Refuse)));
    }
}
