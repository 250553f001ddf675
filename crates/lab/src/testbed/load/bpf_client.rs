//! TCP requests in a closed loop from a BPF program on the load generator's device.
//!
//! The XDP program rewrites the frame of each response into the next request
//! (`bpf/asker.bpf.c`). This costs the generator's core a fraction of the socket work of a
//! client, so it can saturate a server that is faster than any socket client. User space does
//! the rare work: it opens and resets connections with prebuilt frames and resends requests
//! whose response is missing.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::XdpMode;
use tidegate_device::xdp::{BusyPoll, NapiPoller};
use tidegate_load::template::{fold, sum};
use tidegate_load::{ExpectedResponse, LatencyHistogram, TcpLoadReport, Transaction};
use tidegate_wire::{MacAddr, TcpFlags};

use super::bpf;
use super::segment::Segment;
use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::netns::VethEnd;
use crate::testbed::sys;

/// Built from `bpf/asker.bpf.c` by `make bpf`.
static BPF_OBJECT: &[u8] = aya::include_bytes_aligned!("../../../bpf/asker.bpf.o");

/// Maximum number of connections: size of the program's `connections` map.
const MAX_CONNECTIONS: u16 = 1024;
/// Maximum length of a request, and of a response that is compared, in bytes.
const MAX_MESSAGE_BYTES: usize = 128;
/// Histogram buckets for each power of two of a latency.
const SUB_BUCKETS: u32 = 32;
const BUCKET_COUNT: u32 = 64 * SUB_BUCKETS;

/// Interval between two checks for stalled connections.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for establishing all connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Configuration of a closed-loop TCP load from a BPF program.
#[derive(Clone, Debug)]
pub struct BpfClientConfig {
    /// Address and hardware address of the server.
    pub target: (SocketAddrV4, [u8; 6]),
    /// First source address and port. The address must be the kernel's, on the generator's end of
    /// the link: the kernel answers ARP for it. Connection `n` uses source port `port + n`.
    pub source: SocketAddrV4,
    /// Number of connections, 1 to 1024, each with one outstanding request.
    pub connections: u16,
    /// Request and expected response. The request has up to 128 bytes and is not longer than the
    /// response.
    pub transaction: Transaction,
    /// Warm-up before measuring, in seconds.
    pub warm_up_seconds: f64,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Core that generates the load.
    pub core: usize,
}

/// `struct settings` of the BPF program: six 32-bit numbers, the request, the response.
type SettingsBytes = [u8; 6 * 4 + 2 * MAX_MESSAGE_BYTES];

/// `struct connection` of the BPF program: the first two words hold two 32-bit numbers each.
type ConnectionWords = [u64; 5];

/// Values of `state` in `struct connection`.
const STATE_CONNECTING: u32 = 1;
const STATE_REQUESTING: u32 = 2;

/// State of a connection in the BPF map; `snd_nxt` and `rcv_nxt` as in RFC 9293.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConnectionState {
    state: u32,
    snd_nxt: u32,
    rcv_nxt: u32,
    responses: u64,
    wrong_responses: u64,
}

impl From<ConnectionWords> for ConnectionState {
    fn from([state_sent, received_part, _, responses, wrong_responses]: ConnectionWords) -> Self {
        let (state, snd_nxt) = (state_sent as u32, (state_sent >> 32) as u32);
        Self { state, snd_nxt, rcv_nxt: received_part as u32, responses, wrong_responses }
    }
}

/// BPF clients that send requests until dropped.
struct BpfClient<'c> {
    config: &'c BpfClientConfig,
    source_mac: [u8; 6],
    connections: Array<MapData, ConnectionWords>,
    latencies: Array<MapData, u64>,
    socket: OwnedFd,
    poller: NapiPoller,
    /// State of each connection at the last check.
    last_states: Vec<ConnectionState>,
    _ebpf: Ebpf,
}

