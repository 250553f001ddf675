//! Clients of a web server that make sessions: some requests one after the other, with a pause between
//! them, each with the cookie that the server gave.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::error::LabError;
use crate::testbed::cpu::PinGuard;

/// Requests of a session.
pub(super) const SESSION_REQUESTS: usize = 10;

/// Pause of a client between a response and its next request.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// Time after which a client gives up a request, and with it the session.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Maximum time for the sessions that are counted to end.
const MAX_TAIL: Duration = Duration::from_secs(8);

/// Load of sessions, in an open loop: sessions begin at a fixed rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionLoad {
    pub(super) target: SocketAddr,
    pub(super) sessions_per_s: f64,
    /// Time before sessions are counted.
    pub(super) warm_up: Duration,
    /// Time in which sessions are counted.
    pub(super) measured: Duration,
    /// Core of the clients.
    pub(super) core: usize,
}

/// Sessions that began while they were counted.
#[derive(Clone, Debug)]
pub(super) struct SessionReport {
    pub(super) offered: u64,
    /// The first request was refused.
    pub(super) refused: u64,
    /// The first request was answered.
    pub(super) admitted: u64,
    /// All requests were answered.
    pub(super) finished: u64,
    /// Sessions that ended in the measured time, whenever they began.
    pub(super) finished_in_time: u64,
    /// Time of the requests of admitted sessions, in microseconds.
    pub(super) response_us: Histogram<u64>,
}

impl SessionReport {
    fn new() -> Result<Self, LabError> {
        let response_us = Histogram::new(3).map_err(|error| LabError::Config(error.to_string()))?;
        let (offered, refused, admitted, finished, finished_in_time) = Default::default();
        Ok(Self { offered, refused, admitted, finished, finished_in_time, response_us })
    }
}

/// Counts of all sessions, with those that have not ended yet.
struct Progress {
    report: SessionReport,
    running: u64,
}

/// End of a session.
enum SessionEnd {
    Refused,
    /// Without an answer to the first request.
    Unanswered,
    /// So many requests were answered.
    Answered(usize),
}

impl SessionLoad {
    /// Runs the load in the network namespace of this thread. Sessions begin until all that are
    /// counted have ended.
    pub(super) fn run(self) -> Result<SessionReport, LabError> {
        let _pin = PinGuard::to(self.core)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(LabError::io("cannot start the clients"))?;
        let progress = Progress { report: SessionReport::new()?, running: 0 };
        let progress = Arc::new(Mutex::new(progress));
        runtime.block_on(self.offer(&progress));
        // Sessions that still run end here.
        drop(runtime);
        let report = progress.lock().unwrap_or_else(PoisonError::into_inner).report.clone();
        Ok(report)
    }

    async fn offer(self, progress: &Arc<Mutex<Progress>>) {
        let interval = Duration::from_secs_f64(1.0 / self.sessions_per_s);
        let began = Instant::now();
        let (from, to) = (began + self.warm_up, began + self.warm_up + self.measured);
        let mut due = began;
        loop {
            sleep_until(due).await;
            let is_counted = (from..to).contains(&due);
            {
                let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                let has_ended = due >= to && progress.running == 0;
                if has_ended || due >= to + MAX_TAIL {
                    return;
                }
                progress.report.offered += u64::from(is_counted);
                progress.running += u64::from(is_counted);
            }
            let progress = Arc::clone(progress);
            tokio::spawn(async move {
                let mut times = Vec::with_capacity(SESSION_REQUESTS);
                let end = run_session(self.target, &mut times).await;
                let now = Instant::now();
                let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                progress.add(&end, is_counted, (from..to).contains(&now), &times);
            });
            due += interval;
        }
    }
}

impl Progress {
    fn add(&mut self, end: &SessionEnd, is_counted: bool, is_in_time: bool, times: &[Duration]) {
        let report = &mut self.report;
        let is_finished = matches!(end, SessionEnd::Answered(SESSION_REQUESTS));
        report.finished_in_time += u64::from(is_finished && is_in_time);
        if !is_counted {
            return;
        }
        self.running -= 1;
        report.finished += u64::from(is_finished);
        match end {
            SessionEnd::Refused => report.refused += 1,
            SessionEnd::Unanswered => {}
            SessionEnd::Answered(_) => {
                report.admitted += 1;
                for time in times {
                    // The histogram grows with its values.
                    let _ = report.response_us.record(time.as_micros() as u64);
                }
            }
        }
    }
}

async fn run_session(target: SocketAddr, times: &mut Vec<Duration>) -> SessionEnd {
    let mut answered = 0;
    let mut cookie = None;
    let mut stream = None;
    while answered < SESSION_REQUESTS {
        let began = Instant::now();
        let response = timeout(PATIENCE, request(target, &mut stream, cookie.as_deref())).await;
        match response {
            Ok(Ok(response)) if response.status == 200 => cookie = response.cookie.or(cookie),
            Ok(Ok(_)) if answered == 0 => return SessionEnd::Refused,
            _ if answered == 0 => return SessionEnd::Unanswered,
            _ => break,
        }
        times.push(began.elapsed());
        answered += 1;
        if answered < SESSION_REQUESTS {
            sleep(PAUSE).await;
        }
    }
    SessionEnd::Answered(answered)
}

/// Response, as far as sessions depend on it.
#[derive(Debug, PartialEq, Eq)]
struct SessionResponse {
    status: u16,
    cookie: Option<String>,
}

/// Makes one request on the connection of a session, which the first request opens.
async fn request(
    target: SocketAddr,
    stream: &mut Option<TcpStream>,
    cookie: Option<&str>,
) -> io::Result<SessionResponse> {
    let stream = match stream {
        Some(stream) => stream,
        None => stream.insert(TcpStream::connect(target).await?),
    };
    let cookie = cookie.map(|cookie| format!("Cookie: {cookie}\r\n")).unwrap_or_default();
    let request = format!("GET /api/status HTTP/1.1\r\nHost: lab\r\n{cookie}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut received = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut received).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(response) = parse(&received) {
            return Ok(response);
        }
    }
}

/// Parses a whole response; `None` while bytes are missing.
fn parse(received: &[u8]) -> Option<SessionResponse> {
    let text = str::from_utf8(received).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let (mut len, mut cookie) = (0, None);
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        match name.to_ascii_lowercase().as_str() {
            "content-length" => len = value.parse().ok()?,
            "set-cookie" => cookie = value.split(';').next().map(str::to_owned),
            _ => {}
        }
    }
    (body.len() >= len).then_some(SessionResponse { status, cookie })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_status_and_cookie_of_whole_responses() {
        let text = b"HTTP/1.1 200 OK\r\nset-cookie: a=b; Path=/\r\ncontent-length: 2\r\n\r\n{}";
        let cookie = Some("a=b".to_owned());
        assert_eq!(parse(text), Some(SessionResponse { status: 200, cookie }));
        assert_eq!(parse(&text[..text.len() - 1]), None);
        let refused = b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(parse(refused), Some(SessionResponse { status: 503, cookie: None }));
    }
}
