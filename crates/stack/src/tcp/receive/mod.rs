//! Receiving half of a connection: sequence numbers, receive buffer, the window that is offered,
//! what to acknowledge, and time stamps (RFC 9293 sections 3.3.1, 3.8.6.2 and 3.10.7.4, RFC 2018,
//! RFC 7323).

mod out_of_order;

pub(crate) use out_of_order::OutOfOrderQueue;

use tidegate_wire::DropReason;

use super::buffers::{BufferPool, ByteQueue, TcpShared};
use super::identity::{milliseconds, whole_seconds};
use super::segment::Segment;
use super::send::DEFAULT_MSS;
use super::seq::Seq;
use super::socket::MAX_BUFFER_GROWTH;
use super::timers::NS_PER_MS;
use crate::snapshot::SnapshotBytes;

/// Maximum number of blocks in a SACK option.
const MAX_SACK_BLOCKS: usize = 4;

/// Age in seconds from which TS.Recent is no longer valid (RFC 7323 section 5.5).
const MAX_TS_RECENT_AGE_S: u32 = 24 * 24 * 3600;

/// Receive variables of a connection.
pub(crate) struct ReceiveState {
    /// Next expected sequence number (RCV.NXT).
    pub(crate) nxt: Seq,
    /// Right edge of the window: the peer may send up to the number before.
    pub(crate) edge: Seq,
    /// Sequence number of the first byte of `queue`.
    pub(crate) read_seq: Seq,
    /// Data received and not read, with gaps while `out_of_order` is set.
    pub(crate) queue: ByteQueue,
    pub(crate) out_of_order: Option<Box<OutOfOrderQueue>>,
    /// Duplicate data to report by D-SACK (RFC 2883); empty when there is none.
    pub(crate) dsack_range: (Seq, Seq),
    /// Bytes read by the application since the window was last opened as far as the buffer allows.
    pub(crate) read_since_update: u32,
    pub(crate) last_ack_sent: Seq,
    /// TS.Recent, and the second it was updated (RFC 7323 section 4.3).
    pub(crate) ts_recent: u32,
    pub(crate) ts_recent_s: u32,
    /// Largest payload received in one segment.
    pub(crate) mss: u16,
    /// Duplicate acknowledgements owed to a peer without SACK.
    pub(crate) acks_owed: u8,
    /// Window scale of this side, and of the peer for its own windows (RFC 7323 section 2).
    pub(crate) window_shift: u8,
    pub(crate) peer_window_shift: u8,
    /// Number of times that the receive buffer was doubled.
    pub(crate) growth: u8,
    /// Number of the first byte that counts for the next growth, and the millisecond in which the
    /// application had read all before (wraps).
    measured_seq: Seq,
    measured_ms: u16,
}

/// Snapshot of a [`ReceiveState`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct ReceiveSnapshot<'a> {
    pub(crate) nxt: Seq,
    pub(crate) edge: Seq,
    pub(crate) read: Seq,
    /// In-order data not yet read.
    #[cfg_attr(feature = "serde", serde(borrow))]
    pub(crate) data: SnapshotBytes<'a>,
    /// Out-of-order data with its start; most recently updated last. An entry without data is the
    /// peer's FIN.
    #[cfg_attr(feature = "serde", serde(borrow))]
    pub(crate) out_of_order: Vec<(Seq, SnapshotBytes<'a>)>,
    dsack_range: (Seq, Seq),
    read_since_update: u32,
    growth: u8,
    rcv_mss: u16,
    acks_owed: u8,
    last_ack_sent: Seq,
    pub(crate) last_received_age_ns: u64,
    pub(crate) peer_window_shift: u8,
    ts_recent: u32,
    ts_recent_age_s: u32,
}

/// Effect of data in order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InOrder {
    /// The data closed a gap or moved one.
    pub(crate) moved_a_gap: bool,
    /// The FIN at RCV.NXT has arrived earlier and is to be processed now.
    pub(crate) reaches_fin: bool,
}

