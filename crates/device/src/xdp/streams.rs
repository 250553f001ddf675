//! Choice between AF_XDP and AF_PACKET on a veth, by what the device moves.
//!
//! AF_XDP takes a single frame for less, and holds under a flood. But a native program makes peers
//! on this machine send every segment as a frame of its own, since the driver cannot hand larger
//! ones to it. A packet socket takes frames of 64 KiB: it moves streams of bytes faster, in both
//! directions.

use std::time::{Duration, Instant};

/// Duration of a measurement window.
const WINDOW: Duration = Duration::from_millis(20);
/// Consecutive windows with streams before AF_PACKET takes the frames.
const STREAM_WINDOWS: u32 = 2;
/// Time without streams after which AF_XDP returns.
const CALM: Duration = Duration::from_secs(1);
/// Minimum rate of a stream, in bytes/s: a gigabit a second.
const STREAM_BYTES_PER_SECOND: u64 = 125_000_000;
/// Minimum bytes of a frame received from a stream: most are whole segments.
const SEGMENT_BYTES: u64 = 1_000;
/// Minimum bytes of a frame that stands for several segments, on average.
const COALESCED_BYTES: u64 = 4_096;
/// Minimum bytes sent for each frame received, by a stream whose peer acknowledges many segments at
/// once: it receives them as one.
const SENT_BYTES_PER_ACK: u64 = 8_192;
/// Maximum rate of frames by AF_PACKET: beyond, AF_XDP takes them for less.
const MAX_PACKET_FRAMES_PER_SECOND: u64 = 60_000;
/// First and last time for which AF_XDP stays after a flood of frames has ended AF_PACKET. Each time
/// is twice the one before.
const MIN_HOLD: Duration = Duration::from_secs(2);
const MAX_HOLD: Duration = Duration::from_secs(128);

/// Traffic of a device so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrafficTotals {
    /// Frames that the kernel has delivered, each before it is split.
    pub(super) arrived_frames: u64,
    pub(super) received_bytes: u64,
    /// Frames by AF_XDP whose checksum is unfilled: those of a sender on this machine that leaves
    /// checksums, and so perhaps segments, to its device.
    pub(super) unfilled_frames: u64,
    pub(super) sent_bytes: u64,
}

/// Way of received frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceivePath {
    /// AF_XDP sockets, by a native program.
    Xdp,
    /// A packet socket; no program is attached.
    Packet,
}

/// Measures the traffic, and decides on the way of received frames.
#[derive(Debug)]
pub(super) struct StreamMonitor {
    window_start: Instant,
    at_start: TrafficTotals,
    /// Consecutive windows with streams.
    stream_windows: u32,
    /// End of the last window with streams.
    last_stream: Instant,
    /// Earliest time of AF_PACKET; `None`: never.
    not_before: Option<Instant>,
    hold: Duration,
}

/// Rates of one window, per second, and the traffic in it.
struct Window {
    frames: TrafficTotals,
    time: Duration,
}

impl Window {
    fn per_second(&self, count: u64) -> u64 {
        (u128::from(count) * 1_000_000_000 / self.time.as_nanos().max(1)) as u64
    }

    /// True if a stream of bytes is received or sent that AF_PACKET may move faster.
    fn has_stream(&self, min_frame_bytes: u64) -> bool {
        let TrafficTotals { arrived_frames, received_bytes, sent_bytes, .. } = self.frames;
        let is_stream = |bytes, min_bytes_per_frame| {
            self.per_second(bytes) >= STREAM_BYTES_PER_SECOND
                && bytes >= min_bytes_per_frame * arrived_frames
        };
        is_stream(received_bytes, min_frame_bytes) || is_stream(sent_bytes, SENT_BYTES_PER_ACK)
    }

    /// True if the sender of most frames may send larger ones.
    fn has_offloads(&self) -> bool {
        2 * self.frames.unfilled_frames >= self.frames.arrived_frames
    }

