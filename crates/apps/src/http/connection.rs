//! Task of one connection: runs hyper, keeps the time limits, and obeys the ledger.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::SET_COOKIE;
use hyper::server::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::body::ResponseBody;
use super::channel::{Channel, ChannelIo, lock};
use super::exchange::Exchange;
use super::ledger::{Account, Ledger, Order};
use super::limits::{HttpLimits, PROGRESS_BYTES, READ_BUFFER_BYTES};
use super::listener::HttpStream;
use super::request_queue::{Entry, RequestQueue, Ticket};
use super::service::Service;

/// Memory of a connection without data in bytes, as measured: its task, hyper's two buffers, and
/// the socket.
const CONNECTION_BYTES: usize = 12 << 10;

/// Time that a client gets to read the last response and to close, so that a reset does not
/// destroy this response (RFC 9112 section 9.6).
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval at which a connection whose client does not read is counted anew.
const RECOUNT_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a closed connection looks for data that is not acknowledged.
const LINGER_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Time by which a refusal is late on a connection whose last request was refused too. A client that
/// repeats its request at once so costs little.
const REFUSAL_DELAY: Duration = Duration::from_millis(100);

/// Beginning of hyper's own response to a malformed request.
const BAD_REQUEST: &[u8] = b"HTTP/1.1 400 Bad Request\r\n";

const VERSION_NOT_SUPPORTED: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\n\
    connection: close\r\ncontent-length: 0\r\n\r\n";

const REQUEST_TIMEOUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// One connection, from accept to close.
pub(super) struct Connection<S: HttpStream> {
    /// Exchange of requests and responses; `None` while the last response is on its way.
    serving: Option<http1::Connection<TokioIo<ChannelIo<S>>, Handler>>,
    channel: Arc<Mutex<Channel<S>>>,
    exchange: Arc<Exchange>,
    service: Arc<Service>,
    account: Account,
    /// Part of `HttpCounters::memory_bytes` that this connection has added.
    counted_bytes: u64,
    limits: HttpLimits,
    wait: Wait,
    timer: Pin<Box<Sleep>>,
    /// The server is about to stop.
    is_finishing: bool,
}

/// Event for which a connection waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing of a request has come.
    Idle,
    Head,
    Body,
    /// The client has to take a part of the response.
    Write,
    /// The client has to take the rest, and to close.
    Close,
}

/// Wait for the client, and how far the exchange was when it began.
struct Wait {
    phase: Phase,
    since: Instant,
    requests: u64,
    received: u64,
    sent: u64,
    queued_bytes: usize,
}

/// State after a check of the limits.
enum Verdict {
    Wait,
    /// There is something to do at once.
    Again,
    End,
}

/// Service of one connection.
#[derive(Clone)]
struct Handler {
    service: Arc<Service>,
    exchange: Arc<Exchange>,
    queue: Arc<RequestQueue>,
    peer: IpAddr,
}

/// Response of a [`Handler`].
enum HandlerFuture {
    /// `None` once it was taken.
    Ready(Option<Response<ResponseBody>>),
    /// The request waits in the queue.
    Waiting(Pin<Box<dyn Future<Output = Response<ResponseBody>> + Send>>),
}

impl Future for HandlerFuture {
    type Output = Result<Response<ResponseBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Ready(response) => {
                response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)))
            }
            Self::Waiting(waiting) => waiting.as_mut().poll(context).map(Ok),
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for Handler {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = HandlerFuture;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.exchange.on_request();
        match self.queue.enter(&request, self.peer, self.service.counters()) {
            Entry::Serve => HandlerFuture::Ready(Some(self.respond(request))),
            Entry::Refuse(retry_after) if self.exchange.set_refused(true) => {
                HandlerFuture::Waiting(Box::pin(self.clone().refuse_late(request, retry_after)))
            }
            Entry::Refuse(retry_after) => {
                HandlerFuture::Ready(Some(self.refuse(&request, retry_after)))
            }
            Entry::Wait(ticket) => {
                HandlerFuture::Waiting(Box::pin(self.clone().wait(request, ticket)))
            }
        }
    }
}

impl Handler {
    fn respond(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        self.exchange.set_refused(false);
        let log = self.service.access_log();
        let line = log.map(|log| log.begin(self.peer, &request));
        let mut response = self.service.respond(request);
        if let (Some(log), Some(line)) = (log, line) {
            log.write(line, &response);
        }
        response.body_mut().attach(&self.exchange);
        response
    }

    fn refuse(&self, request: &Request<Incoming>, retry_after: u32) -> Response<ResponseBody> {
        let response = self.service.refuse(request, retry_after);
        if let Some(log) = self.service.access_log() {
            log.write(log.begin(self.peer, request), &response);
        }
        response
    }

