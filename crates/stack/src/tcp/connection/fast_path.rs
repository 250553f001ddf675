//! Fast path of an undisturbed connection: receives the segment that is expected next (header
//! prediction: RFC 7323 section 5.6; Jacobson, "4BSD Header Prediction", 1990), and sends a message
//! while nothing is in flight.
//!
//! `arrival` and `output` do the same for every segment, with more instructions. The connection
//! behaves the same without this module: a test compares both.

use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::segment::{DataHeader, Segment};
use crate::tcp::socket::TcpState;
use crate::tcp::timers::RtxTimer;

/// Options that both sides use.
const OPTIONS: ConnFlags = ConnFlags::TIMESTAMPS.union(ConnFlags::SACK);

/// Flags with which segments are received as in `arrival`.
const DISTURBS_RECEIVING: ConnFlags = ConnFlags::ORPHAN
    .union(ConnFlags::IN_SYN_QUEUE)
    .union(ConnFlags::ECN)
    .union(ConnFlags::FIN_QUEUED)
    .union(ConnFlags::FIN_RECEIVED)
    .union(ConnFlags::READ_SHUT);

/// Flags with which segments are sent as in `output`.
const DISTURBS_SENDING: ConnFlags = ConnFlags::ECN
    .union(ConnFlags::FIN_QUEUED)
    .union(ConnFlags::KEEPALIVE_NOW)
    .union(ConnFlags::FORCE_RETRANSMISSION)
    .union(ConnFlags::FORCE_OUTPUT)
    .union(ConnFlags::TAIL_PROBE_NOW);

impl Connection {
    /// True if both sides use the usual options, and none of `disturbing` is set.
    #[inline(always)]
    fn is_undisturbed(&self, disturbing: ConnFlags) -> bool {
        #[cfg(test)]
        if !tests::IS_ENABLED.get() {
            return false;
        }
        self.state == TcpState::Established
            && self.flags.intersection(OPTIONS | disturbing).bits() == OPTIONS.bits()
            && self.timers.rtx != RtxTimer::Persist
    }

    /// Processes a segment if it is as predicted: the next data, which fits the window and is not
    /// beyond a gap, with an acknowledgement for everything that was sent. `None` for another
    /// segment, of which nothing is processed.
    #[inline(always)]
    pub(crate) fn handle_predicted(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut TcpShared,
    ) -> Option<Result<(), DropReason>> {
        let (ts_value, _) = segment.options.timestamps?;
        let receive = &self.receive;
        let data_bytes = segment.payload.len() as u32;
        let is_predicted = segment.flags | TcpFlags::PSH == TcpFlags::ACK | TcpFlags::PSH
            && segment.seq == receive.nxt
            && segment.ack == self.send.nxt
            && segment.options.sack.is_none()
            && segment.window > 0
            && (1..=receive.window()).contains(&data_bytes)
            && ts_value.wrapping_sub(receive.ts_recent) as i32 >= 0
            && receive.out_of_order.is_none()
            && self.listener.is_none()
            && self.is_undisturbed(DISTURBS_RECEIVING);
        if !is_predicted {
            return None;
        }
        let sent_ns = match &self.recovery.flight {
            None => None,
            Some(_) => Some(self.recovery.undisturbed_since_ns()?),
        };
        self.traffic.received_segments = self.traffic.received_segments.wrapping_add(1);
        self.accept_timestamps(now_ns, segment);
        self.timers.keepalive_probes_sent = 0;
        self.update_send_window(segment, true);
        if let Some(sent_ns) = sent_ns {
            self.on_ack_of_all(now_ns, segment, now_ns.saturating_sub(sent_ns), shared);
        }
        if self.send.unsent() > 0 {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        } else {
            self.timers.clear_rtx();
        }
        self.note_segment_size(segment.payload.len(), shared.link_mss);
        Some(self.accept_in_order(now_ns, segment.payload, shared).map(|_| ()))
    }

    /// Bytes of all that waits to be sent, if they may leave now as one segment on a path with an
    /// MTU of `mtu` bytes, while nothing is in flight. `None` if `output` has to decide.
    #[inline(always)]
    pub(crate) fn lone_segment_bytes(&mut self, mtu: usize) -> Option<u32> {
        let is_lone = self.recovery.flight.is_none()
            && self.recovery.is_undisturbed()
            && self.receive.out_of_order.is_none()
            && !self.receive.has_dsack_range()
            && !self.options.cork
            && self.is_undisturbed(DISTURBS_SENDING);
        if !is_lone {
            return None;
        }
        self.set_mtu(mtu);
        let bytes = self.send.unsent();
        let max_bytes = self.send.usable_window().min(self.send.mss.into());
        (1..=max_bytes).contains(&bytes).then_some(bytes)
    }

