//! Data of a received segment, acknowledgements, and reading by the application (RFC 9293
//! sections 3.8.6.3 and 3.10.7.4, RFC 5681 section 4.2).

use tidegate_wire::DropReason;

use super::Connection;
use crate::tcp::buffers::{BufferPool, TcpShared};
use crate::tcp::flags::ConnFlags;
use crate::tcp::options::TIMESTAMPS_BYTES;
use crate::tcp::seq::Seq;
use crate::tcp::socket::TcpState;
use crate::tcp::timers::NEVER;

impl Connection {
    /// MSS to announce: the largest payload that the link carries (RFC 9293 section 3.7.1).
    /// `link_mss` is the largest payload of the link for IPv4.
    pub(crate) fn mss_of_link(&self, link_mss: u16) -> u16 {
        link_mss.saturating_sub(if self.tuple.is_v4() { 0 } else { 20 })
    }

    /// Largest payload of one segment from the peer, in bytes.
    fn max_payload_bytes(&self, link_mss: u16) -> usize {
        let options = if self.flags.contains(ConnFlags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 };
        usize::from(self.mss_of_link(link_mss)).saturating_sub(options)
    }

    /// Learns the size of the peer's segments from a payload of `bytes`.
    #[inline(always)]
    pub(super) fn note_segment_size(&mut self, bytes: usize, link_mss: u16) {
        if bytes > self.receive.mss.into() {
            // A longer payload consists of several segments that the device has coalesced.
            let segment_bytes = bytes.min(self.max_payload_bytes(link_mss)) as u16;
            self.receive.mss = self.receive.mss.max(segment_bytes);
        }
    }

    /// Accepts the payload of a segment, trimmed to the window. `start` is the sequence number of
    /// its first byte (RFC 9293 section 3.10.7.4, seventh). Returns true when a FIN that arrived
    /// earlier is next.
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory for the payload.
    pub(crate) fn accept_payload(
        &mut self,
        now_ns: u64,
        start: Seq,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<bool, DropReason> {
        let end = start + data.len() as u32;
        self.note_segment_size(data.len(), shared.link_mss);
        if !end.is_after(self.receive.nxt) {
            self.record_dsack_range(start, end);
            return Ok(false);
        }
        if start.is_before(self.receive.nxt) {
            self.record_dsack_range(start, self.receive.nxt);
        }
        let skipped = self.receive.nxt.since(start);
        let (start, data) = (start + skipped, &data[skipped as usize..]);
        if start.is_after(self.receive.nxt) {
            return self.accept_out_of_order(start, data, shared).map(|()| false);
        }
        // RFC 2883 section 4: only the first duplicate part of a segment is reported.
        let duplicate = match skipped {
            0 => self.receive.first_duplicate(start, end),
            _ => None,
        };
        let reaches_fin = self.accept_in_order(now_ns, data, shared)?;
        if let Some((start, end)) = duplicate {
            self.record_dsack_range(start, end);
        }
        Ok(reaches_fin)
    }

    /// Accepts data at RCV.NXT. Returns true when a FIN that arrived earlier is next.
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory for the data.
    #[inline(always)]
    pub(super) fn accept_in_order(
        &mut self,
        now_ns: u64,
        data: &[u8],
        shared: &mut TcpShared,
    ) -> Result<bool, DropReason> {
        let buffer_bytes = self.receive_buffer_bytes();
        if self.receive.is_growth_due(buffer_bytes) {
            self.adapt_receive_buffer(now_ns, buffer_bytes, &shared.pool);
        }
        let had_data = self.readable() > 0;
        let from = self.receive.nxt;
        let taken = self.receive.take_in_order(data, shared)?;
        let received = self.receive.nxt.since(from);
        self.traffic.received_bytes = self.traffic.received_bytes.wrapping_add(received.into());
        // RFC 5681 section 4.2: acknowledge at least every second segment, immediately
        // when a gap closes, otherwise with a delay.
        if taken.moved_a_gap || self.receive.received_since_ack() >= 2 * u32::from(self.receive.mss)
        {
            self.acknowledge_now();
        } else {
            self.timers.delay_ack(now_ns);
        }
        let low = self.options.receive_low_water_bytes;
        if !had_data || self.readable() >= low {
            self.flags.insert(ConnFlags::NOTIFY_READABLE);
        }
        Ok(taken.reaches_fin)
    }

    /// Adapts the receive buffer of `buffer_bytes` to what the application reads in a round trip
    /// (dynamic right-sizing). While memory is scarce, the buffer returns to its first size.
    #[cold]
    fn adapt_receive_buffer(&mut self, now_ns: u64, buffer_bytes: u32, pool: &BufferPool) {
        if pool.is_scarce() {
            self.receive.growth = 0;
        }
        let may_grow = buffer_bytes < self.options.max_receive_buffer_bytes
            && 2 * buffer_bytes as usize <= pool.max_queue_bytes();
        self.receive.grow_if_fast(now_ns, self.recovery.rtt.min_ns(), may_grow);
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
            self.receive.acks_owed = self.receive.acks_owed.saturating_add(1);
        }
        if self.receive.has_beyond_gap(start, end) {
            self.record_dsack_range(start, end);
            // RFC 2883 section 4: the block that holds the duplicate comes second.
            self.receive.note_recent(start);
            return Ok(());
        }
        let duplicate = self.receive.first_duplicate(start, end);
        self.receive.take_out_of_order(start, data, shared)?;
        if let Some((start, end)) = duplicate {
            self.record_dsack_range(start, end);
        }
        Ok(())
    }

