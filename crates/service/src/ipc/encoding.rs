//! Encoding of values as words of a message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use tidegate_stack::{
    CongestionControl, Keepalive, RecoveryPhase, TcpInfo, TcpOptions, TcpState, TcpTraffic,
    UdpOptions, UnreachableReason,
};

/// Words of an address with its port.
pub(super) const ADDRESS_WORDS: usize = 3;
/// Words of TCP options.
pub(super) const TCP_OPTIONS_WORDS: usize = 4;

/// Address family; 0 means no address.
const V4: u64 = 4;
const V6: u64 = 6;

pub(super) fn address_to_words(address: Option<SocketAddr>) -> [u64; ADDRESS_WORDS] {
    let Some(address) = address else { return [0; ADDRESS_WORDS] };
    let head = u64::from(address.port()) << 16;
    match address {
        SocketAddr::V4(v4) => [head | V4, u32::from(*v4.ip()).into(), 0],
        SocketAddr::V6(v6) => {
            let bits = u128::from(*v6.ip());
            let scope = u64::from(v6.scope_id()) << 32;
            [head | V6 | scope, (bits >> 64) as u64, bits as u64]
        }
    }
}

/// Decodes an optional address. The outer `None` means that the words are not valid.
pub(super) fn address_from_words(words: [u64; ADDRESS_WORDS]) -> Option<Option<SocketAddr>> {
    let [head, high, low] = words;
    let port = (head >> 16) as u16;
    match head & 0xffff {
        0 => Some(None),
        V4 => Some(Some(SocketAddr::new(Ipv4Addr::from(u32::try_from(high).ok()?).into(), port))),
        V6 => {
            let ip = Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
            Some(Some(SocketAddrV6::new(ip, port, 0, (head >> 32) as u32).into()))
        }
        _ => None,
    }
}

/// Encodes an IP address without a port.
pub(super) fn ip_to_words(ip: IpAddr) -> [u64; ADDRESS_WORDS] {
    address_to_words(Some(SocketAddr::new(ip, 0)))
}

/// Bits of the first word of TCP options, then bits of the UDP options word.
const NO_DELAY: u64 = 1;
const ECN: u64 = 1 << 1;
const DUAL_STACK: u64 = 1 << 2;
const REUSE_PORT: u64 = 1 << 3;
const NEW_RENO: u64 = 1 << 4;
const HOP_LIMIT: u64 = 1 << 5;
const KEEPALIVE: u64 = 1 << 6;
const USER_TIMEOUT: u64 = 1 << 7;
/// Bits of the last word, above the user timeout: buffers that do not grow.
const FIXED_SEND_BUFFER: u64 = 1 << 32;
const FIXED_RECEIVE_BUFFER: u64 = 1 << 33;

const ROUTERS_FRAGMENT: u64 = 1 << 34;
const CORK: u64 = 1 << 35;
/// Place of the limit of FIN-WAIT-2 in the last word, and its largest value; 0 means no limit.
const FIN_WAIT_2_SHIFT: u32 = 36;
const MAX_FIN_WAIT_2_MS: u32 = (1 << 18) - 1;
/// Place of the time for which connections wait for data, and its largest value; 0 means none.
const DEFER_ACCEPT_SHIFT: u32 = 54;
const MAX_DEFER_ACCEPT_S: u16 = (1 << 10) - 1;

