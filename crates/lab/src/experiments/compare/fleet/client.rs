//! Clients of the fleet: UDP requests over many flows, and short TCP connections.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_load::QuerySet;

use crate::error::LabError;
use crate::testbed::client::{Client, RequestKind, RequestRecord};
use crate::testbed::cpu;
use crate::testbed::netns::Namespace;

/// Flows from each source address. The router chooses the server by the flow.
const FLOWS_OF_SOURCE: usize = 4;
/// Time to wait for the last replies.
const DRAIN_TIME: Duration = Duration::from_millis(300);
/// Longest wait for the next request to be due.
const MAX_WAIT_SECONDS: f64 = 0.02;
/// Requests sent before the sockets are read again.
const BURST_REQUESTS: usize = 8;
const TCP_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts a client that sends `rate_pps` requests a second, in turn over flows from each source to
/// the target of its family.
pub(super) fn start_datagrams(
    namespace: &Namespace,
    core: usize,
    sources: Vec<IpAddr>,
    targets: Vec<SocketAddr>,
    requests: RequestKind,
    rate_pps: f64,
) -> Result<Client, LabError> {
    Client::spawn(namespace, core, move |began, stop| {
        let sockets = open_flows(&sources, &targets)
            .map_err(LabError::io("cannot open the sockets of the client"))?;
        Ok(exchange(&sockets, &requests, rate_pps, began, stop))
    })
}

fn open_flows(sources: &[IpAddr], targets: &[SocketAddr]) -> io::Result<Vec<UdpSocket>> {
    let mut sockets = Vec::new();
    for _ in 0..FLOWS_OF_SOURCE {
        for &source in sources {
            let Some(target) = targets.iter().find(|one| one.is_ipv4() == source.is_ipv4()) else {
                continue;
            };
            let socket = UdpSocket::bind((source, 0))?;
            socket.connect(target)?;
            socket.set_nonblocking(true)?;
            sockets.push(socket);
        }
    }
    Ok(sockets)
}

fn exchange(
    sockets: &[UdpSocket],
    requests: &RequestKind,
    rate_pps: f64,
    began: Instant,
    stop: &AtomicBool,
) -> Vec<RequestRecord> {
    let mut records: Vec<RequestRecord> = Vec::new();
    let mut request = Vec::new();
    let mut stopped: Option<Instant> = None;
    let mut polled: Vec<_> = sockets.iter().map(|one| PollFd::new(one, PollFlags::IN)).collect();
    loop {
        if stopped.is_none() && stop.load(Ordering::Relaxed) {
            stopped = Some(Instant::now());
        }
        if stopped.is_some_and(|at| at.elapsed() > DRAIN_TIME) {
            return records;
        }
        let now_s = began.elapsed().as_secs_f64();
        let due = (now_s * rate_pps) as usize + 1;
        let count = due.saturating_sub(records.len()).min(BURST_REQUESTS);
        for _ in 0..if stopped.is_none() { count } else { 0 } {
            let number = records.len();
            requests.write(number as u64, &mut request);
            // A request that cannot be sent counts as unanswered.
            let _ = sockets[number % sockets.len()].send(&request);
            records.push(RequestRecord { scheduled_s: number as f64 / rate_pps, latency_s: None });
        }
        let next_s = records.len() as f64 / rate_pps;
        let wait_s = (next_s - began.elapsed().as_secs_f64()).clamp(0.0, MAX_WAIT_SECONDS);
        let wait = Timespec { tv_sec: 0, tv_nsec: (wait_s * 1e9) as i64 };
        // An interrupted wait is a short wait.
        if !poll(&mut polled, Some(&wait)).is_ok_and(|ready| ready > 0) {
            continue;
        }
        for (socket, _) in sockets.iter().zip(&polled).filter(|(_, one)| !one.revents().is_empty())
        {
            receive(socket, requests, began, &mut records);
        }
    }
}

fn receive(
    socket: &UdpSocket,
    requests: &RequestKind,
    began: Instant,
    records: &mut [RequestRecord],
) {
    let mut reply = [0; 2048];
    // An error concerns one datagram, or says that the socket is empty.
    while let Ok(bytes) = socket.recv(&mut reply) {
        let number = requests.request_number(&reply[..bytes], records.len() as u64);
        let record = number.and_then(|number| records.get_mut(number as usize));
        if let Some(record) = record.filter(|record| record.latency_s.is_none()) {
            record.latency_s = Some(began.elapsed().as_secs_f64() - record.scheduled_s);
        }
    }
}

/// Connections of a client, each for one DNS query; stopped on drop.
pub(super) struct Connections {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<ConnectionCount, LabError>>>,
}

/// Connections that were made, and those that did not bring an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionCount {
    pub(super) made: u64,
    pub(super) broken: u64,
}

impl Connections {
    /// Starts a client that makes a connection to each target in turn, one after the other.
    pub(super) fn start(
        namespace: &Namespace,
        core: usize,
        targets: Vec<SocketAddr>,
        queries: QuerySet,
    ) -> Result<Self, LabError> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let thread = namespace.spawn(move || {
            cpu::pin_this_thread(core)?;
            let mut count = ConnectionCount::default();
            for (&target, number) in targets.iter().cycle().zip(0..) {
                if is_stopped.load(Ordering::Relaxed) {
                    break;
                }
                let query = queries.get(number % queries.len()).0;
                count.made += 1;
                count.broken += u64::from(query_by_tcp(target, query).is_err());
                // Leaves the processor to the servers.
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(count)
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Stops the client.
    pub(super) fn stop(mut self) -> Result<ConnectionCount, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(ConnectionCount::default()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The result is discarded: the caller did not ask for it with `stop`.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn query_by_tcp(target: SocketAddr, query: &[u8]) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, TCP_TIMEOUT)?;
    stream.set_read_timeout(Some(TCP_TIMEOUT))?;
    let length = (query.len() as u16).to_be_bytes();
    stream.write_all(&[&length, query].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut reply)
}