    /// Records a duplicate range, so that the peer learns of its needless retransmission
    /// (RFC 2883).
    pub(crate) fn record_dsack_range(&mut self, start: Seq, end: Seq) {
        if self.flags.contains(ConnFlags::SACK) && start.is_before(end) {
            self.receive.dsack_range = (start, end);
        }
        self.acknowledge_now();
    }

    /// Sends an acknowledgement with the next output.
    pub(crate) fn acknowledge_now(&mut self) {
        self.flags.insert(ConnFlags::ACK_NOW);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Updates the acknowledgement state after an ACK was sent.
    pub(crate) fn on_ack_sent(&mut self) {
        self.flags.remove(ConnFlags::ACK_NOW);
        self.receive.on_ack_sent();
        self.timers.ack_deadline_ns = NEVER;
    }

    /// Processes the peer's FIN once all data before it has arrived (RFC 9293 section 3.10.7.4,
    /// eighth).
    pub(crate) fn accept_fin(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.receive.nxt += 1;
        self.receive.edge = self.receive.edge.max(self.receive.nxt);
        self.flags.insert(ConnFlags::FIN_RECEIVED);
        // No data can follow the FIN.
        self.receive.release_out_of_order(shared);
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
        self.receive.queue.read(&shared.pool, 0, &mut buf[..len]);
        self.consume(len, shared);
        len
    }

    /// Removes `len` bytes that were read from the receive buffer. Sends a window update when it
    /// is worthwhile.
    pub(crate) fn consume(&mut self, len: usize, shared: &mut TcpShared) {
        self.receive.read_seq += len as u32;
        self.receive.read_since_update = self.receive.read_since_update.saturating_add(len as u32);
        if self.readable() == 0 && self.receive.out_of_order.is_none() {
            self.receive.queue.clear(&mut shared.pool);
        } else {
            self.receive.queue.consume(&mut shared.pool, len);
        }
        let receives =
            matches!(self.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
        if receives
            && self.receive.is_window_update_due(self.receive_buffer_bytes(), self.readable())
        {
            self.acknowledge_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tcp::buffers::ByteQueue;
    use crate::tcp::segment::FourTuple;
    use crate::tcp::socket::TcpOptions;

    #[test]
    fn grown_buffers_return_to_their_first_size_while_memory_is_scarce() {
        const MIB: usize = 1 << 20;
        let tuple =
            FourTuple::new("192.0.2.1:80".parse().unwrap(), "192.0.2.2:4000".parse().unwrap());
        let options = Arc::new(TcpOptions::default());
        let mut connection = Connection::new(0, tuple, options, Seq(0), 0);
        connection.recovery.rtt.sample(0, 100_000_000);
        let mut pool = BufferPool::new(64 * MIB);
        for bytes in [2, 4, 8, 8].map(|mib| mib * MIB as u32) {
            connection.adapt_receive_buffer(0, connection.receive_buffer_bytes(), &pool);
            assert_eq!(connection.receive_buffer_bytes(), bytes);
        }
        let cwnd = 16 * MIB as u32;
        assert_eq!(connection.options.send_growth(cwnd, || pool.max_queue_bytes()), 3);

        let mut full = ByteQueue::EMPTY;
        assert!(full.reserve(&mut pool, 0, 50 * MIB));
        connection.adapt_receive_buffer(0, connection.receive_buffer_bytes(), &pool);
        assert_eq!(connection.receive_buffer_bytes(), MIB as u32);
        assert_eq!(connection.options.send_growth(cwnd, || pool.max_queue_bytes()), 0);
    }
}
