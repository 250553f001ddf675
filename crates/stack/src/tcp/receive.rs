//! Receiving side: reassembly, window, and acknowledgement timing (RFC 9293 sections 3.8.6.2
//! and 3.8.6.3, RFC 2018, RFC 5681).

use tidegate_wire::DropReason;

use super::connection::{ConnFlags, Connection, NEVER, TcpShared};
use super::options::TIMESTAMPS_BYTES;
use super::seq::Seq;
use super::socket::TcpState;

/// Delay of an acknowledgement, to combine it with others or with data (RFC 9293 section
/// 3.8.6.3 allows half a second).
const DELAYED_ACK_NS: u64 = 40_000_000;

/// Maximum number of out-of-order ranges per connection.
const MAX_RANGES: usize = 64;

/// Maximum number of blocks in a SACK option.
const MAX_SACK_BLOCKS: usize = 4;

/// Sequence ranges received beyond a gap. The data itself is in the receive buffer.
#[derive(Debug, Default)]
pub(crate) struct OutOfOrderQueue {
    /// Sorted, neither overlapping nor adjacent.
    ranges: Vec<SeqRange>,
    recency: u32,
}

#[derive(Clone, Copy, Debug)]
struct SeqRange {
    start: Seq,
    end: Seq,
    /// Rank of the last update; larger is later.
    recency: u32,
}

impl OutOfOrderQueue {
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.recency = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Start and end of each range, least recently updated first.
    pub(crate) fn ranges_by_recency(&self) -> impl Iterator<Item = (Seq, Seq)> + use<> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable_by_key(|range| range.recency);
        ranges.into_iter().map(|range| (range.start, range.end))
    }

    /// True if a range can be recorded: there is space, or the range extends an existing range.
    fn has_space(&self, start: Seq, end: Seq) -> bool {
        self.ranges.len() < MAX_RANGES || self.overlapping(start, end).0 > 0
    }

    /// Number of ranges that `start..end` overlaps or touches, and index of the first.
    fn overlapping(&self, start: Seq, end: Seq) -> (usize, usize) {
        let first = self.ranges.partition_point(|range| range.end.is_before(start));
        let adjoining =
            self.ranges[first..].iter().take_while(|range| range.start.is_at_or_before(end));
        (adjoining.count(), first)
    }

    /// True if all of `start..end` was received already.
    fn contains(&self, start: Seq, end: Seq) -> bool {
        self.ranges
            .iter()
            .any(|range| range.start.is_at_or_before(start) && end.is_at_or_before(range.end))
    }

    /// Records a range as received.
    fn insert(&mut self, start: Seq, end: Seq) {
        self.recency = self.recency.wrapping_add(1);
        let (overlap_count, first) = self.overlapping(start, end);
        let overlapping = &self.ranges[first..first + overlap_count];
        let start = overlapping.first().map_or(start, |range| range.start.min(start));
        let end = overlapping.last().map_or(end, |range| range.end.max(end));
        let merged = SeqRange { start, end, recency: self.recency };
        self.ranges.splice(first..first + overlap_count, [merged]);
    }

    /// Removes the ranges that are in order once the data reaches `nxt`; returns the new end of
    /// the data in order.
    fn advance(&mut self, nxt: Seq) -> Seq {
        let mut end = nxt;
        while let Some(range) = self.ranges.first().filter(|range| range.start.is_at_or_before(end))
        {
            end = end.max(range.end);
            self.ranges.remove(0);
        }
        end
    }

    /// Fills `blocks` with SACK blocks, most recent first (RFC 2018 section 4); returns their
    /// number.
    fn newest_blocks(&self, blocks: &mut [(Seq, Seq)]) -> usize {
        let (mut count, mut before) = (0, u32::MAX);
        for block in blocks {
            let newest = self.ranges.iter().filter(|range| range.recency < before);
            let Some(range) = newest.max_by_key(|range| range.recency) else { break };
            *block = (range.start, range.end);
            before = range.recency;
            count += 1;
        }
        count
    }
}