    /// Refuses a client that was refused before and did not wait: now it has to.
    async fn refuse_late(
        self,
        request: Request<Incoming>,
        retry_after: u32,
    ) -> Response<ResponseBody> {
        sleep(REFUSAL_DELAY).await;
        self.refuse(&request, retry_after)
    }

    /// Responds when it is the turn of the request.
    async fn wait(self, request: Request<Incoming>, ticket: Ticket) -> Response<ResponseBody> {
        let Ok(turn) = ticket.granted.await else {
            return self.refuse(&request, ticket.retry_after);
        };
        let mut response = self.respond(request);
        drop(turn);
        if let Some(cookie) = ticket.cookie {
            response.headers_mut().insert(SET_COOKIE, cookie);
        }
        response
    }
}

impl<S: HttpStream> Connection<S> {
    pub(super) fn new(
        stream: S,
        peer: IpAddr,
        (service, ledger, queue): (&Arc<Service>, &Arc<Ledger>, &Arc<RequestQueue>),
        limits: HttpLimits,
    ) -> Self {
        let now = Instant::now();
        let exchange = Arc::new(Exchange::new());
        let channel = Channel::new(stream, Arc::clone(ledger), Arc::clone(&exchange));
        let channel = Arc::new(Mutex::new(channel));
        let handler = Handler {
            service: Arc::clone(service),
            exchange: Arc::clone(&exchange),
            queue: Arc::clone(queue),
            peer,
        };
        // The limits here are for each phase, hyper's is for the head and the wait for it.
        let mut http = http1::Builder::new();
        http.max_buf_size(READ_BUFFER_BYTES).header_read_timeout(None);
        let io = TokioIo::new(ChannelIo(Arc::clone(&channel)));
        let counters = service.counters();
        counters.connections.fetch_add(1, Ordering::Relaxed);
        counters.connections_open.fetch_add(1, Ordering::Relaxed);
        Self {
            serving: Some(http.serve_connection(io, handler)),
            channel,
            exchange,
            service: Arc::clone(service),
            account: ledger.open(peer, CONNECTION_BYTES, now),
            counted_bytes: counters.recount(0, CONNECTION_BYTES),
            limits,
            wait: Wait::new(now),
            timer: Box::pin(sleep_until(now + limits.idle_timeout)),
            is_finishing: false,
        }
    }

    /// Runs the connection as far as the client allows. Ready when it has ended.
    fn poll_work(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(connection) = &mut self.serving {
            match Pin::new(connection).poll(context) {
                Poll::Ready(result) => self.begin_close(result.is_err_and(|e| e.is_parse())),
                Poll::Pending => {
                    let flushed = lock(&self.channel).poll_flush(context);
                    return if let Poll::Ready(Err(_)) = flushed {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    };
                }
            }
        }
        let mut channel = lock(&self.channel);
        let closed = match channel.poll_shutdown(context) {
            Poll::Ready(Ok(())) => channel.poll_drain(context),
            other => other,
        };
        match ready!(closed) {
            // A peer that has sent its end may still have to acknowledge.
            Ok(()) if channel.queued_bytes() > 0 => Poll::Pending,
            // A client that disconnects affects its own connection only.
            Ok(()) | Err(_) => Poll::Ready(()),
        }
    }

    /// Gives hyper's memory back; the response stays in the channel.
    fn begin_close(&mut self, is_parse_error: bool) {
        let Some(connection) = self.serving.take() else { return };
        let unparsed = connection.into_parts().read_buf;
        if is_parse_error && has_unsupported_version(&unparsed) {
            lock(&self.channel).replace_response(BAD_REQUEST, VERSION_NOT_SUPPORTED);
        }
    }

    /// Counts the memory, and enforces orders and time limits.
    fn check(&mut self, context: &mut Context<'_>) -> Verdict {
        let now = Instant::now();
        let channel = lock(&self.channel);
        let phase = self.phase(&channel);
        self.wait.update(now, phase, &self.exchange, &channel);
        let body_bytes = if phase == Phase::Body { READ_BUFFER_BYTES } else { 0 };
        let bytes = CONNECTION_BYTES + body_bytes + channel.waiting_bytes();
        let order = self.account.update(now, bytes, self.wait.since, context.waker());
        self.counted_bytes = self.service.counters().recount(self.counted_bytes, bytes);
        if order == Order::Abort {
            self.service.counters().evicted.fetch_add(1, Ordering::Relaxed);
            channel.set_reset_on_close();
            return Verdict::End;
        }
        drop(channel);
        if order == Order::Finish {
            match &mut self.serving {
                None if self.wait.queued_bytes == 0 => return Verdict::End,
                Some(connection) if !self.is_finishing => {
                    self.is_finishing = true;
                    Pin::new(connection).graceful_shutdown();
                    return Verdict::Again;
                }
                _ => {}
            }
        }
        let waited = now.saturating_duration_since(self.wait.since);
        let limit = self.limit(phase);
        if waited >= limit {
            return self.on_timeout(phase);
        }
        let mut deadline = self.wait.since + limit;
        match phase {
            Phase::Close => deadline = deadline.min(now + LINGER_CHECK_INTERVAL),
            Phase::Write => deadline = deadline.min(now + RECOUNT_INTERVAL),
            _ => {}
        }
        self.arm(context, deadline)
    }