/// Generates TCP load from the device of `end`.
///
/// The peer of the device must have a NAPI context: an XDP program, or GRO on.
///
/// # Errors
/// When the configuration is invalid, the kernel rejects the BPF program (Linux 6.13 or newer is
/// required), or a connection cannot be established.
pub fn load_tcp_with_bpf(
    end: &VethEnd,
    config: &BpfClientConfig,
) -> Result<TcpLoadReport, LabError> {
    let BusyPoll { defer_irqs, flush_timeout_ns, .. } = BusyPoll::default();
    end.set_deferral(defer_irqs, flush_timeout_ns)?;
    let device = (end.ifindex()?, end.mac);
    let report = end.namespace.enter(|| {
        let _pinned = cpu::PinGuard::to(config.core)?;
        let mut client = BpfClient::start(device, config)?;
        client.connect_all()?;
        client.measure()
    });
    end.set_deferral(0, 0)?;
    report?
}

impl<'c> BpfClient<'c> {
    /// Attaches the program to the device with this interface index and hardware address, in the
    /// network namespace of this thread.
    fn start(
        (index, source_mac): (u32, [u8; 6]),
        config: &'c BpfClientConfig,
    ) -> Result<Self, LabError> {
        let settings_bytes = encode_settings(config)?;
        let refused = "the kernel rejects the BPF client program";
        let mut ebpf = Ebpf::load(BPF_OBJECT).map_err(LabError::io_other(refused))?;
        bpf::xdp_program(&mut ebpf, "asker")?.load().map_err(LabError::io_other(refused))?;
        bpf::take_array::<SettingsBytes>(&mut ebpf, "settings")?
            .set(0, settings_bytes, 0)
            .map_err(LabError::io_other("cannot write the request to the BPF settings map"))?;
        let mut connections = bpf::take_array::<ConnectionWords>(&mut ebpf, "connections")?;
        for index in 0..config.connections {
            // Unpredictable initial sequence number (RFC 9293, section 3.4.1).
            let initial_sequence = fastrand::u32(..);
            let state_and_snd_nxt =
                u64::from(STATE_CONNECTING) | u64::from(initial_sequence.wrapping_add(1)) << 32;
            connections
                .set(index.into(), [state_and_snd_nxt, 0, 0, 0, 0], 0)
                .map_err(LabError::io_other("cannot initialize a connection in the BPF map"))?;
        }
        let latencies = bpf::take_array(&mut ebpf, "latencies")?;
        // Detached when `ebpf` is dropped.
        bpf::xdp_program(&mut ebpf, "asker")?.attach_to_if_index(index, XdpMode::Driver).map_err(
            LabError::io_other("cannot attach the XDP program to the load generator's device"),
        )?;
        let failed = LabError::io("cannot poll the load generator's device (needs Linux 6.13)");
        let poller = NapiPoller::for_interface(index).map_err(failed)?;
        let socket = sys::arp_socket(index)
            .map_err(LabError::io("cannot open a packet socket on the load generator's device"))?;
        let mut client = Self {
            config,
            source_mac,
            connections,
            latencies,
            socket,
            poller,
            last_states: Vec::new(),
            _ebpf: ebpf,
        };
        client.last_states = client.read_connections()?;
        Ok(client)
    }

    /// Reads the state of all connections from the BPF map.
    fn read_connections(&self) -> Result<Vec<ConnectionState>, LabError> {
        (0..self.config.connections)
            .map(|index| self.connections.get(&index.into(), 0).map(ConnectionState::from))
            .collect::<Result<_, _>>()
            .map_err(LabError::io_other("cannot read the connections from the BPF map"))
    }

    fn read_buckets(&self) -> Result<Vec<u64>, LabError> {
        (0..BUCKET_COUNT)
            .map(|bucket| self.latencies.get(&bucket, 0))
            .collect::<Result<_, _>>()
            .map_err(LabError::io_other("cannot read the latencies from the BPF map"))
    }

    /// Busy-polls the device until `deadline` and resends on stalled connections.
    fn run_until(&mut self, deadline: Instant) -> Result<(), LabError> {
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        loop {
            let now = Instant::now();
            if now >= deadline {
                return Ok(());
            }
            if now >= next_check {
                self.resend_stalled()?;
                next_check = now + CHECK_INTERVAL;
            }
            self.poller
                .poll_long()
                .map_err(LabError::io("cannot poll the load generator's device"))?;
        }
    }