    fn has_flood(&self) -> bool {
        self.per_second(self.frames.arrived_frames) > MAX_PACKET_FRAMES_PER_SECOND
            && self.frames.received_bytes < COALESCED_BYTES * self.frames.arrived_frames
    }
}

impl StreamMonitor {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            window_start: now,
            at_start: TrafficTotals::default(),
            stream_windows: 0,
            last_stream: now,
            not_before: Some(now),
            hold: MIN_HOLD,
        }
    }

    /// Keeps AF_XDP for good.
    pub(super) fn keep_xdp(&mut self) {
        self.not_before = None;
    }

    /// True once the window is over, so that [`StreamMonitor::next_path`] decides.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now.duration_since(self.window_start) >= WINDOW
    }

    /// Begins a window after a change, with this traffic so far.
    pub(super) fn restart(&mut self, totals: TrafficTotals, now: Instant) {
        (self.at_start, self.window_start) = (totals, now);
    }

    /// Ends the window with this traffic so far. Returns the way for the next one.
    pub(super) fn next_path(
        &mut self,
        path: ReceivePath,
        totals: TrafficTotals,
        now: Instant,
    ) -> ReceivePath {
        let before = self.at_start;
        let frames = TrafficTotals {
            arrived_frames: totals.arrived_frames - before.arrived_frames,
            received_bytes: totals.received_bytes - before.received_bytes,
            unfilled_frames: totals.unfilled_frames - before.unfilled_frames,
            sent_bytes: totals.sent_bytes - before.sent_bytes,
        };
        let window = Window { frames, time: now.duration_since(self.window_start) };
        self.restart(totals, now);
        match path {
            ReceivePath::Xdp => self.after_xdp(&window, now),
            ReceivePath::Packet => self.after_packet(&window, now),
        }
    }

    fn after_xdp(&mut self, window: &Window, now: Instant) -> ReceivePath {
        self.stream_windows = match window.has_offloads() && window.has_stream(SEGMENT_BYTES) {
            true => self.stream_windows + 1,
            false => 0,
        };
        let may_change = self.not_before.is_some_and(|not_before| now >= not_before);
        if self.stream_windows < STREAM_WINDOWS || !may_change {
            return ReceivePath::Xdp;
        }
        self.last_stream = now;
        ReceivePath::Packet
    }

    fn after_packet(&mut self, window: &Window, now: Instant) -> ReceivePath {
        self.stream_windows = 0;
        if window.has_flood() {
            if window.has_stream(SEGMENT_BYTES) {
                // The peer sends every segment as a frame of its own, whatever takes it.
                self.hold = MAX_HOLD;
            }
            self.not_before = self.not_before.map(|_| now + self.hold);
            self.hold = (2 * self.hold).min(MAX_HOLD);
            return ReceivePath::Xdp;
        }
        if window.has_stream(COALESCED_BYTES) {
            self.last_stream = now;
        }
        match now.duration_since(self.last_stream) >= CALM {
            true => ReceivePath::Xdp,
            false => ReceivePath::Packet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ReceivePath::{Packet, Xdp};
    use super::*;

    /// Traffic of one second: frames that arrive, their bytes, and the bytes that are sent.
    type PerSecond = (u64, u64, u64);

    const IDLE: PerSecond = (0, 0, 0);
    const REQUESTS: PerSecond = (150_000, 15_000_000, 15_000_000);
    const STREAM_IN: PerSecond = (600_000, 900_000_000, 20_000_000);
    const COALESCED_IN: PerSecond = (30_000, 1_500_000_000, 2_000_000);
    const STREAM_OUT: PerSecond = (40_000, 3_000_000, 2_000_000_000);
    const STREAM_OUT_IN_FRAMES: PerSecond = (400_000, 26_000_000, 1_200_000_000);
    const FLOOD_AND_STREAM: PerSecond = (500_000, 300_000_000, 2_000_000);

    struct Device {
        monitor: StreamMonitor,
        path: ReceivePath,
        totals: TrafficTotals,
        now: Instant,
        fills_checksums: bool,
    }

    impl Device {
        fn new() -> Self {
            let now = Instant::now();
            let (monitor, path) = (StreamMonitor::new(now), Xdp);
            let totals = TrafficTotals::default();
            Self { monitor, path, totals, now, fills_checksums: false }
        }

        /// Offers traffic for some milliseconds; returns the ways that the device changes to.
        fn offer(&mut self, (frames, received, sent): PerSecond, ms: u64) -> Vec<ReceivePath> {
            let mut changes = Vec::new();
            for _ in 0..ms {
                self.now += Duration::from_millis(1);
                self.totals.arrived_frames += frames / 1_000;
                self.totals.received_bytes += received / 1_000;
                if !self.fills_checksums {
                    self.totals.unfilled_frames += frames / 1_000;
                }
                self.totals.sent_bytes += sent / 1_000;
                if self.monitor.is_due(self.now) {
                    let next = self.monitor.next_path(self.path, self.totals, self.now);
                    if std::mem::replace(&mut self.path, next) != next {
                        changes.push(next);
                    }
                }
            }
            changes
        }

        /// Offers traffic until the way changes; returns it and the milliseconds until then.
        fn offer_until_change(&mut self, traffic: PerSecond) -> (ReceivePath, u64) {
            for ms in 1..1_000_000 {
                if let [path] = self.offer(traffic, 1)[..] {
                    return (path, ms);
                }
            }
            panic!("the way stays {:?}", self.path)
        }
    }

    #[test]
    fn streams_change_to_packets_and_their_end_back() {
        for (stream, as_packets) in [(STREAM_IN, COALESCED_IN), (STREAM_OUT, STREAM_OUT)] {
            let mut device = Device::new();
            assert_eq!(device.offer(REQUESTS, 500), []);
            assert_eq!(device.offer(stream, 25), [], "a burst is no stream");
            assert_eq!(device.offer_until_change(stream), (Packet, 15));
            assert_eq!(device.offer(as_packets, 5_000), []);
            assert_eq!(device.offer(IDLE, 900), [], "a pause");
            assert_eq!(device.offer(as_packets, 100), []);
            assert_eq!(device.offer_until_change(IDLE), (Xdp, 1_000));
            assert_eq!(device.offer_until_change(stream), (Packet, 40));
        }
    }

    #[test]
    fn single_frames_stay_with_xdp() {
        for traffic in [REQUESTS, STREAM_OUT_IN_FRAMES, FLOOD_AND_STREAM] {
            assert_eq!(Device::new().offer(traffic, 1_000), [], "{traffic:?}");
        }
    }

    #[test]
    fn flood_ends_packets_for_longer_each_time() {
        let mut device = Device::new();
        for seconds in [0, 2, 4, 8, 16, 32, 64, 128, 128] {
            let (path, after_ms) = device.offer_until_change(STREAM_IN);
            assert_eq!((path, after_ms), (Packet, (1_000 * seconds).max(40)));
            assert_eq!(device.offer(COALESCED_IN, 1_000), []);
            assert_eq!(device.offer_until_change(FLOOD_AND_STREAM), (Xdp, 20));
        }
    }

    #[test]
    fn sender_without_offloads_stays_with_xdp() {
        for stream in [STREAM_IN, STREAM_OUT] {
            let mut device = Device::new();
            device.fills_checksums = true;
            assert_eq!(device.offer(stream, 1_000), []);
        }
    }

    #[test]
    fn peer_that_sends_single_segments_is_not_tried_again_soon() {
        let mut device = Device::new();
        assert_eq!(device.offer(STREAM_IN, 40), [Packet]);
        assert_eq!(device.offer_until_change(STREAM_IN), (Xdp, 20));
        assert_eq!(device.offer_until_change(STREAM_IN), (Packet, 128_000));
    }

    #[test]
    fn traffic_of_a_change_counts_for_neither_way() {
        let mut device = Device::new();
        device.offer_until_change(STREAM_IN);
        device.totals.arrived_frames += 60_000;
        device.now += Duration::from_millis(100);
        device.monitor.restart(device.totals, device.now);
        assert_eq!(device.offer(COALESCED_IN, 100), []);
    }
}
