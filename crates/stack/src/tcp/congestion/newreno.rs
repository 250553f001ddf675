//! NewReno (RFC 5681; what RFC 6582 adds is in how recovery goes).

use super::{Acked, Congestion, Window};

#[derive(Clone, Copy, Debug)]
pub(super) struct NewReno;

impl Congestion for NewReno {
    /// RFC 5681 section 3.1, equation 3, by bytes.
    fn on_ack(&mut self, window: &mut Window, acked: &Acked) {
        let bytes = acked.bytes.min(window.cwnd);
        let grown = u64::from(acked.mss) * u64::from(bytes) / u64::from(window.cwnd.max(1));
        window.cwnd = window.cwnd.saturating_add((grown as u32).max(1));
    }

    /// RFC 5681 section 3.1, equation 4.
    fn on_congestion(&mut self, _window: &Window, flight: u32, _mss: u32) -> u32 {
        flight / 2
    }

    fn on_timeout(&mut self) {}

    fn on_idle(&mut self, _idle_ns: u64) {}
}
