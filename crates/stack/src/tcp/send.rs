//! Sending half of a connection: sequence numbers, send buffer, the peer's window and the sizes
//! of segments (RFC 9293 sections 3.3.1, 3.7.1 and 3.8.6).

use super::buffers::{BufferPool, ByteQueue};
use super::identity::milliseconds;
use super::options::{MAX_WINDOW_SHIFT, TIMESTAMPS_BYTES};
use super::segment::Segment;
use super::seq::Seq;
use crate::snapshot::SnapshotBytes;

/// Default MSS for IPv4 and for IPv6: every host accepts it (RFC 9293 section 3.7.1).
pub(crate) const DEFAULT_MSS: [u16; 2] = [536, 1220];

/// Lower bound of the peer's MSS: smaller segments would be mostly headers.
pub(crate) const MIN_MSS: u16 = 64;

/// Largest payload on a link of 68 bytes, the smallest MTU of IPv4 (RFC 791), without options.
const MIN_LINK_MSS: u16 = 28;

/// Maximum size of windows and buffers, in bytes (RFC 7323 section 2.3).
pub(crate) const MAX_WINDOW_BYTES: u32 = 1 << 30;

/// Largest payload that a packet of `mtu` bytes carries, without options (RFC 9293 section 3.7.1).
pub(crate) fn mss_of_mtu(mtu: usize, is_v4: bool) -> u16 {
    let headers = if is_v4 { 40 } else { 60 };
    u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX)
}

/// Send variables of a connection.
pub(crate) struct SendState {
    /// Oldest unacknowledged sequence number (SND.UNA).
    pub(crate) una: Seq,
    /// Next sequence number to send (SND.NXT).
    pub(crate) nxt: Seq,
    /// Sequence number of the first byte of `queue`.
    pub(crate) base: Seq,
    /// Data written by the application and not acknowledged, and its length below.
    pub(crate) queue: ByteQueue,
    pub(crate) queued_bytes: u32,
    /// Peer's window in bytes (SND.WND), its maximum so far, and the segment of its last update
    /// (SND.WL1, SND.WL2).
    pub(crate) window: u32,
    pub(crate) max_window: u32,
    pub(crate) window_seq: Seq,
    pub(crate) window_ack: Seq,
    /// Peer's MSS: its largest payload, without options.
    pub(crate) peer_mss: u16,
    /// Largest payload to send now, with the bytes of options taken off.
    pub(crate) mss: u16,
    /// Limit that path MTU discovery found when nothing larger came through.
    pub(crate) mss_limit: u16,
    /// Largest payload that peer and link accept, with the bytes of options.
    pub(crate) max_mss: u16,
    /// End of the last segment below the MSS (Minshall's variant of Nagle).
    pub(crate) small_segment_end: Seq,
    /// End of the last tail loss probe (RFC 8985 section 7).
    pub(crate) tail_probe_end: Seq,
    /// Offset of our time stamp clock (RFC 7323 section 5.4), in milliseconds.
    pub(crate) ts_offset: u32,
}

/// Snapshot of a [`SendState`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct SendSnapshot<'a> {
    pub(crate) una: Seq,
    pub(crate) nxt: Seq,
    pub(crate) base: Seq,
    /// Data written by the application and not acknowledged.
    #[cfg_attr(feature = "serde", serde(borrow))]
    pub(crate) data: SnapshotBytes<'a>,
    window: u32,
    max_window: u32,
    window_seq: Seq,
    window_ack: Seq,
    peer_mss: u16,
    mss_limit: u16,
    max_mss: u16,
    small_end: Seq,
    pub(crate) sent_age_ns: u64,
    pub(crate) own_window_shift: u8,
    /// Reading of the connection's time stamp clock.
    timestamp: u32,
}

