//! Event loop of the TCP load generator.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::time::Instant;

use super::arrivals::Arrivals;
use super::{
    ConnectionOps, ConnectionSet, Exchange, ExpectedResponse, TcpLoadConfig, TcpLoadReport,
    Transaction,
};
use crate::LatencyHistogram;

/// Maximum number of connections being established at the same time.
const MAX_CONNECTING: usize = 512;

/// Maximum wait before the clock is read again.
const MAX_WAIT_NS: u64 = 10_000_000;

/// Size of the receive buffer.
const BUFFER_BYTES: usize = 256 << 10;

/// Maximum bytes sent or received on one connection before other connections are served.
const MAX_TURN_BYTES: usize = 256 << 10;

/// Time limit for establishing all connections.
const CONNECT_TIMEOUT_NS: u64 = 120_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    Closed,
    Connecting {
        started_ns: u64,
        /// Scheduled time of the request that the connection is made for.
        due_ns: u64,
    },
    Idle,
    InRequest {
        due_ns: u64,
        sent: usize,
        received: usize,
    },
    /// Bulk transfer in one direction.
    Bulk,
}

struct Slot {
    phase: ConnectionPhase,
    wants_writable: bool,
}

/// State of one TCP load.
pub(super) struct TcpLoad<'c> {
    config: &'c TcpLoadConfig,
    began: Instant,
    slots: Vec<Slot>,
    message: Vec<u8>,
    expected: ExpectedResponse,
    buffer: Vec<u8>,
    connecting: usize,
    established: usize,
    /// Scheduled times of requests that wait for a connection, in an open loop.
    due_requests: VecDeque<u64>,
    /// Connections without a request.
    idle_slots: VecDeque<usize>,
    /// Due times of further requests, in an open loop.
    arrivals: Option<Arrivals>,
    /// All connections are established, and requests begin.
    has_begun: bool,
    latencies: LatencyHistogram,
    connect_latencies: LatencyHistogram,
    sent_bytes: u64,
    received_bytes: u64,
    report: TcpLoadReport,
    last_error: Option<io::Error>,
}