impl ReceiveState {
    /// Nothing is received yet.
    pub(crate) fn new(window_shift: u8) -> Self {
        Self {
            nxt: Seq(0),
            edge: Seq(0),
            read_seq: Seq(0),
            queue: ByteQueue::EMPTY,
            out_of_order: None,
            dsack_range: (Seq(0), Seq(0)),
            read_since_update: 0,
            last_ack_sent: Seq(0),
            ts_recent: 0,
            ts_recent_s: 0,
            mss: DEFAULT_MSS[0],
            acks_owed: 0,
            window_shift,
            peer_window_shift: 0,
            growth: 0,
            measured_seq: Seq(0),
            measured_ms: 0,
        }
    }

    /// Initializes the receive variables from the peer's initial sequence number.
    pub(crate) fn begin(&mut self, irs: Seq) {
        self.nxt = irs + 1;
        self.read_seq = self.nxt;
        self.edge = self.nxt;
        self.last_ack_sent = self.nxt;
        self.measured_seq = self.nxt;
    }

    /// Sequence numbers received in order since the last acknowledgement was sent.
    #[inline]
    pub(crate) fn received_since_ack(&self) -> u32 {
        self.nxt.since(self.last_ack_sent)
    }

    /// True once the application has read at least half a buffer of `buffer_bytes` since the last
    /// [`ReceiveState::grow_if_fast`].
    #[inline]
    pub(crate) fn is_growth_due(&self, buffer_bytes: u32) -> bool {
        self.read_seq.since(self.measured_seq) >= buffer_bytes / 2
    }

    /// Doubles the buffer if the application took at most a round trip to read half of it: then the
    /// window may limit the peer. `may_grow` is false where memory or the options forbid growth.
    pub(crate) fn grow_if_fast(&mut self, now_ns: u64, min_rtt_ns: u64, may_grow: bool) {
        let now_ms = milliseconds(now_ns) as u16;
        // At most this time, since both clock readings are rounded down.
        let took_ms = u64::from(now_ms.wrapping_sub(self.measured_ms)) + 1;
        (self.measured_seq, self.measured_ms) = (self.read_seq, now_ms);
        if may_grow && took_ms * NS_PER_MS <= min_rtt_ns && self.growth < MAX_BUFFER_GROWTH {
            self.growth += 1;
        }
    }