impl SendState {
    /// Nothing is sent yet; `iss` is the initial sequence number.
    pub(crate) fn new(iss: Seq, ts_offset: u32, default_mss: u16) -> Self {
        Self {
            una: iss,
            nxt: iss,
            base: iss + 1,
            queue: ByteQueue::EMPTY,
            queued_bytes: 0,
            window: 0,
            max_window: 0,
            window_seq: Seq(0),
            window_ack: Seq(0),
            peer_mss: default_mss,
            mss: default_mss,
            mss_limit: u16::MAX,
            max_mss: default_mss,
            small_segment_end: iss,
            ts_offset,
            tail_probe_end: iss,
        }
    }

    /// Sequence numbers sent and not acknowledged.
    #[inline]
    pub(crate) fn outstanding(&self) -> u32 {
        self.nxt.since(self.una)
    }

    /// Sequence numbers that the peer's window still allows to send.
    #[inline]
    pub(crate) fn usable_window(&self) -> u32 {
        (self.una + self.window).since(self.nxt)
    }

    /// Sequence number of a segment without data: SND.NXT, or the right edge of a window that the
    /// peer has shrunk below sent data. The peer drops segments beyond its window, together with
    /// their acknowledgements.
    #[inline]
    pub(crate) fn seq_in_window(&self) -> Seq {
        self.nxt.min(self.una + self.window)
    }

    /// True when an acknowledgement is for something sent and not acknowledged yet.
    #[inline]
    pub(crate) fn is_new_ack(&self, ack: Seq) -> bool {
        ack.is_after(self.una) && ack.is_at_or_before(self.nxt)
    }

    /// True when an acknowledgement is for something ever sent, and not too old (RFC 5961 section
    /// 5.2).
    #[inline]
    pub(crate) fn is_acceptable_ack(&self, ack: Seq) -> bool {
        let oldest = self.una - self.max_window;
        !(ack.is_before(oldest) || ack.is_after(self.nxt))
    }

    /// Bytes that the application has written and that were never sent.
    #[inline]
    pub(crate) fn unsent(&self) -> u32 {
        self.queued_bytes.saturating_sub(self.nxt.since(self.base))
    }

    /// Free bytes of a send buffer of `buffer_bytes`.
    #[inline]
    fn free_bytes(&self, buffer_bytes: u32) -> u32 {
        buffer_bytes.saturating_sub(self.queued_bytes)
    }

    /// True when more than a third of the send buffer is free: the threshold of writability.
    #[inline]
    pub(crate) fn has_space(&self, buffer_bytes: u32) -> bool {
        self.free_bytes(buffer_bytes) > buffer_bytes / 3
    }

    /// Bytes that can be appended now: free in the send buffer and backed by memory.
    #[inline]
    pub(crate) fn appendable_bytes(&self, buffer_bytes: u32, pool: &BufferPool) -> usize {
        let end = self.queued_bytes as usize;
        let allowed = pool.allowance_bytes().saturating_sub(end);
        let free = self.free_bytes(buffer_bytes) as usize;
        free.min(allowed).min(self.queue.appendable_bytes(pool, end))
    }

    /// Removes what is acknowledged from the send buffer; returns its bytes.
    #[inline]
    pub(crate) fn remove_acknowledged(&mut self, pool: &mut BufferPool) -> u32 {
        let bytes = self.una.since(self.base).min(self.queued_bytes);
        if bytes > 0 {
            self.queued_bytes -= bytes;
            self.base += bytes;
            if self.queued_bytes == 0 {
                self.queue.clear(pool);
            } else {
                self.queue.consume(pool, bytes as usize);
            }
        }
        bytes
    }

    /// Frees the send buffer.
    pub(crate) fn release(&mut self, pool: &mut BufferPool) {
        self.queue.clear(pool);
        self.queued_bytes = 0;
    }

    /// True when the segment is newer than the one of the last window update (RFC 9293 section
    /// 3.10.7.4).
    #[inline]
    pub(crate) fn is_newer(&self, segment: &Segment<'_>) -> bool {
        self.window_seq.is_before(segment.seq)
            || self.window_seq == segment.seq && self.window_ack.is_at_or_before(segment.ack)
    }