const UDP_DUAL_STACK: u64 = 1;
const UDP_REUSE_ADDRESS: u64 = 1 << 1;
const UDP_DONT_FRAGMENT: u64 = 1 << 2;
const UDP_REPORT_ERRORS: u64 = 1 << 3;
const UDP_HOP_LIMIT: u64 = 1 << 4;
const UDP_REUSE_PORT: u64 = 1 << 5;

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// Encodes TCP options without their owner, which the daemon sets from the peer credentials. The
/// limits to which buffers grow are the default, or none.
pub(super) fn tcp_options_to_words(options: &TcpOptions) -> [u64; TCP_OPTIONS_WORDS] {
    let flag = |set: bool, bit| if set { bit } else { 0 };
    let keepalive = options.keepalive.unwrap_or_default();
    let is_send_fixed = options.max_send_buffer_bytes <= options.send_buffer_bytes;
    let is_receive_fixed = options.max_receive_buffer_bytes <= options.receive_buffer_bytes;
    let fin_wait_2_ms =
        options.fin_wait_2_ms.map_or(0, |ms| u64::from(ms.clamp(1, MAX_FIN_WAIT_2_MS)));
    let defer_accept_s =
        options.defer_accept_s.map_or(0, |seconds| u64::from(seconds.min(MAX_DEFER_ACCEPT_S)));
    let head = flag(options.no_delay, NO_DELAY)
        | flag(options.ecn, ECN)
        | flag(options.dual_stack, DUAL_STACK)
        | flag(options.reuse_port, REUSE_PORT)
        | flag(options.congestion_control == CongestionControl::NewReno, NEW_RENO)
        | flag(options.hop_limit.is_some(), HOP_LIMIT)
        | flag(options.keepalive.is_some(), KEEPALIVE)
        | flag(options.user_timeout_ms.is_some(), USER_TIMEOUT)
        | u64::from(options.hop_limit.unwrap_or(0)) << 8
        | u64::from(options.traffic_class) << 16
        | u64::from(keepalive.probes) << 24
        | u64::from(options.receive_low_water_bytes) << 32;
    [
        head,
        pair(options.send_buffer_bytes, options.receive_buffer_bytes),
        pair(keepalive.idle_ms, keepalive.interval_ms),
        u64::from(options.user_timeout_ms.unwrap_or(0))
            | flag(is_send_fixed, FIXED_SEND_BUFFER)
            | flag(is_receive_fixed, FIXED_RECEIVE_BUFFER)
            | flag(!options.dont_fragment, ROUTERS_FRAGMENT)
            | flag(options.cork, CORK)
            | fin_wait_2_ms << FIN_WAIT_2_SHIFT
            | defer_accept_s << DEFER_ACCEPT_SHIFT,
    ]
}

/// Encodes UDP options without owner and the queue limit in datagrams, which the daemon sets.
pub(super) fn udp_options_to_word(options: &UdpOptions) -> u64 {
    let flag = |set: bool, bit| if set { bit } else { 0 };
    // 0 is no limit.
    let queue_bytes = options.queue_bytes.map_or(0, |bytes| bytes.clamp(1, u32::MAX as usize));
    let queue_bytes = queue_bytes as u32;
    flag(options.dual_stack, UDP_DUAL_STACK)
        | flag(options.reuse_address, UDP_REUSE_ADDRESS)
        | flag(options.reuse_port, UDP_REUSE_PORT)
        | flag(options.dont_fragment, UDP_DONT_FRAGMENT)
        | flag(options.report_errors, UDP_REPORT_ERRORS)
        | flag(options.hop_limit.is_some(), UDP_HOP_LIMIT)
        | u64::from(options.hop_limit.unwrap_or(0)) << 8
        | u64::from(options.traffic_class) << 16
        | u64::from(queue_bytes) << 32
}

/// Decodes UDP options; fields that are not encoded keep their defaults. Every word is valid.
pub(super) fn udp_options_from_word(word: u64) -> UdpOptions {
    let has = |bit| word & bit != 0;
    UdpOptions::default()
        .dual_stack(has(UDP_DUAL_STACK))
        .reuse_address(has(UDP_REUSE_ADDRESS))
        .reuse_port(has(UDP_REUSE_PORT))
        .dont_fragment(has(UDP_DONT_FRAGMENT))
        .report_errors(has(UDP_REPORT_ERRORS))
        .hop_limit(has(UDP_HOP_LIMIT).then_some((word >> 8) as u8))
        .traffic_class((word >> 16) as u8)
        .queue_bytes(Some((word >> 32) as usize).filter(|&bytes| bytes > 0))
}