impl<'c> TcpLoad<'c> {
    pub(super) fn new(config: &'c TcpLoadConfig) -> Self {
        let slot = || Slot { phase: ConnectionPhase::Closed, wants_writable: false };
        let transaction = config.transaction.clone().unwrap_or_else(|| {
            let request: Vec<u8> = (0..config.message_bytes).map(|n| (n % 251) as u8).collect();
            Transaction { response: ExpectedResponse::Exactly(request.clone()), request }
        });
        Self {
            config,
            began: Instant::now(),
            slots: (0..config.connections).map(|_| slot()).collect(),
            message: transaction.request,
            expected: transaction.response,
            buffer: vec![0; BUFFER_BYTES],
            connecting: 0,
            established: 0,
            due_requests: VecDeque::new(),
            idle_slots: VecDeque::new(),
            arrivals: None,
            has_begun: false,
            latencies: LatencyHistogram::default(),
            connect_latencies: LatencyHistogram::default(),
            sent_bytes: 0,
            received_bytes: 0,
            report: TcpLoadReport::default(),
            last_error: None,
        }
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Establishes all connections, unless each request opens its own.
    pub(super) fn connect_all(&mut self, connections: &mut dyn ConnectionSet) -> io::Result<()> {
        if self.config.connection_per_request {
            self.idle_slots.extend(0..self.slots.len());
            return Ok(());
        }
        let mut next = 0;
        while self.established < self.slots.len() {
            let now_ns = self.now_ns();
            if now_ns > CONNECT_TIMEOUT_NS || self.report.connects_failed > self.slots.len() as u64
            {
                let error = self.last_error.take();
                return Err(error.unwrap_or_else(|| ErrorKind::TimedOut.into()));
            }
            connections.with_ops(&mut |ops| {
                while next < self.slots.len() && self.connecting < MAX_CONNECTING {
                    self.connect(ops, next, now_ns)?;
                    next += 1;
                }
                Ok(())
            })?;
            connections.wait_ready(MAX_WAIT_NS, &mut |ops, slot| self.on_ready(ops, slot))?;
        }
        Ok(())
    }

    /// Generates the load and measures it.
    pub(super) fn run(
        &mut self,
        connections: &mut dyn ConnectionSet,
        link: String,
    ) -> io::Result<TcpLoadReport> {
        let began_ns = self.now_ns();
        let from_ns = began_ns + (self.config.warm_up_seconds * 1e9) as u64;
        let until_ns = from_ns + (self.config.seconds * 1e9) as u64;
        self.arrivals = self.config.rate_per_second.map(|rate| Arrivals::new(rate, began_ns));
        self.has_begun = true;
        connections.with_ops(&mut |ops| self.start_all(ops, began_ns))?;
        self.run_until(connections, from_ns)?;
        self.reset_counts();
        let counted_from_ns = self.now_ns();
        self.run_until(connections, until_ns)?;
        let seconds = (self.now_ns() - counted_from_ns) as f64 / 1e9;
        let report = self.finish_report(link, seconds);
        connections.with_ops(&mut |ops| {
            (0..self.slots.len()).for_each(|slot| ops.close(slot, true));
            Ok(())
        })?;
        Ok(report)
    }

    fn connect(&mut self, ops: &mut dyn ConnectionOps, slot: usize, due_ns: u64) -> io::Result<()> {
        let started_ns = self.now_ns();
        self.slots[slot] = Slot {
            phase: ConnectionPhase::Connecting { started_ns, due_ns },
            wants_writable: true,
        };
        self.connecting += 1;
        match ops.connect(slot) {
            Ok(()) => Ok(()),
            Err(error) => self.on_connect_failed(ops, slot, error),
        }
    }

    fn on_connect_failed(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        error: io::Error,
    ) -> io::Result<()> {
        // Errors that every connection would meet.
        if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::PermissionDenied) {
            return Err(error);
        }
        self.connecting -= 1;
        self.report.connects_failed += 1;
        self.last_error = Some(error);
        self.close_slot(ops, slot);
        Ok(())
    }

    /// Closes a connection with RST; the next request opens a new connection.
    fn close_slot(&mut self, ops: &mut dyn ConnectionOps, slot: usize) {
        ops.close(slot, true);
        self.slots[slot].phase = ConnectionPhase::Closed;
        self.idle_slots.push_back(slot);
    }

    fn start_all(&mut self, ops: &mut dyn ConnectionOps, now_ns: u64) -> io::Result<()> {
        let active = self.config.active_connections.unwrap_or(usize::MAX).min(self.slots.len());
        for slot in 0..active {
            match self.config.exchange {
                Exchange::Echo if self.config.rate_per_second.is_some() => {
                    if !self.config.connection_per_request {
                        self.idle_slots.push_back(slot);
                    }
                }
                Exchange::Echo => self.start_request(ops, slot, now_ns)?,
                Exchange::Send | Exchange::Receive => {
                    self.slots[slot].phase = ConnectionPhase::Bulk;
                    self.set_write_interest(ops, slot, self.config.exchange == Exchange::Send)?;
                }
            }
        }
        if self.config.rate_per_second.is_none() {
            self.idle_slots.clear();
        }
        Ok(())
    }

    /// Generates load until `until_ns`.
    fn run_until(&mut self, connections: &mut dyn ConnectionSet, until_ns: u64) -> io::Result<()> {
        loop {
            let now_ns = self.now_ns();
            if now_ns >= until_ns {
                return Ok(());
            }
            let mut wait_ns = MAX_WAIT_NS.min(until_ns - now_ns);
            if let Some(arrivals) = &mut self.arrivals {
                while arrivals.next_ns() <= now_ns {
                    self.due_requests.push_back(arrivals.take());
                }
                wait_ns = wait_ns.min(arrivals.next_ns() - now_ns);
            }
            if self.can_start_request() {
                connections.with_ops(&mut |ops| self.start_due_requests(ops))?;
            }
            connections.wait_ready(wait_ns, &mut |ops, slot| self.on_ready(ops, slot))?;
        }
    }