    /// Receive window in bytes (RCV.WND).
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.edge.since(self.nxt)
    }

    /// True when a segment is acceptable (RFC 9293 section 3.10.7.4, first: table 6).
    #[inline]
    pub(crate) fn is_acceptable(&self, segment: &Segment<'_>) -> bool {
        let edge = self.edge;
        let first_in = self.nxt.is_at_or_before(segment.seq) && segment.seq.is_before(edge);
        if segment.len() == 0 {
            // RFC 9293 allows the number right behind the window too when the window is closed.
            // Peers also use that number when the window is open and full, but not for resets.
            let at_edge = segment.seq == edge && !segment.is_rst();
            return first_in || segment.seq == self.nxt || at_edge;
        }
        let last = segment.end() - 1;
        let last_in = self.nxt.is_at_or_before(last) && last.is_before(edge);
        // Data at the edge of a closed window is not accepted, but its acknowledgement is
        // (section 3.10.7.4: "special allowance").
        first_in
            || last_in
            || segment.seq == self.nxt
            || segment.seq.is_before(self.nxt) && !segment.end().is_before(edge)
    }

    /// True when a time stamp is older than the newest of the peer: protection against wrapped
    /// sequence numbers (PAWS, RFC 7323 section 5.3, R1).
    #[inline]
    pub(crate) fn is_old_timestamp(&self, now_ns: u64, value: u32) -> bool {
        let is_old = Seq(value).is_before(Seq(self.ts_recent));
        is_old && whole_seconds(now_ns).wrapping_sub(self.ts_recent_s) < MAX_TS_RECENT_AGE_S
    }

    /// Sets TS.Recent.
    #[inline]
    pub(crate) fn set_ts_recent(&mut self, now_ns: u64, value: u32) {
        (self.ts_recent, self.ts_recent_s) = (value, whole_seconds(now_ns));
    }

    /// Updates TS.Recent from an acceptable segment (RFC 7323 section 4.3, (2)).
    #[inline]
    pub(crate) fn update_ts_recent(&mut self, now_ns: u64, segment: &Segment<'_>) {
        if let Some((value, _)) = segment.options.timestamps
            && segment.seq.is_at_or_before(self.last_ack_sent)
            && Seq(self.ts_recent).is_at_or_before(Seq(value))
        {
            self.set_ts_recent(now_ns, value);
        }
    }

    /// Right edge of the window that the free buffer space allows, with `unread` bytes in it.
    #[inline]
    fn desired_edge(&self, buffer_bytes: u32, unread: u32) -> Seq {
        self.nxt + buffer_bytes.saturating_sub(unread)
    }

    /// True if the application has read enough to make a window update worthwhile (RFC 9293
    /// section 3.8.6.2.2).
    #[inline]
    pub(crate) fn is_window_update_due(&self, buffer_bytes: u32, unread: u32) -> bool {
        let min_growth = self.min_growth_bytes(buffer_bytes, 2).max(1);
        if self.read_since_update < min_growth {
            return false;
        }
        let desired = self.desired_edge(buffer_bytes, unread);
        desired.since(self.edge) >= min_growth && desired.since(self.nxt) / 2 >= self.window()
    }

    /// Least worthwhile growth of the window: `segments` of the peer or half of the buffer.
    #[inline]
    fn min_growth_bytes(&self, buffer_bytes: u32, segments: u32) -> u32 {
        (buffer_bytes / 2).min(segments * u32::from(self.mss))
    }

    /// Window field of a segment to send; moves the right edge of the window accordingly.
    /// `scaled` is false for a SYN (RFC 7323 section 2.2).
    #[inline]
    pub(crate) fn window_field(&mut self, scaled: bool, buffer_bytes: u32, unread: u32) -> u16 {
        let shift = if scaled { self.window_shift } else { 0 };
        let desired = self.desired_edge(buffer_bytes, unread);
        let grown = desired.since(self.edge);
        // RFC 9293 section 3.8.6.2.2: no small window increases. A closed window opens by two
        // segments: the acknowledgement of a single one would be delayed each time.
        let segments = if self.window() == 0 { 2 } else { 1 };
        let mut edge = self.edge;
        if grown >= self.min_growth_bytes(buffer_bytes, segments) {
            edge = edge.max(desired);
            self.read_since_update = 0;
        }
        let field = u16::try_from(edge.since(self.nxt) >> shift).unwrap_or(u16::MAX);
        self.edge = self.edge.max(self.nxt + (u32::from(field) << shift));
        field
    }

    /// True if a duplicate range was received and not yet reported to the peer.
    #[inline]
    pub(crate) fn has_dsack_range(&self) -> bool {
        self.dsack_range.0 != self.dsack_range.1
    }

    /// Fills `blocks` with the blocks of a SACK option; returns their number. A duplicate range
    /// comes first (D-SACK, RFC 2883).
    pub(crate) fn fill_sack_blocks(&mut self, blocks: &mut [(Seq, Seq); MAX_SACK_BLOCKS]) -> usize {
        let mut count = 0;
        if self.has_dsack_range() {
            blocks[0] = std::mem::take(&mut self.dsack_range);
            count = 1;
        }
        let queue = self.out_of_order.as_ref();
        count + queue.map_or(0, |gaps| gaps.newest_blocks(&mut blocks[count..]))
    }

    /// End of the data that the peer may send: the right edge of the window, or a FIN that has
    /// arrived.
    #[inline]
    pub(crate) fn data_end(&self) -> Seq {
        let fin = self.out_of_order.as_ref().and_then(|queue| queue.fin());
        fin.map_or(self.edge, |fin| fin.min(self.edge))
    }

    /// Takes in data at RCV.NXT: stores it, and moves RCV.NXT behind it and behind what it joins.
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory for the data.
    #[inline(always)]
    pub(crate) fn take_in_order(
        &mut self,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<InOrder, DropReason> {
        let end = self.nxt + data.len() as u32;
        self.store(self.nxt, data, &mut shared.pool)?;
        self.nxt = end;
        let Some(mut queue) = self.out_of_order.take() else { return Ok(InOrder::default()) };
        let (nxt, fin) = (queue.advance(end), queue.fin());
        let reaches_fin = fin.is_some_and(|fin| fin.is_before(nxt));
        self.nxt = fin.filter(|_| reaches_fin).unwrap_or(nxt);
        if queue.is_empty() {
            shared.recycle_out_of_order(queue);
        } else {
            self.out_of_order = Some(queue);
        }
        Ok(InOrder { moved_a_gap: true, reaches_fin })
    }

    /// True if all of `start..end` lies beyond a gap and was received already.
    pub(crate) fn has_beyond_gap(&self, start: Seq, end: Seq) -> bool {
        self.out_of_order.as_ref().is_some_and(|gaps| gaps.contains(start, end))
    }

    /// First part of `start..end` that lies beyond a gap and was received already.
    #[inline]
    pub(crate) fn first_duplicate(&self, start: Seq, end: Seq) -> Option<(Seq, Seq)> {
        self.out_of_order.as_ref()?.first_duplicate(start, end)
    }

    /// Moves the range that holds `start` to the front of the SACK blocks.
    pub(crate) fn note_recent(&mut self, start: Seq) {
        if let Some(queue) = &mut self.out_of_order {
            queue.note_recent(start);
        }
    }

    /// Takes in data beyond a gap.
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory, or there are too many gaps.
    pub(crate) fn take_out_of_order(
        &mut self,
        start: Seq,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        let end = start + data.len() as u32;
        let has_space = self.out_of_order.as_ref().is_none_or(|gaps| gaps.has_space(start, end));
        if !has_space || shared.pool.is_scarce() {
            return Err(DropReason::TcpMemory);
        }
        self.store(start, data, &mut shared.pool)?;
        let mut queue = self.out_of_order.take().unwrap_or_else(|| shared.acquire_out_of_order());
        queue.insert(start, end);
        self.out_of_order = Some(queue);
        Ok(())
    }

    /// Notes a FIN beyond a gap, with the number `seq`, unless memory is scarce: the peer sends the
    /// FIN again.
    pub(crate) fn take_fin_out_of_order(&mut self, seq: Seq, shared: &mut TcpShared) {
        if !shared.pool.is_scarce() {
            let queue = self.out_of_order.get_or_insert_with(|| shared.acquire_out_of_order());
            queue.insert_fin(seq);
        }
    }

    /// Takes in saved out-of-order data, or a FIN if there is no data, if there is space; otherwise
    /// drops it. The peer still has the data (RFC 2018 section 8).
    pub(crate) fn restore_out_of_order(&mut self, start: Seq, data: &[u8], shared: &mut TcpShared) {
        let end = start + data.len() as u32;
        let fits = start.is_after(self.nxt) && end.is_at_or_before(self.data_end());
        if fits && data.is_empty() {
            self.take_fin_out_of_order(start, shared);
        } else if fits {
            let _ = self.take_out_of_order(start, data, shared);
        }
    }

    /// Copies data into the receive buffer at its sequence number.
    #[inline(always)]
    fn store(&mut self, start: Seq, data: &[u8], pool: &mut BufferPool) -> Result<(), DropReason> {
        let at = start.since(self.read_seq) as usize;
        let end = at + data.len();
        let is_allowed = at < pool.allowance_bytes();
        if !is_allowed || !self.queue.reserve(pool, at, end) {
            return Err(DropReason::TcpMemory);
        }
        self.queue.write(pool, at, data);
        Ok(())
    }

    /// Returns the out-of-order queue for reuse.
    pub(crate) fn release_out_of_order(&mut self, shared: &mut TcpShared) {
        if let Some(queue) = self.out_of_order.take() {
            shared.recycle_out_of_order(queue);
        }
    }

    /// Forgets what an acknowledgement that was just sent has settled.
    #[inline]
    pub(crate) fn on_ack_sent(&mut self) {
        self.acks_owed = self.acks_owed.saturating_sub(1);
        self.last_ack_sent = self.nxt;
    }

    /// Takes a snapshot. The last segment was received `last_received_age_ns` ago; `unread` is the
    /// number of bytes in order that were not read.
    pub(crate) fn save(
        &self,
        now_ns: u64,
        last_received_age_ns: u64,
        unread: u32,
        pool: &BufferPool,
    ) -> ReceiveSnapshot<'static> {
        let copy_range = |(start, end): (Seq, Seq)| {
            let at = start.since(self.read_seq);
            (start, self.queue.copy_bytes(pool, at, end.since(start)).into())
        };
        let gaps = self.out_of_order.iter();
        let fin = self.out_of_order.as_ref().and_then(|gaps| gaps.fin());
        // The number of the FIN has no byte in the queue.
        let without_fin = |(start, end): (Seq, Seq)| (start, fin.map_or(end, |fin| fin.min(end)));
        let ranges = gaps.flat_map(|gaps| gaps.ranges_by_recency()).map(without_fin);
        let data = ranges.filter(|(start, end)| start.is_before(*end)).map(copy_range);
        ReceiveSnapshot {
            nxt: self.nxt,
            edge: self.edge,
            read: self.read_seq,
            data: self.queue.copy_bytes(pool, 0, unread).into(),
            out_of_order: data.chain(fin.map(|fin| (fin, Vec::new().into()))).collect(),
            dsack_range: self.dsack_range,
            read_since_update: self.read_since_update,
            growth: self.growth,
            rcv_mss: self.mss,
            acks_owed: self.acks_owed,
            last_ack_sent: self.last_ack_sent,
            last_received_age_ns,
            peer_window_shift: self.peer_window_shift,
            ts_recent: self.ts_recent,
            ts_recent_age_s: whole_seconds(now_ns).wrapping_sub(self.ts_recent_s),
        }
    }

    /// Restores a snapshot except for its out-of-order data, with `queue` for the data in order.
    pub(crate) fn restore(
        now_ns: u64,
        saved: &ReceiveSnapshot<'_>,
        queue: ByteQueue,
        window_shift: u8,
    ) -> Self {
        Self {
            nxt: saved.nxt,
            edge: saved.edge,
            read_seq: saved.read,
            queue,
            out_of_order: None,
            dsack_range: saved.dsack_range,
            read_since_update: saved.read_since_update,
            last_ack_sent: saved.last_ack_sent,
            ts_recent: saved.ts_recent,
            ts_recent_s: whole_seconds(now_ns).wrapping_sub(saved.ts_recent_age_s),
            mss: saved.rcv_mss,
            acks_owed: saved.acks_owed,
            window_shift,
            peer_window_shift: saved.peer_window_shift,
            growth: saved.growth.min(MAX_BUFFER_GROWTH),
            measured_seq: saved.read,
            measured_ms: milliseconds(now_ns) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::options::ParsedOptions;
    use tidegate_wire::tcp::TcpFlags;

    /// Next number 1000, window up to 2000.
    fn state() -> ReceiveState {
        let mut receive = ReceiveState::new(0);
        receive.begin(Seq(999));
        receive.edge = Seq(2000);
        receive
    }

    fn segment(seq: u32, payload: &[u8]) -> Segment<'_> {
        Segment {
            seq: Seq(seq),
            ack: Seq(0),
            flags: TcpFlags::ACK,
            window: 0,
            options: ParsedOptions::default(),
            payload,
            congestion_experienced: false,
        }
    }

    #[test]
    fn rfc9293_table_6_acceptable_segments() {
        let receive = state();
        let data = [0; 100];
        for (seq, payload, is_acceptable) in [
            (1000, &data[..], true),
            (1999, &data[..], true),
            (2000, &data[..], false),
            (901, &data[..], true),
            (900, &data[..], false),
            (2000, &data[..0], true),
            (2001, &data[..0], false),
            (999, &data[..0], false),
        ] {
            assert_eq!(receive.is_acceptable(&segment(seq, payload)), is_acceptable, "{seq}");
        }
    }

    #[test]
    fn a_closed_window_still_takes_acknowledgements() {
        let mut receive = state();
        receive.edge = receive.nxt;
        assert!(receive.is_acceptable(&segment(1000, &[])));
        assert!(receive.is_acceptable(&segment(1000, &[1])));
        assert!(!receive.is_acceptable(&segment(1001, &[1])));
    }

    #[test]
    fn data_beyond_a_gap_is_in_order_once_the_gap_is_filled() {
        let mut shared = TcpShared::new(1 << 20, 0, 1460);
        let mut receive = state();
        receive.take_out_of_order(Seq(1200), &[2; 100], &mut shared).unwrap();
        assert!(receive.has_beyond_gap(Seq(1210), Seq(1300)));
        assert!(receive.take_in_order(&[1; 200], &mut shared).unwrap().moved_a_gap);
        assert_eq!((receive.nxt, receive.out_of_order.is_none()), (Seq(1300), true));
        let bytes = receive.queue.copy_bytes(&shared.pool, 0, 300);
        assert!(bytes[..200] == [1; 200] && bytes[200..] == [2; 100]);
        assert!(!receive.take_in_order(&[3; 10], &mut shared).unwrap().moved_a_gap);
    }

    #[test]
    fn a_fin_beyond_a_gap_ends_the_data() {
        let mut shared = TcpShared::new(1 << 20, 0, 1460);
        let mut receive = state();
        receive.take_fin_out_of_order(Seq(1300), &mut shared);
        receive.take_fin_out_of_order(Seq(1400), &mut shared);
        assert_eq!(receive.data_end(), Seq(1300), "the first FIN holds");
        receive.take_out_of_order(Seq(1200), &[2; 100], &mut shared).unwrap();
        let saved = receive.save(0, 0, 0, &shared.pool);
        let gaps = saved.out_of_order.iter().map(|(start, data)| (*start, data.to_vec()));
        assert!(gaps.eq([(Seq(1200), vec![2; 100]), (Seq(1300), vec![])]));
        let taken = receive.take_in_order(&[1; 200], &mut shared).unwrap();
        assert!(taken.moved_a_gap && taken.reaches_fin);
        assert_eq!((receive.nxt, receive.out_of_order.is_none()), (Seq(1300), true));

        receive.take_out_of_order(Seq(1400), &[2; 100], &mut shared).unwrap();
        receive.take_fin_out_of_order(Seq(1450), &mut shared);
        assert_eq!(receive.data_end(), receive.edge, "data has arrived beyond that FIN");
    }

    #[test]
    fn rfc9293_3_8_6_2_2_the_window_grows_by_no_small_steps_and_never_shrinks() {
        let mut receive = state();
        receive.mss = 500;
        assert_eq!(receive.window_field(true, 1400, 0), 1000, "grown by less than a segment");
        assert_eq!(receive.window_field(true, 1500, 0), 1500);
        assert_eq!(receive.window_field(true, 1500, 1400), 1500, "offered before");
        assert!(!receive.is_window_update_due(4000, 0), "nothing was read");
        receive.read_since_update = 4000;
        assert!(receive.is_window_update_due(4000, 0));
    }

    #[test]
    fn rfc7323_5_3_a_time_stamp_older_than_the_newest_is_old_for_24_days() {
        let mut receive = state();
        receive.set_ts_recent(0, 100);
        assert!(receive.is_old_timestamp(0, 99) && !receive.is_old_timestamp(0, 100));
        let later_ns = (u64::from(MAX_TS_RECENT_AGE_S) + 1) * 1_000_000_000;
        assert!(!receive.is_old_timestamp(later_ns, 99));
    }
}
