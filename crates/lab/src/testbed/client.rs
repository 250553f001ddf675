//! Open-loop client: sends at a constant rate, by UDP, and records the outcome of every request.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_load::QuerySet;

use crate::error::LabError;
use crate::stats::median;
use crate::testbed::cpu;
use crate::testbed::flood::CLIENT_ADDRESS;
use crate::testbed::netns::Namespace;

/// Requests sent before the socket is read again.
const BURST_REQUESTS: u32 = 32;
/// Payload of a numbered datagram in bytes: with its headers and trailer, 64 bytes.
const NUMBERED_REQUEST_BYTES: usize = 18;
/// Age in requests below which a 16-bit DNS id is unambiguous.
const MAX_ID_AGE: u64 = 1 << 15;
/// Time to wait for the last replies.
const DRAIN_TIME: Duration = Duration::from_millis(200);

/// Kind of request that a client sends.
#[derive(Clone)]
pub(crate) enum RequestKind {
    /// Datagrams with a sequence number, for a server that echoes them.
    Numbered,
    /// DNS queries of the set in turn, with the low 16 bits of their number as id.
    Dns(QuerySet),
}

impl RequestKind {
    /// Writes the request with this number.
    pub(crate) fn write(&self, number: u64, request: &mut Vec<u8>) {
        request.clear();
        match self {
            Self::Numbered => {
                request.resize(NUMBERED_REQUEST_BYTES, 0);
                request[..8].copy_from_slice(&number.to_be_bytes());
            }
            Self::Dns(queries) => {
                request.extend_from_slice(queries.get(number as usize % queries.len()).0);
                request[..2].copy_from_slice(&(number as u16).to_be_bytes());
            }
        }
    }

    /// Returns the number of the request that the reply belongs to, out of all requests sent.
    pub(crate) fn request_number(&self, reply: &[u8], sent: u64) -> Option<u64> {
        match self {
            Self::Numbered => reply.first_chunk().copied().map(u64::from_be_bytes),
            Self::Dns(_) => {
                let id = u16::from_be_bytes(*reply.first_chunk()?);
                let is_response = *reply.get(2)? & 0x80 != 0;
                let number = number_of_id(id, sent)?;
                is_response.then_some(number)
            }
        }
    }
}

/// Returns the latest request with this id, out of all requests sent.
fn number_of_id(id: u16, sent: u64) -> Option<u64> {
    let last = sent.checked_sub(1)?;
    let age = u64::from((last as u16).wrapping_sub(id));
    if age < MAX_ID_AGE { last.checked_sub(age) } else { None }
}

/// One request and its outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RequestRecord {
    /// Scheduled send time, in seconds since the client's start.
    pub(crate) scheduled_s: f64,
    /// Time from the scheduled send to the reply, in seconds; `None` without a reply.
    pub(crate) latency_s: Option<f64>,
}

/// Running client thread; stopped on drop.
pub(crate) struct Client {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<RequestRecord>, LabError>>>,
    began: Instant,
}

impl Client {
    /// Starts sending `rate_pps` requests a second to `target`, from `namespace`, on core
    /// `core`.
    pub(crate) fn start(
        namespace: &Namespace,
        target: SocketAddr,
        requests: RequestKind,
        rate_pps: f64,
        core: usize,
    ) -> Result<Self, LabError> {
        let socket = namespace.enter(|| -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind((CLIENT_ADDRESS, 0))?;
            socket.connect(target)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })?;
        let socket = socket.map_err(LabError::io("cannot open the client's socket"))?;
        Self::spawn(namespace, core, move |began, stop| {
            run_client(&socket, &requests, rate_pps, began, stop)
        })
    }

    /// Starts a client thread in `namespace` on core `core`. `work` gets the start and the flag that
    /// stops the client, and returns the records of all requests in send order.
    pub(crate) fn spawn(
        namespace: &Namespace,
        core: usize,
        work: impl FnOnce(Instant, &AtomicBool) -> Result<Vec<RequestRecord>, LabError> + Send + 'static,
    ) -> Result<Self, LabError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stop_flag = Arc::clone(&stop);
        let began = Instant::now();
        let thread = namespace.spawn(move || {
            cpu::pin_this_thread(core)?;
            work(began, &stop_flag)
        })?;
        Ok(Self { stop, thread: Some(thread), began })
    }

    /// Seconds since the client's start.
    pub(crate) fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Stops the client and returns the records of all requests in send order.
    pub(crate) fn stop(mut self) -> Result<Vec<RequestRecord>, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The result is discarded: the caller did not ask for it with `stop`.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn run_client(
    socket: &UdpSocket,
    requests: &RequestKind,
    rate_pps: f64,
    began: Instant,
    stop: &AtomicBool,
) -> Result<Vec<RequestRecord>, LabError> {
    let mut records: Vec<RequestRecord> = Vec::new();
    let mut request = Vec::new();
    let mut stop_time: Option<Instant> = None;
    loop {
        let now_s = began.elapsed().as_secs_f64();
        if stop_time.is_none() && stop.load(Ordering::Relaxed) {
            stop_time = Some(Instant::now());
        }
        let next_s = records.len() as f64 / rate_pps;
        if stop_time.is_none() {
            for _ in 0..BURST_REQUESTS {
                let scheduled_s = records.len() as f64 / rate_pps;
                if scheduled_s > now_s {
                    break;
                }
                requests.write(records.len() as u64, &mut request);
                // A request that cannot be sent counts as unanswered.
                let _ = socket.send(&request);
                records.push(RequestRecord { scheduled_s, latency_s: None });
            }
        }
        receive_replies(socket, requests, began, &mut records);
        if stop_time.is_some_and(|ended| ended.elapsed() > DRAIN_TIME) {
            return Ok(records);
        }
        let wait = if stop_time.is_some() { 0.02 } else { (next_s - now_s).clamp(0.0, 0.02) };
        let wait = Timespec { tv_sec: 0, tv_nsec: (wait * 1e9) as i64 };
        // An interrupted poll returns early, which does no harm.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait));
    }
}