    fn can_start_request(&self) -> bool {
        let has_work = self.config.rate_per_second.is_none() || !self.due_requests.is_empty();
        has_work && !self.idle_slots.is_empty()
    }

    /// Assigns due requests to idle connections; in a closed loop these are failed connections.
    fn start_due_requests(&mut self, ops: &mut dyn ConnectionOps) -> io::Result<()> {
        for _ in 0..self.idle_slots.len() {
            if !self.can_start_request() {
                break;
            }
            let Some(slot) = self.idle_slots.pop_front() else { break };
            let due_ns = match self.config.rate_per_second {
                Some(_) => self.due_requests.pop_front(),
                None => None,
            };
            self.start_request(ops, slot, due_ns.unwrap_or_else(|| self.now_ns()))?;
        }
        Ok(())
    }

    /// Starts a request; opens a connection first if the slot has none.
    fn start_request(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        due_ns: u64,
    ) -> io::Result<()> {
        if self.slots[slot].phase == ConnectionPhase::Closed {
            return self.connect(ops, slot, due_ns);
        }
        self.slots[slot].phase = ConnectionPhase::InRequest { due_ns, sent: 0, received: 0 };
        self.send_request(ops, slot)
    }

    fn set_write_interest(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        wanted: bool,
    ) -> io::Result<()> {
        if self.slots[slot].wants_writable != wanted {
            self.slots[slot].wants_writable = wanted;
            ops.set_write_interest(slot, wanted)?;
        }
        Ok(())
    }

    /// Handles readiness of a connection.
    fn on_ready(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        match self.slots[slot].phase {
            ConnectionPhase::Closed => Ok(()),
            ConnectionPhase::Connecting { started_ns, due_ns } => {
                self.on_connected(ops, slot, started_ns, due_ns)
            }
            ConnectionPhase::Idle => self.receive_unexpected(ops, slot),
            ConnectionPhase::InRequest { .. } => {
                self.send_request(ops, slot)?;
                self.receive_response(ops, slot)
            }
            ConnectionPhase::Bulk => {
                let result = match self.config.exchange {
                    Exchange::Send => self.send_bulk(ops, slot),
                    _ => self.receive_bulk(ops, slot),
                };
                self.close_on_error(ops, slot, result)
            }
        }
    }

