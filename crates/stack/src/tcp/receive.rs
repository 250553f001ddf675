//! The receiving side: putting data in order, the window, and when to
//! acknowledge (RFC 9293 sections 3.8.6.2 and 3.8.6.3, RFC 2018, RFC 5681).

use tidegate_wire::DropReason;

use super::connection::{Connection, Is, NEVER, Shared};
use super::options::TIMESTAMPS_BYTES;
use super::seq::Seq;
use super::socket::TcpState;

/// How long an acknowledgement waits for company (RFC 9293 section 3.8.6.3
/// allows half a second).
const DELAYED_ACK_NS: u64 = 40_000_000;

/// Stretches of data out of order that one connection may have.
const MOST_RANGES: usize = 64;

/// Blocks that a selective acknowledgement can hold.
const MOST_BLOCKS: usize = 4;

/// Data that came before what it follows on.
#[derive(Debug, Default)]
pub(crate) struct Gaps {
    /// In order, neither overlapping nor touching.
    ranges: Vec<Range>,
    stamp: u32,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: Seq,
    end: Seq,
    /// When it grew last: larger is later.
    stamp: u32,
}

impl Gaps {
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.stamp = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Where the stretches are: what came last comes last.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (Seq, Seq)> + use<> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable_by_key(|range| range.stamp);
        ranges.into_iter().map(|range| (range.start, range.end))
    }

    /// Whether a stretch can be noted.
    fn has_room(&self, start: Seq, end: Seq) -> bool {
        self.ranges.len() < MOST_RANGES || self.touched(start, end).0 > 0
    }

    /// How many ranges a stretch touches or overlaps, and where the first is.
    fn touched(&self, start: Seq, end: Seq) -> (usize, usize) {
        let first = self.ranges.partition_point(|range| range.end.is_before(start));
        let behind = self.ranges[first..].iter().take_while(|range| range.start.is_up_to(end));
        (behind.count(), first)
    }

    /// Whether all of a stretch is here already.
    fn contains(&self, start: Seq, end: Seq) -> bool {
        self.ranges.iter().any(|range| range.start.is_up_to(start) && end.is_up_to(range.end))
    }

    /// Notes a stretch that has arrived.
    fn insert(&mut self, start: Seq, end: Seq) {
        self.stamp = self.stamp.wrapping_add(1);
        let (count, first) = self.touched(start, end);
        let touched = &self.ranges[first..first + count];
        let start = touched.first().map_or(start, |range| range.start.min(start));
        let end = touched.last().map_or(end, |range| range.end.max(end));
        let merged = Range { start, end, stamp: self.stamp };
        self.ranges.splice(first..first + count, [merged]);
    }

    /// Where the data in order ends now that it reaches `nxt`.
    fn join(&mut self, nxt: Seq) -> Seq {
        let mut end = nxt;
        while let Some(range) = self.ranges.first().filter(|range| range.start.is_up_to(end)) {
            end = end.max(range.end);
            self.ranges.remove(0);
        }
        end
    }

    /// The blocks of a selective acknowledgement: what came last first
    /// (RFC 2018 section 4).
    fn blocks(&self, blocks: &mut [(Seq, Seq)]) -> usize {
        let (mut count, mut before) = (0, u32::MAX);
        for block in blocks {
            let newest = self.ranges.iter().filter(|range| range.stamp < before);
            let Some(range) = newest.max_by_key(|range| range.stamp) else { break };
            *block = (range.start, range.end);
            before = range.stamp;
            count += 1;
        }
        count
    }
}

impl Connection {
    /// The peer's first number is known: everything begins behind it.
    pub(crate) fn begin_receiving(&mut self, irs: Seq) {
        self.rcv_nxt = irs + 1;
        self.read_seq = self.rcv_nxt;
        self.rcv_edge = self.rcv_nxt;
        self.last_ack_sent = self.rcv_nxt;
    }

    /// How many bytes the peer may send (RCV.WND).
    pub(crate) fn receive_window(&self) -> u32 {
        self.rcv_edge.since(self.rcv_nxt)
    }