    /// Establishes all connections and sends the first request of each.
    fn connect_all(&mut self) -> Result<(), LabError> {
        let began = Instant::now();
        self.resend_stalled()?;
        while self.last_states.iter().any(|state| state.state == STATE_CONNECTING) {
            if began.elapsed() > CONNECT_TIMEOUT {
                let what =
                    format!("{} did not accept all connections in time", self.config.target.0);
                return Err(LabError::Config(what));
            }
            self.run_until(Instant::now() + CHECK_INTERVAL / 10)?;
            let before = std::mem::take(&mut self.last_states);
            self.last_states = self.read_connections()?;
            for (index, before) in before.iter().enumerate() {
                if before.state == STATE_CONNECTING
                    && self.last_states[index].state == STATE_REQUESTING
                {
                    self.send_outstanding(index)?;
                }
            }
        }
        Ok(())
    }

    /// Resends the outstanding segment of each connection that made no progress since the last
    /// check.
    fn resend_stalled(&mut self) -> Result<(), LabError> {
        let before = std::mem::take(&mut self.last_states);
        self.last_states = self.read_connections()?;
        let is_stalled = |index: &usize| self.last_states[*index] == before[*index];
        (0..before.len()).filter(is_stalled).try_for_each(|index| self.send_outstanding(index))
    }

    /// Sends the SYN or request that a connection awaits a response to.
    fn send_outstanding(&self, index: usize) -> Result<(), LabError> {
        let ConnectionState { state, snd_nxt, .. } = self.last_states[index];
        match state {
            STATE_CONNECTING => self.send_segment(index, snd_nxt.wrapping_sub(1), TcpFlags::SYN),
            STATE_REQUESTING => {
                let bytes = self.config.transaction.request.len() as u32;
                self.send_segment(index, snd_nxt.wrapping_sub(bytes), TcpFlags::PSH | TcpFlags::ACK)
            }
            _ => Ok(()),
        }
    }

    /// Sends a segment, which carries the request when `flags` contain PSH.
    fn send_segment(&self, index: usize, sequence: u32, flags: TcpFlags) -> Result<(), LabError> {
        let BpfClientConfig { target: (target, target_mac), source, transaction, .. } = self.config;
        let source = SocketAddrV4::new(*source.ip(), source.port() + index as u16);
        let carries_request = flags.contains(TcpFlags::PSH);
        let segment = Segment {
            source: (MacAddr(self.source_mac), source),
            target: (MacAddr(*target_mac), *target),
            sequence,
            // 0 until the connection is established.
            acknowledgement: self.last_states[index].rcv_nxt,
            flags,
            payload: if carries_request { &transaction.request } else { &[] },
        };
        let frame = segment.frame();
        let frame =
            frame.ok_or_else(|| LabError::Config("a request is too long for one frame".into()))?;
        rustix::io::write(&self.socket, &frame)
            .map(drop)
            .map_err(LabError::io("cannot send a segment"))
    }

    fn measure(&mut self) -> Result<TcpLoadReport, LabError> {
        let seconds = Duration::from_secs_f64;
        self.run_until(Instant::now() + seconds(self.config.warm_up_seconds))?;
        let (before, began) = (self.read_buckets()?, Instant::now());
        self.run_until(began + seconds(self.config.seconds))?;
        let seconds = began.elapsed().as_secs_f64();
        let mut latencies = LatencyHistogram::default();
        for (bucket, (after, before)) in (0..).zip(self.read_buckets()?.iter().zip(&before)) {
            latencies.record_many(bucket_middle_ns(bucket), after - before);
        }
        self.last_states = self.read_connections()?;
        let requests = latencies.count();
        let rate = requests as f64 / seconds;
        let Transaction { request, response } = &self.config.transaction;
        let open = self.last_states.iter().filter(|state| state.state == STATE_REQUESTING).count();
        Ok(TcpLoadReport {
            link: "XDP program on the device".to_owned(),
            connections: open,
            seconds,
            requests,
            requests_per_second: rate,
            sent_bytes_per_second: rate * request.len() as f64,
            received_bytes_per_second: rate * response.len() as f64,
            latency: latencies.summary(),
            broken: (self.last_states.len() - open) as u64,
            wrong_answers: self.last_states.iter().map(|state| state.wrong_responses).sum(),
            ..TcpLoadReport::default()
        })
    }
}

