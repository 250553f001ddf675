//! The loop that makes load.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::time::Instant;

use super::{Answer, Calls, Exchange, Question, Streams, TcpLoadConfig, TcpLoadReport};
use crate::load::Latencies;

/// Connections that are being established at the same time, at most.
const CONNECTING: usize = 512;

/// Wait no longer than this, to look at the clock.
const LONGEST_WAIT_NS: u64 = 10_000_000;

/// What is read at once.
const BUFFER_BYTES: usize = 256 << 10;

/// How much is written on one connection before others have their turn.
const TURN_BYTES: usize = 256 << 10;

/// How long to wait until all connections are established.
const CONNECT_LIMIT_NS: u64 = 120_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Closed,
    Connecting {
        since_ns: u64,
        /// When the request was due that it is made for.
        due_ns: u64,
    },
    Idle,
    Asking {
        due_ns: u64,
        sent: usize,
        received: usize,
    },
    /// Bytes one way.
    Flowing,
}

struct Slot {
    phase: Phase,
    wants_room: bool,
}

/// One load.
pub(super) struct Load<'c> {
    config: &'c TcpLoadConfig,
    began: Instant,
    slots: Vec<Slot>,
    message: Vec<u8>,
    answer: Answer,
    buffer: Vec<u8>,
    connecting: usize,
    opened: usize,
    /// Requests that are due, and connections that have nothing to do, in an
    /// open loop.
    due: VecDeque<u64>,
    idle: VecDeque<usize>,
    next_due_ns: u64,
    latencies: Latencies,
    connect_latencies: Latencies,
    sent_bytes: u64,
    received_bytes: u64,
    report: TcpLoadReport,
    last_error: Option<io::Error>,
}

impl<'c> Load<'c> {
    pub(super) fn new(config: &'c TcpLoadConfig) -> Self {
        let slot = || Slot { phase: Phase::Closed, wants_room: false };
        let question = config.question.clone().unwrap_or_else(|| {
            let request: Vec<u8> = (0..config.message_bytes).map(|n| (n % 251) as u8).collect();
            Question { answer: Answer::Exactly(request.clone()), request }
        });
        Self {
            config,
            began: Instant::now(),
            slots: (0..config.connections).map(|_| slot()).collect(),
            message: question.request,
            answer: question.answer,
            buffer: vec![0; BUFFER_BYTES],
            connecting: 0,
            opened: 0,
            due: VecDeque::new(),
            idle: VecDeque::new(),
            next_due_ns: 0,
            latencies: Latencies::default(),
            connect_latencies: Latencies::default(),
            sent_bytes: 0,
            received_bytes: 0,
            report: TcpLoadReport::default(),
            last_error: None,
        }
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Establishes all connections, unless each request has its own.
    pub(super) fn open(&mut self, streams: &mut dyn Streams) -> io::Result<()> {
        if self.config.connect_each {
            self.idle.extend(0..self.slots.len());
            return Ok(());
        }
        let mut next = 0;
        while self.opened < self.slots.len() {
            let now_ns = self.now_ns();
            if now_ns > CONNECT_LIMIT_NS || self.report.connects_failed > self.slots.len() as u64 {
                let error = self.last_error.take();
                return Err(error.unwrap_or_else(|| ErrorKind::TimedOut.into()));
            }
            streams.calls(&mut |calls| {
                while next < self.slots.len() && self.connecting < CONNECTING {
                    self.connect(calls, next, now_ns)?;
                    next += 1;
                }
                Ok(())
            })?;
            streams.turn(LONGEST_WAIT_NS, &mut |calls, slot| self.serve(calls, slot))?;
        }
        Ok(())
    }

    /// Makes the load and measures it.
    pub(super) fn run(
        &mut self,
        streams: &mut dyn Streams,
        link: String,
    ) -> io::Result<TcpLoadReport> {
        let began_ns = self.now_ns();
        let from_ns = began_ns + (self.config.warm_up_seconds * 1e9) as u64;
        let until_ns = from_ns + (self.config.seconds * 1e9) as u64;
        self.next_due_ns = began_ns;
        streams.calls(&mut |calls| self.start_all(calls, began_ns))?;
        self.until(streams, from_ns)?;
        self.begin_to_count();
        let counted_from_ns = self.now_ns();
        self.until(streams, until_ns)?;
        let seconds = (self.now_ns() - counted_from_ns) as f64 / 1e9;
        let report = self.report(link, seconds);
        streams.calls(&mut |calls| {
            (0..self.slots.len()).for_each(|slot| calls.close(slot, true));
            Ok(())
        })?;
        Ok(report)
    }

    fn connect(&mut self, calls: &mut dyn Calls, slot: usize, due_ns: u64) -> io::Result<()> {
        let since_ns = self.now_ns();
        self.slots[slot] = Slot { phase: Phase::Connecting { since_ns, due_ns }, wants_room: true };
        self.connecting += 1;
        match calls.connect(slot) {
            Ok(()) => Ok(()),
            Err(error) => self.on_connect_failed(calls, slot, error),
        }
    }

    fn on_connect_failed(
        &mut self,
        calls: &mut dyn Calls,
        slot: usize,
        error: io::Error,
    ) -> io::Result<()> {
        // What is wrong with all of them.
        if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::PermissionDenied) {
            return Err(error);
        }
        self.connecting -= 1;
        self.report.connects_failed += 1;
        self.last_error = Some(error);
        self.end(calls, slot);
        Ok(())
    }