    /// The most data that one segment of the peer's can have, on a link that
    /// takes `link_mss` without options on IPv4.
    fn largest_text(&self, link_mss: u16) -> usize {
        let family = if self.ends.is_v4() { 0 } else { 20 };
        let options = if self.is.contains(Is::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 };
        usize::from(link_mss).saturating_sub(family + options)
    }

    /// How far the peer might be allowed to send now.
    fn wished_edge(&self) -> Seq {
        let free = self.options.receive_buffer_bytes.saturating_sub(self.readable());
        self.rcv_nxt + free
    }

    /// Whether so much was read that the larger window is worth telling (RFC 9293
    /// section 3.8.6.2.2).
    fn window_grew(&self) -> bool {
        let half = self.options.receive_buffer_bytes / 2;
        let grown = self.consumed.min(self.wished_edge().since(self.rcv_edge));
        let window = self.receive_window();
        grown > 0
            && grown >= half.min(2 * u32::from(self.heard_mss))
            && self.wished_edge().since(self.rcv_nxt) / 2 >= window
    }

    /// The window field of a segment to send; from now on the peer may send as
    /// far as it says. `scaled` is not so on a SYN (RFC 7323 section 2.2).
    pub(crate) fn window_field(&mut self, scaled: bool) -> u16 {
        let shift = if scaled { self.shift_out } else { 0 };
        let grown = self.wished_edge().since(self.rcv_edge);
        let half = self.options.receive_buffer_bytes / 2;
        // RFC 9293 section 3.8.6.2.2: no small steps.
        let edge = match grown >= half.min(self.heard_mss.into()) {
            true => self.rcv_edge.max(self.wished_edge()),
            false => self.rcv_edge,
        };
        let field = u16::try_from(edge.since(self.rcv_nxt) >> shift).unwrap_or(u16::MAX);
        self.rcv_edge = self.rcv_edge.max(self.rcv_nxt + (u32::from(field) << shift));
        field
    }

    /// The blocks for the SACK option, into `blocks`; returns how many. What
    /// came twice stands first (RFC 2883).
    pub(crate) fn sack_blocks(&mut self, blocks: &mut [(Seq, Seq); MOST_BLOCKS]) -> usize {
        let mut count = 0;
        if self.has_duplicate() {
            blocks[0] = std::mem::take(&mut self.duplicate);
            count = 1;
        }
        let gaps = self.gaps.as_ref();
        count + gaps.map_or(0, |gaps| gaps.blocks(&mut blocks[count..]))
    }

    /// Takes the data of a segment, cut to the window: `start` is the number of
    /// its first byte (RFC 9293 section 3.10.7.4, seventh).
    ///
    /// # Errors
    /// [`DropReason::TcpMemory`] when there is no memory for it.
    pub(crate) fn take_text(
        &mut self,
        now_ns: u64,
        start: Seq,
        data: &[u8],
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        let end = start + data.len() as u32;
        // What is longer are several segments that the port has merged.
        let heard = data.len().min(self.largest_text(shared.link_mss)) as u16;
        self.heard_mss = self.heard_mss.max(heard);
        if !end.is_after(self.rcv_nxt) {
            self.note_duplicate(start, end);
            return Ok(());
        }
        if start.is_before(self.rcv_nxt) {
            self.note_duplicate(start, self.rcv_nxt);
        }
        let skipped = self.rcv_nxt.since(start);
        let (start, data) = (start + skipped, &data[skipped as usize..]);
        if start.is_after(self.rcv_nxt) {
            return self.take_out_of_order(start, data, shared);
        }
        self.store(start, data, shared)?;
        let had_gaps = self.gaps.is_some();
        let had_data = self.readable() > 0;
        let mut nxt = end;
        if let Some(mut gaps) = self.gaps.take() {
            nxt = gaps.join(end);
            if gaps.is_empty() {
                shared.give_gaps(gaps);
            } else {
                self.gaps = Some(gaps);
            }
        }
        self.rcv_nxt = nxt;
        self.unacknowledged = self.unacknowledged.saturating_add(data.len() as u32);
        // RFC 5681 section 4.2: at least every second segment, at once when a
        // gap closes, and late otherwise.
        if had_gaps || self.unacknowledged >= 2 * u32::from(self.heard_mss) {
            self.acknowledge_now();
        } else if self.ack_at_ns == NEVER {
            self.ack_at_ns = now_ns.saturating_add(DELAYED_ACK_NS);
        }
        let low = self.options.receive_low_water_bytes;
        if !had_data || self.readable() >= low {
            self.is.insert(Is::TELL_READABLE);
        }
        Ok(())
    }

