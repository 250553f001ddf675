//! Open-loop HTTP client on kernel sockets: asks for files at a constant rate, each on a new
//! connection, and records the outcome of every request.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::error::LabError;
use crate::testbed::client::{Client, RequestRecord};
use crate::testbed::netns::Namespace;

/// Time after which a request without a complete response has failed.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait, after which the client looks for the end of its time.
const MAX_WAIT: Duration = Duration::from_millis(20);

/// File of a web server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WebFile {
    /// Path of the request, with the slash.
    pub(crate) path: String,
    pub(crate) bytes: usize,
}

/// Starts a client that asks for `files` in turn, `rate` times a second.
pub(crate) fn start(
    namespace: &Namespace,
    target: SocketAddr,
    files: Vec<WebFile>,
    rate: f64,
    core: usize,
) -> Result<Client, LabError> {
    Client::spawn(namespace, core, move |began, stop| {
        let requests = Requests { target, files, open: Vec::new(), records: Vec::new() };
        requests.run(rate, began, stop).map_err(LabError::io("the web client failed"))
    })
}

/// All requests, and those that are under way.
struct Requests {
    target: SocketAddr,
    files: Vec<WebFile>,
    open: Vec<Exchange>,
    records: Vec<RequestRecord>,
}

/// Request that is under way.
struct Exchange {
    /// Index of its record.
    number: usize,
    stream: TcpStream,
    began: Instant,
    request_is_sent: bool,
    response: Vec<u8>,
}

/// State of an exchange.
#[derive(Debug, PartialEq)]
enum ExchangeState {
    Pending,
    Answered,
    Failed,
}

impl Requests {
    fn run(
        mut self,
        rate: f64,
        began: Instant,
        stop: &AtomicBool,
    ) -> io::Result<Vec<RequestRecord>> {
        loop {
            let is_stopping = stop.load(Ordering::Relaxed);
            let mut next_s = self.records.len() as f64 / rate;
            while !is_stopping && next_s <= began.elapsed().as_secs_f64() {
                self.begin(next_s);
                next_s = self.records.len() as f64 / rate;
            }
            if is_stopping && self.open.is_empty() {
                return Ok(self.records);
            }
            let until_next = Duration::from_secs_f64(next_s).saturating_sub(began.elapsed());
            let ready = self.wait(if is_stopping { MAX_WAIT } else { until_next.min(MAX_WAIT) })?;
            self.advance(&ready, began);
        }
    }

    /// Opens a connection for the next request. A connection that cannot be opened counts as
    /// unanswered.
    fn begin(&mut self, scheduled_s: f64) {
        let number = self.records.len();
        self.records.push(RequestRecord { scheduled_s, latency_s: None });
        if let Ok(stream) = start_connecting(self.target) {
            let (began, response) = (Instant::now(), Vec::new());
            self.open.push(Exchange { number, stream, began, request_is_sent: false, response });
        }
    }