    fn on_connected(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        started_ns: u64,
        due_ns: u64,
    ) -> io::Result<()> {
        match ops.finish_connect(slot) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return self.on_connect_failed(ops, slot, error),
        }
        self.connecting -= 1;
        self.established += 1;
        self.report.connects += 1;
        self.connect_latencies.record(self.now_ns() - started_ns);
        self.slots[slot].phase = ConnectionPhase::Idle;
        self.set_write_interest(ops, slot, false)?;
        if self.config.connection_per_request || self.has_begun {
            self.start_request(ops, slot, due_ns)?;
        }
        Ok(())
    }

    /// Handles input without an outstanding request: an error, the end of the stream, or unexpected
    /// bytes.
    fn receive_unexpected(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        match ops.recv(slot, &mut self.buffer) {
            Ok(0) => self.close_on_error(ops, slot, Err(ErrorKind::ConnectionReset.into())),
            Ok(_) => {
                self.report.wrong_answers += 1;
                Ok(())
            }
            Err(error) => self.close_on_error(ops, slot, Err(error)),
        }
    }

    fn send_request(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        let ConnectionPhase::InRequest { due_ns, mut sent, received } = self.slots[slot].phase
        else {
            return Ok(());
        };
        let mut blocked = false;
        while sent < self.message.len() {
            match ops.send(slot, &self.message[sent..]) {
                Ok(len) => {
                    sent += len;
                    self.sent_bytes += len as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                Err(error) => return self.close_on_error(ops, slot, Err(error)),
            }
        }
        self.slots[slot].phase = ConnectionPhase::InRequest { due_ns, sent, received };
        self.set_write_interest(ops, slot, blocked)
    }

    fn receive_response(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        while let ConnectionPhase::InRequest { due_ns, sent, received } = self.slots[slot].phase {
            let len = match ops.recv(slot, &mut self.buffer) {
                Ok(0) => {
                    let error = ErrorKind::UnexpectedEof.into();
                    return self.close_on_error(ops, slot, Err(error));
                }
                Ok(len) => len,
                Err(error) => return self.close_on_error(ops, slot, Err(error)),
            };
            self.received_bytes += len as u64;
            if !self.expected.matches_at(received, &self.buffer[..len]) {
                self.report.wrong_answers += 1;
                self.close_slot(ops, slot);
                return Ok(());
            }
            self.slots[slot].phase =
                ConnectionPhase::InRequest { due_ns, sent, received: received + len };
            if received + len == self.expected.len() {
                self.on_response(ops, slot, due_ns)?;
                // No more bytes can arrive before the next request is sent.
                return Ok(());
            }
            if len < self.buffer.len() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn on_response(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        due_ns: u64,
    ) -> io::Result<()> {
        let now_ns = self.now_ns();
        self.latencies.record(now_ns.saturating_sub(due_ns));
        self.report.requests += 1;
        if self.config.connection_per_request {
            ops.close(slot, false);
            self.slots[slot].phase = ConnectionPhase::Closed;
        } else {
            self.slots[slot].phase = ConnectionPhase::Idle;
        }
        if self.config.rate_per_second.is_none() {
            return self.start_request(ops, slot, now_ns);
        }
        match self.due_requests.pop_front() {
            Some(due_ns) => self.start_request(ops, slot, due_ns),
            None => {
                self.idle_slots.push_back(slot);
                Ok(())
            }
        }
    }

    fn send_bulk(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        let mut turn_bytes = 0;
        while turn_bytes < MAX_TURN_BYTES {
            let len = ops.send(slot, &self.message)?;
            turn_bytes += len;
            self.sent_bytes += len as u64;
        }
        Ok(())
    }

    fn receive_bulk(&mut self, ops: &mut dyn ConnectionOps, slot: usize) -> io::Result<()> {
        let mut turn_bytes = 0;
        while turn_bytes < MAX_TURN_BYTES {
            let len = ops.recv(slot, &mut self.buffer)?;
            if len == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            turn_bytes += len;
            self.received_bytes += len as u64;
        }
        Ok(())
    }

    /// Closes the connection on an error other than `WouldBlock`; the load continues.
    fn close_on_error(
        &mut self,
        ops: &mut dyn ConnectionOps,
        slot: usize,
        result: io::Result<()>,
    ) -> io::Result<()> {
        if let Err(error) = result
            && error.kind() != ErrorKind::WouldBlock
        {
            self.report.broken += 1;
            self.last_error = Some(error);
            self.close_slot(ops, slot);
        }
        Ok(())
    }

    fn reset_counts(&mut self) {
        self.latencies.clear();
        self.connect_latencies.clear();
        (self.sent_bytes, self.received_bytes) = (0, 0);
        (self.report.requests, self.report.connects) = (0, 0);
    }

    fn finish_report(&mut self, link: String, seconds: f64) -> TcpLoadReport {
        let is_open = |slot: &&Slot| {
            matches!(
                slot.phase,
                ConnectionPhase::Idle | ConnectionPhase::InRequest { .. } | ConnectionPhase::Bulk
            )
        };
        TcpLoadReport {
            link,
            connections: self.slots.iter().filter(is_open).count(),
            seconds,
            requests_per_second: self.report.requests as f64 / seconds,
            sent_bytes_per_second: self.sent_bytes as f64 / seconds,
            received_bytes_per_second: self.received_bytes as f64 / seconds,
            latency: self.latencies.summary(),
            connect_latency: self.connect_latencies.summary(),
            unsent: self.due_requests.len() as u64,
            ..std::mem::take(&mut self.report)
        }
    }
}