/// Decodes TCP options; fields that are not encoded keep their defaults. All words are valid.
pub(super) fn tcp_options_from_words(words: [u64; TCP_OPTIONS_WORDS]) -> TcpOptions {
    let [head, buffers, keepalive_times, user_timeout] = words;
    let has = |bit| head & bit != 0;
    let (send_buffer_bytes, receive_buffer_bytes) = halves(buffers);
    let (idle_ms, interval_ms) = halves(keepalive_times);
    let keepalive =
        Keepalive::default().idle_ms(idle_ms).interval_ms(interval_ms).probes((head >> 24) as u8);
    let congestion_control = match has(NEW_RENO) {
        true => CongestionControl::NewReno,
        false => CongestionControl::Cubic,
    };
    let fin_wait_2_ms = (user_timeout >> FIN_WAIT_2_SHIFT) as u32 & MAX_FIN_WAIT_2_MS;
    let fin_wait_2_ms = Some(fin_wait_2_ms).filter(|&ms| ms > 0);
    let default = TcpOptions::default();
    let max = |fixed, size: u32, max| if user_timeout & fixed == 0 { size.max(max) } else { size };
    TcpOptions::default()
        .send_buffer_bytes(send_buffer_bytes)
        .max_send_buffer_bytes(max(
            FIXED_SEND_BUFFER,
            send_buffer_bytes,
            default.max_send_buffer_bytes,
        ))
        .receive_buffer_bytes(receive_buffer_bytes)
        .max_receive_buffer_bytes(max(
            FIXED_RECEIVE_BUFFER,
            receive_buffer_bytes,
            default.max_receive_buffer_bytes,
        ))
        .receive_low_water_bytes((head >> 32) as u32)
        .no_delay(has(NO_DELAY))
        .ecn(has(ECN))
        .dual_stack(has(DUAL_STACK))
        .reuse_port(has(REUSE_PORT))
        .congestion_control(congestion_control)
        .hop_limit(has(HOP_LIMIT).then_some((head >> 8) as u8))
        .traffic_class((head >> 16) as u8)
        .keepalive(has(KEEPALIVE).then_some(keepalive))
        .user_timeout_ms(has(USER_TIMEOUT).then_some(user_timeout as u32))
        .fin_wait_2_ms(fin_wait_2_ms)
        .defer_accept_s(Some((user_timeout >> DEFER_ACCEPT_SHIFT) as u16).filter(|&s| s > 0))
        .dont_fragment(user_timeout & ROUTERS_FRAGMENT == 0)
        .cork(user_timeout & CORK != 0)
}

/// Words of a connection's state without its traffic, and of its traffic.
pub(super) const TCP_INFO_WORDS: usize = 7;
pub(super) const TCP_TRAFFIC_WORDS: usize = 5;

/// TCP states; the number of a state is its index.
const STATES: [TcpState; 10] = [
    TcpState::Closed,
    TcpState::SynSent,
    TcpState::SynReceived,
    TcpState::Established,
    TcpState::FinWait1,
    TcpState::FinWait2,
    TcpState::CloseWait,
    TcpState::Closing,
    TcpState::LastAck,
    TcpState::TimeWait,
];

/// Phases of loss recovery; the number of a phase is its index.
const PHASES: [RecoveryPhase; 3] =
    [RecoveryPhase::Open, RecoveryPhase::FastRecovery, RecoveryPhase::Loss];

/// Reasons of ICMP errors; the number of a reason is its index plus one.
const REASONS: [UnreachableReason; 4] = [
    UnreachableReason::Protocol,
    UnreachableReason::SourceRoute,
    UnreachableReason::HostUnknown,
    UnreachableReason::SourceIsolated,
];