impl Connection {
    /// Initializes the receive variables from the peer's initial sequence number.
    pub(crate) fn begin_receiving(&mut self, irs: Seq) {
        self.rcv_nxt = irs + 1;
        self.read_seq = self.rcv_nxt;
        self.rcv_edge = self.rcv_nxt;
        self.last_ack_sent = self.rcv_nxt;
    }

    /// Receive window in bytes (RCV.WND).
    pub(crate) fn receive_window(&self) -> u32 {
        self.rcv_edge.since(self.rcv_nxt)
    }

    /// Largest payload of one segment from the peer, in bytes. `link_mss` is the largest payload
    /// of the link for IPv4 without options.
    fn max_payload_bytes(&self, link_mss: u16) -> usize {
        let extra_ip_header = if self.tuple.is_v4() { 0 } else { 20 };
        let options = if self.flags.contains(ConnFlags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 };
        usize::from(link_mss).saturating_sub(extra_ip_header + options)
    }

    /// Right edge of the window that the free buffer space allows.
    fn desired_edge(&self) -> Seq {
        let free = self.options.receive_buffer_bytes.saturating_sub(self.readable());
        self.rcv_nxt + free
    }

    /// True if the application has read enough to make a window update worthwhile (RFC 9293
    /// section 3.8.6.2.2).
    fn is_window_update_due(&self) -> bool {
        let half = self.options.receive_buffer_bytes / 2;
        let grown = self.read_since_ack.min(self.desired_edge().since(self.rcv_edge));
        let window = self.receive_window();
        grown > 0
            && grown >= half.min(2 * u32::from(self.rcv_mss))
            && self.desired_edge().since(self.rcv_nxt) / 2 >= window
    }