fn receive_replies(
    socket: &UdpSocket,
    requests: &RequestKind,
    began: Instant,
    records: &mut [RequestRecord],
) {
    let mut reply = [0; 2048];
    // An error concerns one datagram, or says that the socket is empty.
    while let Ok(len) = socket.recv(&mut reply) {
        let Some(number) = requests.request_number(&reply[..len], records.len() as u64) else {
            continue;
        };
        let Some(record) = records.get_mut(number as usize) else { continue };
        if record.latency_s.is_none() {
            record.latency_s = Some(began.elapsed().as_secs_f64() - record.scheduled_s);
        }
    }
}

/// Requests scheduled in `from_s..to_s`: the number sent and the number answered.
pub(crate) fn count_answered(records: &[RequestRecord], from_s: f64, to_s: f64) -> (u64, u64) {
    let (mut sent, mut answered) = (0, 0);
    for record in records.iter().filter(|one| (from_s..to_s).contains(&one.scheduled_s)) {
        sent += 1;
        answered += u64::from(record.latency_s.is_some());
    }
    (sent, answered)
}

/// Share of the requests scheduled in `from_s..to_s` that were answered, 0 to 1.
pub(crate) fn answered_share(records: &[RequestRecord], from_s: f64, to_s: f64) -> f64 {
    let (sent, answered) = count_answered(records, from_s, to_s);
    answered as f64 / sent.max(1) as f64
}

/// Median latency of the requests scheduled in `from_s..to_s`, in seconds; infinite
/// without any reply.
pub(crate) fn median_latency_s(records: &[RequestRecord], from_s: f64, to_s: f64) -> f64 {
    let of_interval = records.iter().filter(|one| (from_s..to_s).contains(&one.scheduled_s));
    let latencies: Vec<f64> = of_interval.filter_map(|one| one.latency_s).collect();
    if latencies.is_empty() { f64::INFINITY } else { median(&latencies) }
}

/// Consecutive requests that show that a server has recovered.
const RECOVERY_WINDOW_REQUESTS: usize = 100;
/// Share of these requests that must be answered in time. It is below 1 because a shared
/// machine stalls now and then without any flood.
const RECOVERY_SHARE: f64 = 0.95;

/// Time from `end_s` until requests are again answered within `limit_s`, in seconds; `None`
/// when that never happens.
pub(crate) fn recovery_s(records: &[RequestRecord], end_s: f64, limit_s: f64) -> Option<f64> {
    let after = &records[records.partition_point(|one| one.scheduled_s < end_s)..];
    let in_time =
        |record: &RequestRecord| record.latency_s.is_some_and(|after_s| after_s <= limit_s);
    let recovered = |window: &[RequestRecord]| {
        let good = window.iter().filter(|one| in_time(one)).count();
        in_time(&window[0]) && good as f64 >= RECOVERY_SHARE * window.len() as f64
    };
    let first =
        after.windows(RECOVERY_WINDOW_REQUESTS).find(|window| recovered(window))?.first()?;
    Some((first.scheduled_s + first.latency_s.unwrap_or(0.0) - end_s).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One request each millisecond; `after` gives the latency of each in seconds.
    fn records_with(after: impl Fn(u32) -> Option<f64>) -> Vec<RequestRecord> {
        let record =
            |n: u32| RequestRecord { scheduled_s: f64::from(n) / 1e3, latency_s: after(n) };
        (0..1000).map(record).collect()
    }

    #[test]
    fn recovery_ends_when_replies_are_in_time_again() {
        let slow = records_with(|n| match n {
            0..300 => Some(0.0001),
            300..640 => None,
            640..660 => Some(0.5),
            700 | 800 => None,
            _ => Some(0.0001),
        });
        let recovery = recovery_s(&slow, 0.6, 0.001).unwrap();
        assert!((recovery - 0.0601).abs() < 1e-9, "{recovery}");
        assert_eq!(recovery_s(&records_with(|n| (n < 600).then_some(0.0)), 0.6, 0.001), None);
        let at_once = recovery_s(&records_with(|_| Some(0.0)), 0.6, 0.001).unwrap();
        assert!(at_once < 1e-9, "{at_once}");
        assert_eq!(recovery_s(&[], 0.0, 1.0), None);
    }

    #[test]
    fn id_belongs_to_the_latest_request_with_it() {
        assert_eq!(number_of_id(9, 10), Some(9));
        assert_eq!(number_of_id(10, 10), None, "not sent yet");
        assert_eq!(number_of_id(0, 0), None);
        assert_eq!(number_of_id(0xffff, 0x1_0001), Some(0xffff), "ids wrap around");
        assert_eq!(number_of_id(0, 0x1_0001), Some(0x1_0000));
        assert_eq!(number_of_id(1, 0x1_0001), None, "too long ago");
    }

    #[test]
    fn shares_and_medians_cover_only_the_interval() {
        let half = records_with(|n| (n >= 500).then_some(f64::from(n % 3)));
        assert_eq!(answered_share(&half, 0.0, 0.5), 0.0);
        assert_eq!(answered_share(&half, 0.25, 0.75), 0.5);
        assert_eq!(median_latency_s(&half, 0.5, 1.0), 1.0);
        assert_eq!(median_latency_s(&half, 0.0, 0.5), f64::INFINITY);
    }
}