/// Encodes the phase of loss recovery, the reason of the last ICMP error, the number of retries and
/// the shifts of windows.
fn causes_to_bits(info: &TcpInfo) -> u32 {
    let phase = PHASES.iter().position(|&phase| phase == info.recovery).unwrap_or(0) as u32;
    let is_same = |&reason: &UnreachableReason| info.unreachable == Some(reason);
    let reason = REASONS.iter().position(is_same).map_or(0, |index| index as u32 + 1);
    let shifts = info.send_window_shift & 15 | (info.receive_window_shift & 15) << 4;
    phase | reason << 8 | u32::from(info.retries) << 16 | u32::from(shifts) << 24
}

const INFO_SACK: u64 = 1 << 8;
const INFO_TIMESTAMPS: u64 = 1 << 9;
const INFO_ECN: u64 = 1 << 10;

/// Two times in microseconds, as the stack measures them.
fn times_to_word(high_ns: u64, low_ns: u64) -> u64 {
    let us = |ns: u64| u32::try_from(ns / 1_000).unwrap_or(u32::MAX);
    pair(us(high_ns), us(low_ns))
}

fn times_from_word(word: u64) -> (u64, u64) {
    let (high_us, low_us) = halves(word);
    (u64::from(high_us) * 1_000, u64::from(low_us) * 1_000)
}

/// Encodes a connection's state without its traffic.
pub(super) fn tcp_info_to_words(info: &TcpInfo) -> [u64; TCP_INFO_WORDS] {
    let flag = |set: bool, bit| if set { bit } else { 0 };
    let state = STATES.iter().position(|&state| state == info.state).unwrap_or(0) as u64;
    let head = state
        | flag(info.sack, INFO_SACK)
        | flag(info.timestamps, INFO_TIMESTAMPS)
        | flag(info.ecn, INFO_ECN)
        | u64::from(info.mss_bytes) << 16
        | u64::from(info.cwnd_bytes) << 32;
    [
        head,
        // A round trip takes at least a microsecond, so 0 means none.
        times_to_word(info.rtt_ns.unwrap_or(0), info.rtt_variation_ns),
        times_to_word(info.rto_ns, info.min_rtt_ns.unwrap_or(0)),
        pair(info.ssthresh_bytes, info.send_window_bytes),
        pair(info.receive_window_bytes, info.unacknowledged_bytes),
        pair(info.unread_bytes, causes_to_bits(info)),
        pair(info.unsent_bytes, info.lost_bytes),
    ]
}

/// Encodes the traffic of a connection.
pub(super) fn tcp_traffic_to_words(traffic: &TcpTraffic) -> [u64; TCP_TRAFFIC_WORDS] {
    [
        traffic.acknowledged_bytes,
        traffic.received_bytes,
        pair(traffic.sent_segments, traffic.received_segments),
        traffic.retransmitted_segments.into(),
        traffic.delivery_bytes_per_ms.into(),
    ]
}

/// Decodes the traffic of a connection. All words are valid.
pub(super) fn tcp_traffic_from_words(words: [u64; TCP_TRAFFIC_WORDS]) -> TcpTraffic {
    let [acknowledged_bytes, received_bytes, segments, retransmitted, delivery] = words;
    let (sent_segments, received_segments) = halves(segments);
    TcpTraffic {
        acknowledged_bytes,
        received_bytes,
        sent_segments,
        received_segments,
        retransmitted_segments: retransmitted as u32,
        delivery_bytes_per_ms: delivery as u32,
    }
}