    /// Window field of a segment to send; moves the right edge of the window accordingly.
    /// `scaled` is false for a SYN (RFC 7323 section 2.2).
    pub(crate) fn window_field(&mut self, scaled: bool) -> u16 {
        let shift = if scaled { self.own_window_shift } else { 0 };
        let grown = self.desired_edge().since(self.rcv_edge);
        let half = self.options.receive_buffer_bytes / 2;
        // RFC 9293 section 3.8.6.2.2: no small window increases.
        let edge = match grown >= half.min(self.rcv_mss.into()) {
            true => self.rcv_edge.max(self.desired_edge()),
            false => self.rcv_edge,
        };
        let field = u16::try_from(edge.since(self.rcv_nxt) >> shift).unwrap_or(u16::MAX);
        self.rcv_edge = self.rcv_edge.max(self.rcv_nxt + (u32::from(field) << shift));
        field
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

    /// Accepts the payload of a segment, trimmed to the window. `start` is the sequence number of
    /// its first byte (RFC 9293 section 3.10.7.4, seventh).
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory for the payload.
    pub(crate) fn accept_payload(
        &mut self,
        now_ns: u64,
        start: Seq,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        let end = start + data.len() as u32;
        // A longer payload consists of several segments that the device has coalesced.
        let segment_bytes = data.len().min(self.max_payload_bytes(shared.link_mss)) as u16;
        self.rcv_mss = self.rcv_mss.max(segment_bytes);
        if !end.is_after(self.rcv_nxt) {
            self.record_dsack_range(start, end);
            return Ok(());
        }
        if start.is_before(self.rcv_nxt) {
            self.record_dsack_range(start, self.rcv_nxt);
        }
        let skipped = self.rcv_nxt.since(start);
        let (start, data) = (start + skipped, &data[skipped as usize..]);
        if start.is_after(self.rcv_nxt) {
            return self.accept_out_of_order(start, data, shared);
        }
        self.store(start, data, shared)?;
        let had_out_of_order = self.out_of_order.is_some();
        let had_data = self.readable() > 0;
        let mut nxt = end;
        if let Some(mut queue) = self.out_of_order.take() {
            nxt = queue.advance(end);
            if queue.is_empty() {
                shared.recycle_out_of_order(queue);
            } else {
                self.out_of_order = Some(queue);
            }
        }
        self.rcv_nxt = nxt;
        self.received_since_ack = self.received_since_ack.saturating_add(data.len() as u32);
        // RFC 5681 section 4.2: acknowledge at least every second segment, immediately
        // when a gap closes, otherwise with a delay.
        if had_out_of_order || self.received_since_ack >= 2 * u32::from(self.rcv_mss) {
            self.acknowledge_now();
        } else if self.ack_deadline_ns == NEVER {
            self.ack_deadline_ns = now_ns.saturating_add(DELAYED_ACK_NS);
        }
        let low = self.options.receive_low_water_bytes;
        if !had_data || self.readable() >= low {
            self.flags.insert(ConnFlags::NOTIFY_READABLE);
        }
        Ok(())
    }

    fn accept_out_of_order(
        &mut self,
        start: Seq,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<(), DropReason> {
        let end = start + data.len() as u32;
        // RFC 5681 section 4.2: immediately, so that the peer learns of the gap.
        self.acknowledge_now();
        if !self.flags.contains(ConnFlags::SACK) {
            self.acks_owed = self.acks_owed.saturating_add(1);
        }
        if self.out_of_order.as_ref().is_some_and(|gaps| gaps.contains(start, end)) {
            self.record_dsack_range(start, end);
            return Ok(());
        }
        let has_space = self.out_of_order.as_ref().is_none_or(|gaps| gaps.has_space(start, end));
        if !has_space || shared.pool.is_scarce() {
            return Err(DropReason::TcpMemory);
        }
        self.store(start, data, shared)?;
        let mut queue = self.out_of_order.take().unwrap_or_else(|| shared.acquire_out_of_order());
        queue.insert(start, end);
        self.out_of_order = Some(queue);
        Ok(())
    }

    /// Accepts saved out-of-order data if there is space; otherwise drops it. The peer still has
    /// the data (RFC 2018 section 8).
    pub(crate) fn restore_out_of_order(&mut self, start: Seq, data: &[u8], shared: &mut TcpShared) {
        let end = start + data.len() as u32;
        let fits = start.is_after(self.rcv_nxt)
            && start.is_before(end)
            && end.is_at_or_before(self.rcv_edge);
        let has_space = self.out_of_order.as_ref().is_none_or(|gaps| gaps.has_space(start, end));
        if !fits || !has_space || shared.pool.is_scarce() {
            return;
        }
        if self.store(start, data, shared).is_ok() {
            let mut queue =
                self.out_of_order.take().unwrap_or_else(|| shared.acquire_out_of_order());
            queue.insert(start, end);
            self.out_of_order = Some(queue);
        }
    }

    /// Copies data into the receive buffer at its sequence number.
    fn store(&mut self, start: Seq, data: &[u8], shared: &mut TcpShared) -> Result<(), DropReason> {
        let at = start.since(self.read_seq) as usize;
        let end = at + data.len();
        let is_allowed = at < shared.pool.allowance_bytes();
        if !is_allowed || !self.incoming.reserve(&mut shared.pool, at, end) {
            return Err(DropReason::TcpMemory);
        }
        self.incoming.write(&mut shared.pool, at, data);
        Ok(())
    }

    /// Records a duplicate range, so that the peer learns of its needless retransmission
    /// (RFC 2883).
    pub(crate) fn record_dsack_range(&mut self, start: Seq, end: Seq) {
        if self.flags.contains(ConnFlags::SACK) && start.is_before(end) {
            self.dsack_range = (start, end);
        }
        self.acknowledge_now();
    }

    /// True if a duplicate range was received and not yet reported to the peer.
    pub(crate) fn has_dsack_range(&self) -> bool {
        self.dsack_range.0 != self.dsack_range.1
    }

    pub(crate) fn acknowledge_now(&mut self) {
        self.flags.insert(ConnFlags::ACK_NOW);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Updates the acknowledgement state after an ACK was sent.
    pub(crate) fn on_ack_sent(&mut self) {
        self.flags.remove(ConnFlags::ACK_NOW);
        self.acks_owed = self.acks_owed.saturating_sub(1);
        self.received_since_ack = 0;
        self.read_since_ack = 0;
        self.ack_deadline_ns = NEVER;
        self.last_ack_sent = self.rcv_nxt;
    }

    /// Processes the peer's FIN once all data before it has arrived (RFC 9293 section 3.10.7.4,
    /// eighth).
    pub(crate) fn accept_fin(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.rcv_nxt += 1;
        self.rcv_edge = self.rcv_edge.max(self.rcv_nxt);
        self.flags.insert(ConnFlags::FIN_RECEIVED);
        // No data can follow the FIN.
        self.release_out_of_order(shared);
        self.acknowledge_now();
        self.flags.insert(ConnFlags::NOTIFY_READABLE);
        match self.state {
            TcpState::Established => self.state = TcpState::CloseWait,
            TcpState::FinWait1 if self.fin_acknowledged() => self.enter_time_wait(now_ns, shared),
            TcpState::FinWait1 => self.state = TcpState::Closing,
            TcpState::FinWait2 => self.enter_time_wait(now_ns, shared),
            _ => {}
        }
    }

    /// Copies received data to `buf` and removes it from the receive buffer. Returns the number
    /// of bytes.
    pub(crate) fn read(&mut self, buf: &mut [u8], shared: &mut TcpShared) -> usize {
        let len = buf.len().min(self.readable() as usize);
        self.incoming.read(&shared.pool, 0, &mut buf[..len]);
        self.consume(len, shared);
        len
    }

    /// Removes `len` bytes that were read from the receive buffer. Sends a window update when it
    /// is worthwhile.
    pub(crate) fn consume(&mut self, len: usize, shared: &mut TcpShared) {
        self.read_seq += len as u32;
        self.read_since_ack = self.read_since_ack.saturating_add(len as u32);
        if self.readable() == 0 && self.out_of_order.is_none() {
            self.incoming.clear(&mut shared.pool);
        } else {
            self.incoming.consume(&mut shared.pool, len);
        }
        let receives =
            matches!(self.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
        if receives && self.is_window_update_due() {
            self.acknowledge_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(queue: &OutOfOrderQueue) -> Vec<(u32, u32)> {
        let mut blocks = [(Seq(0), Seq(0)); MAX_SACK_BLOCKS];
        let count = queue.newest_blocks(&mut blocks);
        blocks[..count].iter().map(|&(start, end)| (start.0, end.0)).collect()
    }

    #[test]
    fn rfc2018_4_newest_block_comes_first() {
        let mut queue = OutOfOrderQueue::default();
        for start in [100, 300, 500, 700, 900] {
            queue.insert(Seq(start), Seq(start + 50));
        }
        assert_eq!(blocks(&queue), [(900, 950), (700, 750), (500, 550), (300, 350)]);
        queue.insert(Seq(150), Seq(160));
        assert_eq!(blocks(&queue)[..2], [(100, 160), (900, 950)]);
        queue.insert(Seq(140), Seq(720));
        assert_eq!(blocks(&queue), [(100, 750), (900, 950)], "overlaps become one");
        assert!(queue.contains(Seq(100), Seq(750)) && !queue.contains(Seq(740), Seq(910)));
        assert_eq!(queue.advance(Seq(100)), Seq(750));
        assert_eq!(queue.advance(Seq(800)), Seq(800));
        assert_eq!(blocks(&queue), [(900, 950)]);
    }

    #[test]
    fn ranges_are_bounded_but_may_grow() {
        let mut queue = OutOfOrderQueue::default();
        for n in 0..MAX_RANGES as u32 {
            assert!(queue.has_space(Seq(n * 10), Seq(n * 10 + 1)));
            queue.insert(Seq(n * 10), Seq(n * 10 + 1));
        }
        assert!(!queue.has_space(Seq(5), Seq(6)));
        assert!(queue.has_space(Seq(1), Seq(6)));
    }

    #[test]
    fn ranges_handle_sequence_wrap() {
        let mut queue = OutOfOrderQueue::default();
        queue.insert(Seq(u32::MAX - 10), Seq(5));
        queue.insert(Seq(5), Seq(20));
        assert_eq!(blocks(&queue), [(u32::MAX - 10, 20)]);
        assert_eq!(queue.advance(Seq(u32::MAX - 10)), Seq(20));
    }
}
