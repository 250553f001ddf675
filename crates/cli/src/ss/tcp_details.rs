//! Details of a connection, with the names of iproute2's `ss -i`.

use tidegate::TcpInfo;

/// Line of details.
pub(super) fn line(info: &TcpInfo) -> String {
    let mut words = Vec::new();
    for (name, is_set) in [("ts", info.timestamps), ("sack", info.sack), ("ecn", info.ecn)] {
        if is_set {
            words.push(name.to_owned());
        }
    }
    words.push(format!("wscale:{},{}", info.send_window_shift, info.receive_window_shift));
    words.push(format!("rto:{}", millis(info.rto_ns)));
    if let Some(rtt_ns) = info.rtt_ns {
        words.push(format!("rtt:{}/{}", millis(rtt_ns), millis(info.rtt_variation_ns)));
    }
    if let Some(min_ns) = info.min_rtt_ns {
        words.push(format!("minrtt:{}", millis(min_ns)));
    }
    let mss = u32::from(info.mss_bytes).max(1);
    words.push(format!("mss:{mss} cwnd:{}", info.cwnd_bytes / mss));
    if info.ssthresh_bytes < u32::MAX {
        words.push(format!("ssthresh:{}", info.ssthresh_bytes / mss));
    }
    let traffic = &info.traffic;
    for (name, count) in [
        ("bytes_acked", traffic.acknowledged_bytes),
        ("bytes_received", traffic.received_bytes),
        ("segs_out", traffic.sent_segments.into()),
        ("segs_in", traffic.received_segments.into()),
        ("notsent", info.unsent_bytes.into()),
        ("unacked", info.unacknowledged_bytes.into()),
        ("lost", info.lost_bytes.into()),
    ] {
        if count > 0 {
            words.push(format!("{name}:{count}"));
        }
    }
    if traffic.retransmitted_segments > 0 || info.retries > 0 {
        words.push(format!("retrans:{}/{}", info.retries, traffic.retransmitted_segments));
    }
    if traffic.delivery_bytes_per_ms > 0 {
        words.push(format!("delivery_rate {}bps", u64::from(traffic.delivery_bytes_per_ms) * 8000));
    }
    words.push(format!("snd_wnd:{} rcv_wnd:{}", info.send_window_bytes, info.receive_window_bytes));
    words.join(" ")
}

/// Milliseconds with three decimals at most.
fn millis(ns: u64) -> f64 {
    (ns / 1000) as f64 / 1000.0
}