    /// A connection is over: the next request has another.
    fn end(&mut self, calls: &mut dyn Calls, slot: usize) {
        calls.close(slot, true);
        self.slots[slot].phase = Phase::Closed;
        self.idle.push_back(slot);
    }

    fn start_all(&mut self, calls: &mut dyn Calls, now_ns: u64) -> io::Result<()> {
        let active = self.config.active.unwrap_or(usize::MAX).min(self.slots.len());
        for slot in 0..active {
            match self.config.exchange {
                Exchange::Echo if self.config.rate_per_second.is_some() => {
                    if !self.config.connect_each {
                        self.idle.push_back(slot);
                    }
                }
                Exchange::Echo => self.ask(calls, slot, now_ns)?,
                Exchange::Send | Exchange::Receive => {
                    self.slots[slot].phase = Phase::Flowing;
                    self.want_room(calls, slot, self.config.exchange == Exchange::Send)?;
                }
            }
        }
        if self.config.rate_per_second.is_none() {
            self.idle.clear();
        }
        Ok(())
    }

    /// Makes load until then.
    fn until(&mut self, streams: &mut dyn Streams, until_ns: u64) -> io::Result<()> {
        loop {
            let now_ns = self.now_ns();
            if now_ns >= until_ns {
                return Ok(());
            }
            let mut wait_ns = LONGEST_WAIT_NS.min(until_ns - now_ns);
            if let Some(rate) = self.config.rate_per_second {
                while self.next_due_ns <= now_ns {
                    self.due.push_back(self.next_due_ns);
                    self.next_due_ns += ((1e9 / rate) as u64).max(1);
                }
                wait_ns = wait_ns.min(self.next_due_ns - now_ns);
            }
            if self.must_start() {
                streams.calls(&mut |calls| self.start_due(calls))?;
            }
            streams.turn(wait_ns, &mut |calls, slot| self.serve(calls, slot))?;
        }
    }

    fn must_start(&self) -> bool {
        let has_work = self.config.rate_per_second.is_none() || !self.due.is_empty();
        has_work && !self.idle.is_empty()
    }

    /// Gives what is due to connections that have nothing to do; in a closed
    /// loop those are broken ones.
    fn start_due(&mut self, calls: &mut dyn Calls) -> io::Result<()> {
        for _ in 0..self.idle.len() {
            if !self.must_start() {
                break;
            }
            let Some(slot) = self.idle.pop_front() else { break };
            let due_ns = match self.config.rate_per_second {
                Some(_) => self.due.pop_front(),
                None => None,
            };
            self.ask(calls, slot, due_ns.unwrap_or_else(|| self.now_ns()))?;
        }
        Ok(())
    }

    /// Sends a request, on a new connection if there is none.
    fn ask(&mut self, calls: &mut dyn Calls, slot: usize, due_ns: u64) -> io::Result<()> {
        if self.slots[slot].phase == Phase::Closed {
            return self.connect(calls, slot, due_ns);
        }
        self.slots[slot].phase = Phase::Asking { due_ns, sent: 0, received: 0 };
        self.write_request(calls, slot)
    }

    fn want_room(&mut self, calls: &mut dyn Calls, slot: usize, wanted: bool) -> io::Result<()> {
        if self.slots[slot].wants_room != wanted {
            self.slots[slot].wants_room = wanted;
            calls.want_room(slot, wanted)?;
        }
        Ok(())
    }

    /// A connection is ready for something.
    fn serve(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        match self.slots[slot].phase {
            Phase::Closed => Ok(()),
            Phase::Connecting { since_ns, due_ns } => {
                self.on_connected(calls, slot, since_ns, due_ns)
            }
            Phase::Idle => self.expect_nothing(calls, slot),
            Phase::Asking { .. } => {
                self.write_request(calls, slot)?;
                self.read_answer(calls, slot)
            }
            Phase::Flowing => {
                let result = match self.config.exchange {
                    Exchange::Send => self.pour(calls, slot),
                    _ => self.drain(calls, slot),
                };
                self.on_result(calls, slot, result)
            }
        }
    }