    /// Waits until an exchange can go on, for at most `limit`. Returns for each exchange whether it can.
    fn wait(&self, limit: Duration) -> io::Result<Vec<bool>> {
        let wanted = |exchange: &Exchange| {
            if exchange.request_is_sent { PollFlags::IN } else { PollFlags::OUT }
        };
        let fds = self.open.iter().map(|exchange| PollFd::new(&exchange.stream, wanted(exchange)));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Lets the exchanges that are `ready` go on, and ends those that take too long.
    fn advance(&mut self, ready: &[bool], began: Instant) {
        let Self { files, records, open, .. } = self;
        let mut ready = ready.iter();
        open.retain_mut(|exchange| {
            let file = &files[exchange.number % files.len()];
            let state = match ready.next() {
                Some(true) => exchange.advance(file),
                _ => ExchangeState::Pending,
            };
            match state {
                ExchangeState::Pending => exchange.began.elapsed() < REQUEST_TIMEOUT,
                ExchangeState::Failed => false,
                ExchangeState::Answered => {
                    let record = &mut records[exchange.number];
                    record.latency_s = Some(began.elapsed().as_secs_f64() - record.scheduled_s);
                    false
                }
            }
        });
    }
}

fn start_connecting(target: SocketAddr) -> io::Result<TcpStream> {
    let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &target) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

impl Exchange {
    fn advance(&mut self, file: &WebFile) -> ExchangeState {
        if !self.request_is_sent {
            let request =
                format!("GET {} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", file.path);
            // An empty send buffer takes a whole request.
            match self.stream.write(request.as_bytes()) {
                Ok(sent) if sent == request.len() => self.request_is_sent = true,
                Err(error) if is_not_yet(&error) => return ExchangeState::Pending,
                _ => return ExchangeState::Failed,
            }
        }
        let mut buf = [0; 8192];
        loop {
            match self.stream.read(&mut buf) {
                Ok(0) => return ExchangeState::Failed,
                Ok(len) => self.response.extend(&buf[..len]),
                Err(error) if is_not_yet(&error) => return ExchangeState::Pending,
                Err(_) => return ExchangeState::Failed,
            }
            match judge(&self.response, file.bytes) {
                ExchangeState::Pending => {}
                state => return state,
            }
        }
    }
}

/// True if the connection is not established, or has nothing to read.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected)
}

/// Judges the bytes received so far of a response with a body of `body_bytes`.
fn judge(response: &[u8], body_bytes: usize) -> ExchangeState {
    const END: &[u8] = b"\r\n\r\n";
    let Some(head) = response.windows(END.len()).position(|window| window == END) else {
        return ExchangeState::Pending;
    };
    let status = response.split(|&byte| byte == b' ').nth(1);
    let received = response.len() - head - END.len();
    match received.cmp(&body_bytes) {
        _ if status != Some(b"200") => ExchangeState::Failed,
        std::cmp::Ordering::Less => ExchangeState::Pending,
        std::cmp::Ordering::Equal => ExchangeState::Answered,
        std::cmp::Ordering::Greater => ExchangeState::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_is_complete_with_its_last_byte() {
        let response = b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nabc";
        for len in 0..response.len() {
            assert_eq!(judge(&response[..len], 3), ExchangeState::Pending, "{len}");
        }
        assert_eq!(judge(response, 3), ExchangeState::Answered);
        assert_eq!(judge(response, 2), ExchangeState::Failed, "longer than the file");
        assert_eq!(judge(b"HTTP/1.1 404 Not Found\r\n\r\nabc", 3), ExchangeState::Failed);
    }

    /// Answers connections with files of three bytes, then closes the port.
    fn serve(listener: std::net::TcpListener, connections: usize) {
        for number in 0..connections {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 256];
            let len = stream.read(&mut request).unwrap();
            assert!(request[..len].starts_with(format!("GET /{} ", number % 2).as_bytes()));
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n123").unwrap();
        }
        drop(listener);
    }

    #[test]
    fn every_request_has_a_record_on_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = std::net::TcpListener::bind(address).unwrap();
            let target = listener.local_addr().unwrap();
            let file = |path: &str, bytes| WebFile { path: path.to_owned(), bytes };
            let files = vec![file("/0", 3), file("/1", 4)];
            let requests = Requests { target, files, open: Vec::new(), records: Vec::new() };
            let stop = &AtomicBool::new(false);
            let records = std::thread::scope(|scope| {
                scope.spawn(move || {
                    serve(listener, 6);
                    stop.store(true, Ordering::Relaxed);
                });
                // The port refuses or resets a request that comes after these.
                requests.run(100.0, Instant::now(), stop).unwrap()
            });
            for (number, record) in records.iter().take(6).enumerate() {
                assert_eq!(record.latency_s.is_some(), number % 2 == 0, "{number} of {address}");
                assert!((record.scheduled_s - number as f64 / 100.0).abs() < 1e-9);
            }
        }
    }
}
