//! NewReno congestion control (RFC 5681; RFC 6582 is implemented in `recovery`).

use super::{AckInfo, CongestionAlgorithm, CongestionWindow};

#[derive(Clone, Copy, Debug)]
pub(super) struct NewReno;

impl CongestionAlgorithm for NewReno {
    /// Adds one segment per round trip, counted by bytes (RFC 5681 section 3.1, equation 3).
    fn on_ack(&mut self, window: &mut CongestionWindow, acked: &AckInfo) {
        let bytes = acked.bytes.min(window.cwnd);
        let grown = u64::from(acked.mss) * u64::from(bytes) / u64::from(window.cwnd.max(1));
        window.cwnd = window.cwnd.saturating_add((grown as u32).max(1));
    }

    /// Halves the flight (RFC 5681 section 3.1, equation 4).
    fn on_congestion(&mut self, _window: &CongestionWindow, flight: u32, _mss: u32) -> u32 {
        flight / 2
    }

    fn pause_growth(&mut self) {}
}