    fn phase(&self, channel: &Channel<S>) -> Phase {
        match &self.serving {
            None => Phase::Close,
            Some(_) if channel.waits_to_write() => Phase::Write,
            Some(_) if self.exchange.reads_body() => Phase::Body,
            Some(_) if self.exchange.has_started_head() => Phase::Head,
            Some(_) => Phase::Idle,
        }
    }

    fn limit(&self, phase: Phase) -> Duration {
        match phase {
            Phase::Idle => self.limits.idle_timeout,
            Phase::Head => self.limits.header_timeout,
            Phase::Body => self.limits.body_timeout,
            Phase::Close if self.wait.queued_bytes == 0 => LINGER_TIMEOUT,
            Phase::Write | Phase::Close => self.limits.write_timeout,
        }
    }

    fn on_timeout(&mut self, phase: Phase) -> Verdict {
        if phase != Phase::Close {
            self.service.counters().timed_out.fetch_add(1, Ordering::Relaxed);
        }
        match phase {
            Phase::Idle | Phase::Head => {
                if phase == Phase::Head {
                    lock(&self.channel).push(REQUEST_TIMEOUT);
                }
                self.begin_close(false);
                Verdict::Again
            }
            Phase::Close if self.wait.queued_bytes == 0 => Verdict::End,
            Phase::Body | Phase::Write | Phase::Close => {
                lock(&self.channel).set_reset_on_close();
                Verdict::End
            }
        }
    }

    /// Sets the timer, unless it is due earlier anyway.
    fn arm(&mut self, context: &mut Context<'_>, deadline: Instant) -> Verdict {
        if deadline < self.timer.deadline() || self.timer.is_elapsed() {
            self.timer.as_mut().reset(deadline);
        }
        while self.timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= deadline {
                return Verdict::Again;
            }
            self.timer.as_mut().reset(deadline);
        }
        Verdict::Wait
    }
}

impl<S: HttpStream> Future for Connection<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let connection = self.get_mut();
        loop {
            if connection.poll_work(context).is_ready() {
                return Poll::Ready(());
            }
            match connection.check(context) {
                Verdict::Wait => return Poll::Pending,
                Verdict::Again => {}
                Verdict::End => return Poll::Ready(()),
            }
        }
    }
}

impl<S: HttpStream> Drop for Connection<S> {
    fn drop(&mut self) {
        let counters = self.service.counters();
        counters.connections_open.fetch_sub(1, Ordering::Relaxed);
        counters.recount(self.counted_bytes, 0);
    }
}

impl Wait {
    fn new(now: Instant) -> Self {
        Self { phase: Phase::Idle, since: now, requests: 0, received: 0, sent: 0, queued_bytes: 0 }
    }

    /// Begins anew with another phase, with another request, and after every
    /// [`PROGRESS_BYTES`] of a body or a response.
    fn update<S: HttpStream>(
        &mut self,
        now: Instant,
        phase: Phase,
        exchange: &Exchange,
        channel: &Channel<S>,
    ) {
        let queued_bytes = if phase == Phase::Close { channel.queued_bytes() } else { 0 };
        let has_progress = match phase {
            Phase::Idle | Phase::Head => false,
            Phase::Body => channel.received() - self.received >= PROGRESS_BYTES,
            Phase::Write => channel.sent() - self.sent >= PROGRESS_BYTES,
            Phase::Close => queued_bytes as u64 + PROGRESS_BYTES <= self.queued_bytes as u64,
        };
        if phase != self.phase || exchange.requests() != self.requests || has_progress {
            let requests = exchange.requests();
            let (received, sent) = (channel.received(), channel.sent());
            *self = Self { phase, since: now, requests, received, sent, queued_bytes };
        } else if queued_bytes == 0 {
            self.queued_bytes = 0;
        }
    }
}

/// Returns true if the request line ends in an HTTP version other than 1.0 and 1.1.
fn has_unsupported_version(head: &[u8]) -> bool {
    let line = head.split(|&byte| byte == b'\n').find(|line| !line.trim_ascii().is_empty());
    let version = line.and_then(|line| line.trim_ascii().rsplit(|&byte| byte == b' ').next());
    match version {
        Some([b'H', b'T', b'T', b'P', b'/', major, b'.', minor]) => {
            let has_digits = major.is_ascii_digit() && minor.is_ascii_digit();
            has_digits && !(*major == b'1' && matches!(*minor, b'0' | b'1'))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
