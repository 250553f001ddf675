//! State of a connection in the kernel's form (`TCP_INFO`), as far as Tidegate knows it.

use tidegate::{RecoveryPhase, TcpInfo, TcpState};

/// The kernel's number of a TCP state (`tcp_states.h`).
fn state_number(state: TcpState) -> u8 {
    match state {
        TcpState::Established => 1,
        TcpState::SynSent => 2,
        TcpState::SynReceived => 3,
        TcpState::FinWait1 => 4,
        TcpState::FinWait2 => 5,
        TcpState::TimeWait => 6,
        TcpState::Closed => 7,
        TcpState::CloseWait => 8,
        TcpState::LastAck => 9,
        TcpState::Closing => 11,
    }
}

/// State of a listener as `TCP_INFO`. Other fields are 0.
pub fn of_listener() -> [u8; size_of::<libc::tcp_info>()] {
    let mut raw = [0; _];
    // `TCP_LISTEN`, in the first field.
    raw[0] = 10;
    raw
}

/// State of a connection as `TCP_INFO`. Fields that Tidegate does not know are 0.
pub fn to_kernel(info: &TcpInfo) -> [u8; size_of::<libc::tcp_info>()] {
    let us = |ns: u64| u32::try_from(ns / 1_000).unwrap_or(u32::MAX);
    let mss = u32::from(info.mss_bytes).max(1);
    // SAFETY: a plain struct of integers, for which zero is valid.
    let mut raw: libc::tcp_info = unsafe { std::mem::zeroed() };
    raw.tcpi_state = state_number(info.state);
    // Numbers of `tcp_ca_state` (`linux/tcp.h`).
    raw.tcpi_ca_state = match info.recovery {
        RecoveryPhase::Open => 0,
        RecoveryPhase::FastRecovery => 3,
        RecoveryPhase::Loss => 4,
    };
    raw.tcpi_retransmits = info.retries;
    let has_shifts = info.send_window_shift > 0 || info.receive_window_shift > 0;
    raw.tcpi_options = u8::from(info.timestamps)
        | u8::from(info.sack) << 1
        | u8::from(has_shifts) << 2
        | u8::from(info.ecn) << 3;
    raw.tcpi_snd_rcv_wscale = info.send_window_shift | info.receive_window_shift << 4;
    raw.tcpi_rto = us(info.rto_ns);
    raw.tcpi_snd_mss = mss;
    raw.tcpi_rcv_mss = mss;
    raw.tcpi_unacked = info.unacknowledged_bytes.saturating_sub(info.unsent_bytes).div_ceil(mss);
    raw.tcpi_lost = info.lost_bytes.div_ceil(mss);
    raw.tcpi_pmtu = mss + 40;
    raw.tcpi_rtt = info.rtt_ns.map_or(0, us);
    raw.tcpi_rttvar = us(info.rtt_variation_ns);
    raw.tcpi_snd_ssthresh = info.ssthresh_bytes / mss;
    raw.tcpi_snd_cwnd = info.cwnd_bytes / mss;
    raw.tcpi_advmss = mss;
    raw.tcpi_rcv_space = info.receive_window_bytes;
    raw.tcpi_total_retrans = info.traffic.retransmitted_segments;
    raw.tcpi_bytes_acked = info.traffic.acknowledged_bytes;
    raw.tcpi_bytes_received = info.traffic.received_bytes;
    raw.tcpi_segs_out = info.traffic.sent_segments;
    raw.tcpi_segs_in = info.traffic.received_segments;
    raw.tcpi_notsent_bytes = info.unsent_bytes;
    // The kernel, too, reports this without a sample.
    raw.tcpi_min_rtt = info.min_rtt_ns.map_or(u32::MAX, us);
    raw.tcpi_delivery_rate = u64::from(info.traffic.delivery_bytes_per_ms) * 1_000;
    raw.tcpi_snd_wnd = info.send_window_bytes;
    raw.tcpi_rcv_wnd = info.receive_window_bytes;
    // SAFETY: a struct of integers as bytes, without padding but for what was set to zero.
    unsafe { std::mem::transmute(raw) }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn window_shifts_and_losses_are_reported() {
        let info = TcpInfo {
            mss_bytes: 1000,
            lost_bytes: 2500,
            unacknowledged_bytes: 9000,
            unsent_bytes: 4000,
            send_window_shift: 7,
            receive_window_shift: 10,
            retries: 3,
            ..TcpInfo::unknown(TcpState::Established)
        };
        let raw = to_kernel(&info);
        let word = |at: usize| u32::from_ne_bytes(raw[at..at + 4].try_into().unwrap());
        assert_eq!((raw[2], raw[5], raw[6]), (3, 1 << 2, 0xa7));
        let (unacked, lost) =
            (offset_of!(libc::tcp_info, tcpi_unacked), offset_of!(libc::tcp_info, tcpi_lost));
        assert_eq!((word(unacked), word(lost)), (5, 3));
    }
}