impl Drop for BpfClient<'_> {
    /// Resets all connections, so that the server frees them.
    fn drop(&mut self) {
        self.last_states = self.read_connections().unwrap_or_default();
        for (index, state) in self.last_states.iter().enumerate() {
            // The server's device may be gone.
            let _ = self.send_segment(index, state.snd_nxt, TcpFlags::RST);
        }
    }
}

fn encode_settings(config: &BpfClientConfig) -> Result<SettingsBytes, LabError> {
    let Transaction { request, response } = &config.transaction;
    let invalid = |what: &str| Err(LabError::Config(what.to_owned()));
    if !(1..=MAX_MESSAGE_BYTES.min(response.len())).contains(&request.len()) {
        return invalid("a request must have 1 to 128 bytes and be no longer than its response");
    }
    if !(1..=MAX_CONNECTIONS).contains(&config.connections)
        || config.source.port().checked_add(config.connections).is_none()
    {
        return invalid("connections must be 1 to 1024, from source ports up to 65534");
    }
    let compared_response = match response {
        ExpectedResponse::Exactly(bytes) if bytes.len() <= MAX_MESSAGE_BYTES => Some(&bytes[..]),
        _ => None,
    };
    let header_words = [
        config.source.port().into(),
        config.connections.into(),
        request.len() as u32,
        response.len() as u32,
        // Sum of 16-bit words in native byte order, as the BPF program computes it.
        u16::from_ne_bytes(fold(sum(request)).to_be_bytes()).into(),
        compared_response.is_some().into(),
    ];
    let mut settings = [0; size_of::<SettingsBytes>()];
    let (header, messages) = settings.split_at_mut(size_of_val(&header_words));
    for (field, value) in header.chunks_exact_mut(4).zip(header_words) {
        field.copy_from_slice(&value.to_ne_bytes());
    }
    messages[..request.len()].copy_from_slice(request);
    let compared_response = compared_response.unwrap_or_default();
    messages[MAX_MESSAGE_BYTES..][..compared_response.len()].copy_from_slice(compared_response);
    Ok(settings)
}

/// Middle of the latency range of a bucket, in nanoseconds.
fn bucket_middle_ns(bucket: u32) -> u64 {
    match (bucket / SUB_BUCKETS).checked_sub(1) {
        None | Some(0) => bucket.into(),
        Some(octave) => {
            let lead = u64::from(bucket % SUB_BUCKETS + SUB_BUCKETS);
            (lead << octave) + (1 << (octave - 1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bucket of a latency, as `note_latency` of the BPF program computes it.
    fn bucket_of(mut ns: u64) -> u32 {
        let mut octave = 0;
        for shift in [32, 16, 8, 4, 2, 1] {
            if ns >> shift >= u64::from(SUB_BUCKETS) {
                ns >>= shift;
                octave += shift;
            }
        }
        octave * SUB_BUCKETS + ns as u32
    }

    #[test]
    fn bucket_middle_is_within_one_sub_bucket_of_the_latency() {
        let mut last = 0;
        for ns in (0..4096).chain([65_535, 1_000_000, 123_456_789, u64::MAX]) {
            let bucket = bucket_of(ns);
            assert!(bucket == last || bucket > last && bucket < BUCKET_COUNT, "{ns}");
            last = bucket;
            let error = bucket_middle_ns(bucket).abs_diff(ns);
            assert!(error <= ns / u64::from(SUB_BUCKETS), "{ns}: {}", bucket_middle_ns(bucket));
        }
    }
}