    fn take_out_of_order(
        &mut self,
        start: Seq,
        data: &[u8],
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        let end = start + data.len() as u32;
        // RFC 5681 section 4.2: at once, so that the peer learns of the gap.
        self.acknowledge_now();
        if !self.is.contains(Is::SACK) {
            self.acks_owed = self.acks_owed.saturating_add(1);
        }
        if self.gaps.as_ref().is_some_and(|gaps| gaps.contains(start, end)) {
            self.note_duplicate(start, end);
            return Ok(());
        }
        let has_room = self.gaps.as_ref().is_none_or(|gaps| gaps.has_room(start, end));
        if !has_room || shared.chunks.is_scarce() {
            return Err(DropReason::TcpMemory);
        }
        self.store(start, data, shared)?;
        let mut gaps = self.gaps.take().unwrap_or_else(|| shared.take_gaps());
        gaps.insert(start, end);
        self.gaps = Some(gaps);
        Ok(())
    }

    /// Takes data out of order that was saved, if there is room for it: who
    /// sent it has it still (RFC 2018 section 8).
    pub(crate) fn take_up_out_of_order(&mut self, start: Seq, data: &[u8], shared: &mut Shared) {
        let end = start + data.len() as u32;
        let fits =
            start.is_after(self.rcv_nxt) && start.is_before(end) && end.is_up_to(self.rcv_edge);
        let has_room = self.gaps.as_ref().is_none_or(|gaps| gaps.has_room(start, end));
        if !fits || !has_room || shared.chunks.is_scarce() {
            return;
        }
        if self.store(start, data, shared).is_ok() {
            let mut gaps = self.gaps.take().unwrap_or_else(|| shared.take_gaps());
            gaps.insert(start, end);
            self.gaps = Some(gaps);
        }
    }

    /// Puts data where it belongs.
    fn store(&mut self, start: Seq, data: &[u8], shared: &mut Shared) -> Result<(), DropReason> {
        let at = start.since(self.read_seq) as usize;
        let end = at + data.len();
        let allowed = at < shared.chunks.allowance_bytes();
        if !allowed || !self.incoming.grow(&mut shared.chunks, at, end) {
            return Err(DropReason::TcpMemory);
        }
        self.incoming.write(&mut shared.chunks, at, data);
        Ok(())
    }

    /// RFC 2883: the peer shall know that it sent something needlessly.
    pub(crate) fn note_duplicate(&mut self, start: Seq, end: Seq) {
        if self.is.contains(Is::SACK) && start.is_before(end) {
            self.duplicate = (start, end);
        }
        self.acknowledge_now();
    }

    /// Whether something came twice that the peer has not been told of.
    pub(crate) fn has_duplicate(&self) -> bool {
        self.duplicate.0 != self.duplicate.1
    }

    pub(crate) fn acknowledge_now(&mut self) {
        self.is.insert(Is::ACK_NOW);
        self.is.insert(Is::WANTS_OUTPUT);
    }

    /// An acknowledgement has gone out.
    pub(crate) fn on_acknowledgement_sent(&mut self) {
        self.is.remove(Is::ACK_NOW);
        self.acks_owed = self.acks_owed.saturating_sub(1);
        self.unacknowledged = 0;
        self.consumed = 0;
        self.ack_at_ns = NEVER;
        self.last_ack_sent = self.rcv_nxt;
    }