    /// Sets the peer's window to `window` bytes, as a segment announced it.
    #[inline]
    pub(crate) fn set_window(&mut self, window: u32, segment: &Segment<'_>) {
        self.window = window;
        self.max_window = self.max_window.max(window);
        (self.window_seq, self.window_ack) = (segment.seq, segment.ack);
    }

    /// Sets the peer's MSS from the option it announced, or to the default.
    pub(crate) fn set_peer_mss(&mut self, announced: Option<u16>, is_v4: bool) {
        let default = DEFAULT_MSS[usize::from(!is_v4)];
        self.peer_mss = announced.unwrap_or(default).max(MIN_MSS);
    }

    /// Sets the MSS for a path MTU of `mtu` bytes.
    #[inline]
    pub(crate) fn set_mtu(&mut self, mtu: usize, is_v4: bool, timestamps: bool) {
        let fits = mss_of_mtu(mtu, is_v4).max(MIN_LINK_MSS);
        self.set_max_mss(fits.min(self.peer_mss), timestamps);
    }

    /// Sets the largest payload that peer and link accept, in bytes with options.
    #[inline]
    pub(crate) fn set_max_mss(&mut self, bytes: u16, timestamps: bool) {
        let options = if timestamps { TIMESTAMPS_BYTES as u16 } else { 0 };
        self.max_mss = bytes;
        self.mss = self.max_mss.min(self.mss_limit) - options;
    }

    /// Silly window syndrome avoidance and the Nagle algorithm (RFC 9293 sections 3.8.6.2.1 and
    /// 3.7.4): true when a segment of `bytes` is worth sending. `at_once` tells whether
    /// the application wants no delay, or sends no more.
    #[inline]
    pub(crate) fn is_worth_sending(
        &self,
        bytes: u32,
        drains_queue: bool,
        at_once: impl FnOnce() -> bool,
    ) -> bool {
        let small_in_flight = self.small_segment_end.is_after(self.una);
        bytes >= self.mss.into()
            || drains_queue && (at_once() || !small_in_flight)
            || bytes > 0 && !drains_queue && bytes >= self.max_window / 2
    }

    /// Current value of the time stamp clock: milliseconds from a secret offset (RFC 7323
    /// section 5.4).
    #[inline]
    pub(crate) fn timestamp(&self, now_ns: u64) -> u32 {
        milliseconds(now_ns).wrapping_add(self.ts_offset)
    }

    /// Takes a snapshot. The last segment was sent `sent_age_ns` ago.
    pub(crate) fn save(
        &self,
        now_ns: u64,
        sent_age_ns: u64,
        own_window_shift: u8,
        pool: &BufferPool,
    ) -> SendSnapshot<'static> {
        SendSnapshot {
            una: self.una,
            nxt: self.nxt,
            base: self.base,
            data: self.queue.copy_bytes(pool, 0, self.queued_bytes).into(),
            window: self.window,
            max_window: self.max_window,
            window_seq: self.window_seq,
            window_ack: self.window_ack,
            peer_mss: self.peer_mss,
            mss_limit: self.mss_limit,
            max_mss: self.max_mss,
            small_end: self.small_segment_end,
            sent_age_ns,
            own_window_shift,
            timestamp: self.timestamp(now_ns),
        }
    }

    /// Restores a snapshot that [`SendSnapshot::has_valid_sizes`], with `queue` for its data.
    pub(crate) fn restore(
        now_ns: u64,
        saved: &SendSnapshot<'_>,
        queue: ByteQueue,
        tail_probe_end: Seq,
        timestamps: bool,
    ) -> Self {
        let mut state = Self {
            nxt: saved.nxt,
            base: saved.base,
            queue,
            queued_bytes: saved.data.len() as u32,
            window: saved.window.min(MAX_WINDOW_BYTES),
            max_window: saved.max_window.min(MAX_WINDOW_BYTES),
            window_seq: saved.window_seq,
            window_ack: saved.window_ack,
            peer_mss: saved.peer_mss,
            mss_limit: saved.mss_limit,
            small_segment_end: saved.small_end,
            ts_offset: saved.timestamp.wrapping_sub(milliseconds(now_ns)),
            tail_probe_end,
            ..Self::new(saved.una, 0, MIN_MSS)
        };
        state.set_max_mss(saved.max_mss, timestamps);
        state
    }
}