    /// Returns the header of the segment of which [`Connection::lone_segment_bytes`] gave the size.
    #[inline(always)]
    pub(crate) fn take_lone_segment(
        &mut self,
        now_ns: u64,
        bytes: u32,
        shared: &mut TcpShared,
    ) -> DataHeader {
        self.restart_after_idle(now_ns);
        let mss = u32::from(self.send.mss);
        let is_limited = bytes + mss > self.recovery.controller.window.cwnd;
        self.flags.set(ConnFlags::WINDOW_LIMITED, is_limited);
        let start = self.send.nxt;
        self.record_sent(now_ns, shared, start, start + bytes, false, false);
        self.recovery.count_sent(bytes);
        if bytes < mss {
            self.send.small_segment_end = self.send.nxt;
        }
        self.flags.remove(ConnFlags::WANTS_OUTPUT);
        self.traffic.sent_segments = self.traffic.sent_segments.wrapping_add(1);
        self.arm_timer(now_ns);
        let header = DataHeader {
            sequence: start,
            acknowledgement: self.receive.nxt,
            window: self.window_field(true),
            timestamps: (self.send.timestamp(now_ns), self.receive.ts_recent),
        };
        self.on_ack_sent();
        header
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::{IpAddr, SocketAddr};

    use proptest::prelude::*;
    use tidegate_memory::{Arena, ArenaConfig, Fifo, FrameSize};
    use tidegate_wire::{IpCidr, MacAddr};

    use crate::{Config, Keepalive, Shutdown, Stack, TcpId, TcpOptions};

    thread_local! {
        /// False while every segment is left to `arrival` and `output`.
        pub(super) static IS_ENABLED: Cell<bool> = const { Cell::new(true) };
    }

    /// Step of a run of two hosts, of which the first number selects one.
    #[derive(Clone, Debug)]
    enum Step {
        Send(usize, usize),
        Read(usize, usize),
        /// All frames arrive, but for those whose bits are set.
        Exchange(u8),
        /// The frames arrive in reverse order.
        Reverse,
        Pass(u64),
        Shutdown(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            120 => (0..2_usize, 1..200_usize).prop_map(|(host, len)| Step::Send(host, len)),
            20 => (0..2_usize, 1..40_000_usize).prop_map(|(host, len)| Step::Send(host, len)),
            100 => (0..2_usize, 1..40_000_usize).prop_map(|(host, len)| Step::Read(host, len)),
            160 => Just(Step::Exchange(0)),
            20 => any::<u8>().prop_map(Step::Exchange),
            10 => Just(Step::Reverse),
            40 => (0..60_000_000_u64).prop_map(Step::Pass),
            10 => (0..5_000_000_000_u64).prop_map(Step::Pass),
            4 => (0..2_usize).prop_map(Step::Shutdown),
        ]
    }

    struct TestHost {
        stack: Stack,
        arena: Arena,
    }

    struct Run {
        hosts: [TestHost; 2],
        now_ns: u64,
        /// All that can be seen from outside.
        seen: Vec<String>,
    }

    fn address(ipv6: bool, host: u8) -> IpAddr {
        match ipv6 {
            false => [192, 0, 2, host].into(),
            true => [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(host)].into(),
        }
    }

    impl Run {
        fn new(ipv6: bool) -> Self {
            let mac = |host: u8| MacAddr([2, 0, 0, 0, 0, host]);
            let host = |own: u8, peer: u8| {
                let config =
                    ArenaConfig { frames: 256, frame_size: FrameSize::K2, hugepages: false };
                let mut arena = Arena::new(config).unwrap();
                let mut config = Config::ethernet(mac(own), [own; 16]);
                let bits = if ipv6 { 64 } else { 24 };
                config.addresses = vec![IpCidr::new(address(ipv6, own), bits).unwrap()];
                let mut stack = Stack::new(config, 0).unwrap();
                stack.set_neighbour(0, address(ipv6, peer), Some(mac(peer)), &mut arena);
                TestHost { stack, arena }
            };
            Self { hosts: [host(1, 2), host(2, 1)], now_ns: 0, seen: Vec::new() }
        }

        fn connect(&mut self, ipv6: bool, options: TcpOptions) -> [TcpId; 2] {
            let server = SocketAddr::new(address(ipv6, 2), 7);
            let listener = self.hosts[1].stack.tcp_listen(server, 4, options).unwrap();
            let TestHost { stack, arena } = &mut self.hosts[0];
            let client = stack.tcp_connect(0, arena, None, server, options).unwrap();
            (0..3).for_each(|_| self.exchange(0, false));
            [client, self.hosts[1].stack.tcp_accept(listener).unwrap()]
        }

        /// Delivers what both hosts have sent, but for the frames that are `lost`.
        fn exchange(&mut self, lost: u8, reversed: bool) {
            self.now_ns += 10_000;
            for from in 0..2 {
                let TestHost { stack, arena } = &mut self.hosts[from];
                let mut frames = Vec::new();
                while let Some(frame) = stack.transmit_queue().pop_front() {
                    frames.push(arena.bytes(&frame).to_vec());
                    arena.free(frame);
                }
                self.seen.push(format!("{from} sent {frames:?}"));
                if reversed {
                    frames.reverse();
                }
                let TestHost { stack, arena } = &mut self.hosts[1 - from];
                let mut burst = Fifo::with_capacity(256);
                for (at, bytes) in frames.iter().enumerate() {
                    if at >= 8 || lost >> at & 1 == 0 {
                        burst.push_back(arena.alloc_from(bytes).unwrap());
                    }
                }
                stack.handle_timeout(self.now_ns, arena);
                stack.handle_burst(self.now_ns, &mut burst, arena);
                while let Some(event) = stack.poll_event() {
                    self.seen.push(format!("{} has {event:?}", 1 - from));
                }
            }
        }

        fn take(&mut self, step: &Step, ids: [TcpId; 2]) {
            let now_ns = self.now_ns;
            match *step {
                Step::Send(host, len) => {
                    let TestHost { stack, arena } = &mut self.hosts[host];
                    let sent = stack.tcp_send(now_ns, arena, ids[host], &vec![len as u8; len]);
                    self.seen.push(format!("{sent:?}"));
                }
                Step::Read(host, len) => {
                    let (TestHost { stack, arena }, mut data) =
                        (&mut self.hosts[host], vec![0; len]);
                    let read = stack.tcp_recv(now_ns, arena, ids[host], &mut data);
                    self.seen.push(format!("{read:?} {data:?}"));
                }
                Step::Exchange(lost) => self.exchange(lost, false),
                Step::Reverse => self.exchange(0, true),
                Step::Pass(ns) => {
                    self.now_ns += ns;
                    for TestHost { stack, arena } in &mut self.hosts {
                        stack.handle_timeout(self.now_ns, arena);
                    }
                }
                Step::Shutdown(host) => {
                    let TestHost { stack, arena } = &mut self.hosts[host];
                    let done = stack.tcp_shutdown(now_ns, arena, ids[host], Shutdown::Write);
                    self.seen.push(format!("{done:?}"));
                }
            }
            for (host, &id) in self.hosts.iter().zip(&ids) {
                let next = host.stack.next_timeout();
                self.seen.push(format!("{next:?} {:?}", host.stack.tcp_info(id)));
            }
        }
    }

    /// All that two hosts show, with the fast path or without.
    fn run(enabled: bool, ipv6: bool, options: TcpOptions, steps: &[Step]) -> Vec<String> {
        IS_ENABLED.set(enabled);
        let mut run = Run::new(ipv6);
        let ids = run.connect(ipv6, options);
        steps.iter().for_each(|step| run.take(step, ids));
        IS_ENABLED.set(true);
        run.seen
    }

    proptest! {
        #[test]
        fn the_fast_path_changes_nothing(
            ipv6: bool,
            no_delay: bool,
            has_keepalive: bool,
            buffer_bytes in prop_oneof![Just(3000_u32), Just(1 << 20)],
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let keepalive = Keepalive { idle_ms: 1000, interval_ms: 500, probes: 3 };
            let options = TcpOptions::default()
                .no_delay(no_delay)
                .keepalive(has_keepalive.then_some(keepalive))
                .receive_buffer_bytes(buffer_bytes)
                .send_buffer_bytes(buffer_bytes);
            let fast = run(true, ipv6, options, &steps);
            let slow = run(false, ipv6, options, &steps);
            for (at, (fast, slow)) in fast.iter().zip(&slow).enumerate() {
                prop_assert_eq!(fast, slow, "at {}", at);
            }
            prop_assert_eq!(fast.len(), slow.len());
        }
    }
}