    /// The peer's FIN has its turn (RFC 9293 section 3.10.7.4, eighth).
    pub(crate) fn take_fin(&mut self, now_ns: u64, shared: &mut Shared) {
        self.rcv_nxt += 1;
        self.rcv_edge = self.rcv_edge.max(self.rcv_nxt);
        self.is.insert(Is::FIN_RECEIVED);
        // Nothing can come behind it.
        self.release_gaps(shared);
        self.acknowledge_now();
        self.is.insert(Is::TELL_READABLE);
        match self.state {
            TcpState::Established => self.state = TcpState::CloseWait,
            TcpState::FinWait1 if self.fin_acknowledged() => self.enter_time_wait(now_ns, shared),
            TcpState::FinWait1 => self.state = TcpState::Closing,
            TcpState::FinWait2 => self.enter_time_wait(now_ns, shared),
            _ => {}
        }
    }

    /// Copies what has arrived to `buf` and takes it away. Returns how much.
    pub(crate) fn read(&mut self, buf: &mut [u8], shared: &mut Shared) -> usize {
        let len = buf.len().min(self.readable() as usize);
        self.incoming.read(&shared.chunks, 0, &mut buf[..len]);
        self.consume(len, shared);
        len
    }

    /// Takes `len` bytes away that have been read, and tells the peer of the
    /// room when that is worth it.
    pub(crate) fn consume(&mut self, len: usize, shared: &mut Shared) {
        self.read_seq += len as u32;
        self.consumed = self.consumed.saturating_add(len as u32);
        if self.readable() == 0 && self.gaps.is_none() {
            self.incoming.clear(&mut shared.chunks);
        } else {
            self.incoming.consume(&mut shared.chunks, len);
        }
        let receives =
            matches!(self.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
        if receives && self.window_grew() {
            self.acknowledge_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(gaps: &Gaps) -> Vec<(u32, u32)> {
        let mut blocks = [(Seq(0), Seq(0)); MOST_BLOCKS];
        let count = gaps.blocks(&mut blocks);
        blocks[..count].iter().map(|&(start, end)| (start.0, end.0)).collect()
    }

    #[test]
    fn rfc2018_4_the_block_that_grew_last_comes_first() {
        let mut gaps = Gaps::default();
        for start in [100, 300, 500, 700, 900] {
            gaps.insert(Seq(start), Seq(start + 50));
        }
        assert_eq!(blocks(&gaps), [(900, 950), (700, 750), (500, 550), (300, 350)]);
        gaps.insert(Seq(150), Seq(160));
        assert_eq!(blocks(&gaps)[..2], [(100, 160), (900, 950)]);
        gaps.insert(Seq(140), Seq(720));
        assert_eq!(blocks(&gaps), [(100, 750), (900, 950)], "overlaps become one");
        assert!(gaps.contains(Seq(100), Seq(750)) && !gaps.contains(Seq(740), Seq(910)));
        assert_eq!(gaps.join(Seq(100)), Seq(750));
        assert_eq!(gaps.join(Seq(800)), Seq(800));
        assert_eq!(blocks(&gaps), [(900, 950)]);
    }

    #[test]
    fn stretches_are_bounded_but_may_grow() {
        let mut gaps = Gaps::default();
        for n in 0..MOST_RANGES as u32 {
            assert!(gaps.has_room(Seq(n * 10), Seq(n * 10 + 1)));
            gaps.insert(Seq(n * 10), Seq(n * 10 + 1));
        }
        assert!(!gaps.has_room(Seq(5), Seq(6)));
        assert!(gaps.has_room(Seq(1), Seq(6)));
    }

    #[test]
    fn ranges_survive_the_wrap() {
        let mut gaps = Gaps::default();
        gaps.insert(Seq(u32::MAX - 10), Seq(5));
        gaps.insert(Seq(5), Seq(20));
        assert_eq!(blocks(&gaps), [(u32::MAX - 10, 20)]);
        assert_eq!(gaps.join(Seq(u32::MAX - 10)), Seq(20));
    }
}