impl SendSnapshot<'_> {
    /// True when window shift and segment sizes are possible.
    pub(crate) fn has_valid_sizes(&self) -> bool {
        self.own_window_shift <= MAX_WINDOW_SHIFT
            && self.peer_mss >= MIN_MSS
            && self.mss_limit >= MIN_MSS
            && (MIN_LINK_MSS..=self.peer_mss).contains(&self.max_mss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> SendState {
        SendState { window: 10_000, max_window: 10_000, ..SendState::new(Seq(999), 0, 1460) }
    }

    #[test]
    fn counts_what_is_outstanding_unsent_and_usable() {
        let mut send = state();
        (send.una, send.nxt, send.queued_bytes) = (Seq(1000), Seq(3000), 5000);
        assert_eq!((send.outstanding(), send.unsent(), send.usable_window()), (2000, 3000, 8000));
        assert!(send.is_new_ack(Seq(3000)) && !send.is_new_ack(Seq(1000)));
        assert!(!send.is_new_ack(Seq(3001)), "never sent");
    }

    #[test]
    fn a_segment_without_data_stays_within_a_window_that_shrank() {
        let mut send = state();
        (send.una, send.nxt, send.window) = (Seq(1000), Seq(3000), 500);
        assert_eq!(send.seq_in_window(), Seq(1500));
        send.window = 10_000;
        assert_eq!(send.seq_in_window(), Seq(3000));
    }

    #[test]
    fn rfc5961_5_2_old_acknowledgements_are_acceptable_for_one_window() {
        let mut send = state();
        (send.una, send.nxt) = (Seq(50_000), Seq(60_000));
        assert!(send.is_acceptable_ack(Seq(40_000)) && send.is_acceptable_ack(Seq(60_000)));
        assert!(!send.is_acceptable_ack(Seq(39_999)) && !send.is_acceptable_ack(Seq(60_001)));
    }

    #[test]
    fn segment_sizes_fit_peer_path_and_options() {
        let mut send = state();
        send.set_peer_mss(Some(1400), true);
        send.set_mtu(1500, true, false);
        assert_eq!((send.mss, send.max_mss), (1400, 1400));
        send.set_mtu(1300, true, true);
        assert_eq!((send.mss, send.max_mss), (1260 - TIMESTAMPS_BYTES as u16, 1260));
        send.set_peer_mss(None, false);
        send.set_mtu(9000, false, false);
        assert_eq!(send.mss, DEFAULT_MSS[1]);
    }

    #[test]
    fn rfc9293_3_7_4_nagle_holds_a_small_segment_back() {
        let mut send = state();
        (send.una, send.nxt, send.mss) = (Seq(1000), Seq(1100), 1460);
        send.small_segment_end = Seq(1100);
        assert!(!send.is_worth_sending(100, true, || false));
        assert!(send.is_worth_sending(100, true, || true), "no delay wanted");
        assert!(send.is_worth_sending(1460, false, || false), "a whole segment");
        send.una = Seq(1100);
        assert!(send.is_worth_sending(100, true, || false), "nothing small in flight");
    }

    #[test]
    fn acknowledged_bytes_leave_the_send_buffer() {
        let mut pool = BufferPool::new(1 << 20);
        let mut send = state();
        assert!(send.queue.reserve(&mut pool, 0, 3000));
        send.queue.write(&mut pool, 0, &[7; 3000]);
        (send.nxt, send.queued_bytes) = (Seq(4000), 3000);
        send.una = Seq(2000);
        assert_eq!(send.remove_acknowledged(&mut pool), 1000);
        assert_eq!((send.base, send.queued_bytes), (Seq(2000), 2000));
        // The FIN is acknowledged too, but is no byte of the buffer.
        send.una = Seq(4001);
        assert_eq!((send.remove_acknowledged(&mut pool), pool.used()), (2000, 0));
    }
}