    fn on_connected(
        &mut self,
        calls: &mut dyn Calls,
        slot: usize,
        since_ns: u64,
        due_ns: u64,
    ) -> io::Result<()> {
        match calls.finish_connect(slot) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return self.on_connect_failed(calls, slot, error),
        }
        self.connecting -= 1;
        self.opened += 1;
        self.report.connects += 1;
        self.connect_latencies.record(self.now_ns() - since_ns);
        self.slots[slot].phase = Phase::Idle;
        self.want_room(calls, slot, false)?;
        let is_opening = self.next_due_ns == 0;
        if self.config.connect_each || !is_opening {
            self.ask(calls, slot, due_ns)?;
        }
        Ok(())
    }

    /// Nothing was asked: what comes is the end.
    fn expect_nothing(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        match calls.recv(slot, &mut self.buffer) {
            Ok(0) => self.on_result(calls, slot, Err(ErrorKind::ConnectionReset.into())),
            Ok(_) => {
                self.report.wrong_answers += 1;
                Ok(())
            }
            Err(error) => self.on_result(calls, slot, Err(error)),
        }
    }

    fn write_request(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        let Phase::Asking { due_ns, mut sent, received } = self.slots[slot].phase else {
            return Ok(());
        };
        let mut blocked = false;
        while sent < self.message.len() {
            match calls.send(slot, &self.message[sent..]) {
                Ok(len) => {
                    sent += len;
                    self.sent_bytes += len as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                Err(error) => return self.on_result(calls, slot, Err(error)),
            }
        }
        self.slots[slot].phase = Phase::Asking { due_ns, sent, received };
        self.want_room(calls, slot, blocked)
    }

    fn read_answer(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        while let Phase::Asking { due_ns, sent, received } = self.slots[slot].phase {
            let len = match calls.recv(slot, &mut self.buffer) {
                Ok(0) => {
                    let error = ErrorKind::UnexpectedEof.into();
                    return self.on_result(calls, slot, Err(error));
                }
                Ok(len) => len,
                Err(error) => return self.on_result(calls, slot, Err(error)),
            };
            self.received_bytes += len as u64;
            if !self.answer.goes_on(received, &self.buffer[..len]) {
                self.report.wrong_answers += 1;
                self.end(calls, slot);
                return Ok(());
            }
            self.slots[slot].phase = Phase::Asking { due_ns, sent, received: received + len };
            if received + len == self.answer.len() {
                self.on_answer(calls, slot, due_ns)?;
                // There is nothing more before the next request has arrived.
                return Ok(());
            }
            if len < self.buffer.len() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn on_answer(&mut self, calls: &mut dyn Calls, slot: usize, due_ns: u64) -> io::Result<()> {
        let now_ns = self.now_ns();
        self.latencies.record(now_ns.saturating_sub(due_ns));
        self.report.requests += 1;
        if self.config.connect_each {
            calls.close(slot, false);
            self.slots[slot].phase = Phase::Closed;
        } else {
            self.slots[slot].phase = Phase::Idle;
        }
        if self.config.rate_per_second.is_none() {
            return self.ask(calls, slot, now_ns);
        }
        match self.due.pop_front() {
            Some(due_ns) => self.ask(calls, slot, due_ns),
            None => {
                self.idle.push_back(slot);
                Ok(())
            }
        }
    }

    fn pour(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let len = calls.send(slot, &self.message)?;
            turn += len;
            self.sent_bytes += len as u64;
        }
        Ok(())
    }

    fn drain(&mut self, calls: &mut dyn Calls, slot: usize) -> io::Result<()> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let len = calls.recv(slot, &mut self.buffer)?;
            if len == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            turn += len;
            self.received_bytes += len as u64;
        }
        Ok(())
    }

    /// An error ends the connection, not the load.
    fn on_result(
        &mut self,
        calls: &mut dyn Calls,
        slot: usize,
        result: io::Result<()>,
    ) -> io::Result<()> {
        if let Err(error) = result
            && error.kind() != ErrorKind::WouldBlock
        {
            self.report.broken += 1;
            self.last_error = Some(error);
            self.end(calls, slot);
        }
        Ok(())
    }

    fn begin_to_count(&mut self) {
        self.latencies.clear();
        self.connect_latencies.clear();
        (self.sent_bytes, self.received_bytes) = (0, 0);
        (self.report.requests, self.report.connects) = (0, 0);
    }

    fn report(&mut self, link: String, seconds: f64) -> TcpLoadReport {
        let is_open = |slot: &&Slot| {
            matches!(slot.phase, Phase::Idle | Phase::Asking { .. } | Phase::Flowing)
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
            unsent: self.due.len() as u64,
            ..std::mem::take(&mut self.report)
        }
    }
}