/// Decodes a connection's state; its traffic is not known. `None` if the TCP state is unknown.
pub(super) fn tcp_info_from_words(words: [u64; TCP_INFO_WORDS]) -> Option<TcpInfo> {
    let [head, round_trip, limits, sending, receiving, rest, backlog] = words;
    let (rtt_ns, rtt_variation_ns) = times_from_word(round_trip);
    let (rto_ns, min_rtt_ns) = times_from_word(limits);
    let (unsent_bytes, lost_bytes) = halves(backlog);
    let (unread_bytes, causes) = halves(rest);
    let (ssthresh_bytes, send_window_bytes) = halves(sending);
    let (receive_window_bytes, unacknowledged_bytes) = halves(receiving);
    Some(TcpInfo {
        state: *STATES.get(usize::from(head as u8))?,
        rtt_ns: (rtt_ns > 0).then_some(rtt_ns),
        rtt_variation_ns,
        min_rtt_ns: (min_rtt_ns > 0).then_some(min_rtt_ns),
        rto_ns,
        retries: (causes >> 16) as u8,
        recovery: PHASES.get(usize::from(causes as u8)).copied().unwrap_or(RecoveryPhase::Open),
        unreachable: usize::from((causes >> 8) as u8)
            .checked_sub(1)
            .and_then(|index| REASONS.get(index).copied()),
        cwnd_bytes: (head >> 32) as u32,
        ssthresh_bytes,
        send_window_bytes,
        receive_window_bytes,
        mss_bytes: (head >> 16) as u16,
        unacknowledged_bytes,
        unsent_bytes,
        lost_bytes,
        unread_bytes,
        sack: head & INFO_SACK != 0,
        timestamps: head & INFO_TIMESTAMPS != 0,
        ecn: head & INFO_ECN != 0,
        send_window_shift: (causes >> 24) as u8 & 15,
        receive_window_shift: (causes >> 28) as u8,
        traffic: TcpTraffic::default(),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use serde::Serialize;
    use serde_json::Value;

    use super::*;

    /// TCP options of which each encoded field differs from its default.
    pub(in crate::ipc) fn changed_tcp_options() -> TcpOptions {
        TcpOptions::default()
            .send_buffer_bytes(1)
            .receive_buffer_bytes(u32::MAX)
            .receive_low_water_bytes(3)
            .no_delay(true)
            .cork(true)
            .ecn(true)
            .dual_stack(true)
            .reuse_port(true)
            .congestion_control(CongestionControl::NewReno)
            .hop_limit(255)
            .traffic_class(0xfc)
            .keepalive(changed_keepalive())
            .user_timeout_ms(0)
            .fin_wait_2_ms(MAX_FIN_WAIT_2_MS)
            .defer_accept_s(MAX_DEFER_ACCEPT_S)
            .dont_fragment(false)
    }

    fn changed_keepalive() -> Keepalive {
        Keepalive::default().idle_ms(1).interval_ms(u32::MAX).probes(200)
    }

    /// UDP options of which each encoded field differs from its default.
    pub(in crate::ipc) fn changed_udp_options() -> UdpOptions {
        UdpOptions::default()
            .dual_stack(true)
            .reuse_address(true)
            .reuse_port(true)
            .dont_fragment(true)
            .report_errors(true)
            .hop_limit(0)
            .traffic_class(0xff)
            .queue_bytes(u32::MAX as usize)
    }

    /// Names of the fields that are equal in both values.
    fn equal_fields<T: Serialize>(a: &T, b: &T) -> Vec<String> {
        let fields = |value: &T| match serde_json::to_value(value).unwrap() {
            Value::Object(fields) => fields,
            other => panic!("not a struct: {other}"),
        };
        let b = fields(b);
        fields(a)
            .into_iter()
            .filter(|(name, value)| b[name] == *value)
            .map(|(name, _)| name)
            .collect()
    }

    /// A new field of the options is either encoded or listed here. The compiler does not notice
    /// a forgotten field: only the crate that defines the options can name all of them.
    #[test]
    fn encodes_every_option_that_the_daemon_does_not_set() {
        let tcp = changed_tcp_options();
        assert_eq!(equal_fields(&tcp, &TcpOptions::default()), ["owner"]);
        assert!(equal_fields(&changed_keepalive(), &Keepalive::default()).is_empty());
        assert_eq!(tcp_options_from_words(tcp_options_to_words(&tcp)), tcp);

        let udp = changed_udp_options();
        let set_by_daemon = ["owner", "queue_packets"];
        assert_eq!(equal_fields(&udp, &UdpOptions::default()), set_by_daemon);
        assert_eq!(udp_options_from_word(udp_options_to_word(&udp)), udp);
    }
}
