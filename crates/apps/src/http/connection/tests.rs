use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex,
};
use tokio::time::timeout;

use super::*;
use crate::http::limits::MIN_SEND_BUFFER_BYTES;

mod admission;

/// Bytes that a [`TestStream`] takes in each direction before the other side reads.
const PIPE_BYTES: usize = 64 << 10;

const STATUS: &str = "GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n";

/// Server side of a pipe. Its buffer counts as the server's memory.
struct TestStream {
    io: DuplexStream,
    queued_bytes: Arc<AtomicUsize>,
    is_reset: Arc<AtomicBool>,
}

impl HttpStream for TestStream {
    fn queued_bytes(&self) -> usize {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    fn set_send_buffer(&self, _: u32) {}

    fn set_reset_on_close(&self) {
        self.is_reset.store(true, Ordering::Relaxed);
    }
}

impl AsyncRead for TestStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buf)
    }
}

impl AsyncWrite for TestStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

/// Server without sockets.
struct Server {
    service: Arc<Service>,
    ledger: Arc<Ledger>,
    queue: Arc<RequestQueue>,
    limits: HttpLimits,
    _folder: tempfile::TempDir,
}

/// Client of a [`Server`].
struct Client {
    io: DuplexStream,
    queued_bytes: Arc<AtomicUsize>,
    is_reset: Arc<AtomicBool>,
}

impl Server {
    fn new(limits: HttpLimits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("large")).unwrap();
        file.set_len(10 << 20).unwrap();
        let service = Service::new(Some(folder.path()), || serde_json::json!({})).unwrap();
        let ledger = Arc::new(Ledger::new(limits));
        let queue = Arc::new(RequestQueue::new());
        Self { service: Arc::new(service), ledger, queue, limits, _folder: folder }
    }

    fn connect_from(&self, peer: &str) -> Client {
        self.connect_through(peer, PIPE_BYTES)
    }

    /// Connects by a pipe of this size.
    fn connect_through(&self, peer: &str, pipe_bytes: usize) -> Client {
        let (io, server_io) = duplex(pipe_bytes);
        let (queued_bytes, is_reset) = (Arc::default(), Arc::default());
        let client = Client { io, queued_bytes, is_reset };
        let stream = TestStream {
            io: server_io,
            queued_bytes: Arc::clone(&client.queued_bytes),
            is_reset: Arc::clone(&client.is_reset),
        };
        let peer = peer.parse().unwrap();
        let shared = (&self.service, &self.ledger, &self.queue);
        tokio::spawn(Connection::new(stream, peer, shared, self.limits));
        client
    }

    fn connect(&self) -> Client {
        self.connect_from("192.0.2.1")
    }

    fn count(
        &self,
        count: impl Fn(&crate::http::HttpCounters) -> &std::sync::atomic::AtomicU64,
    ) -> u64 {
        count(self.service.counters()).load(Ordering::Relaxed)
    }
}

impl Client {
    async fn send(&mut self, request: &str) {
        self.io.write_all(request.as_bytes()).await.unwrap();
    }

    /// Reads one response with a `content-length`.
    async fn response(&mut self) -> String {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            text.push(timeout(Duration::from_secs(1), self.io.read_u8()).await.unwrap().unwrap());
        }
        let head = String::from_utf8(text).unwrap();
        let len = head.split_once("content-length: ").map_or("0", |(_, rest)| rest);
        let len = len.split("\r\n").next().unwrap().parse().unwrap();
        let mut body = vec![0; len];
        self.io.read_exact(&mut body).await.unwrap();
        head
    }

    /// Reads to the end. Returns what came, and when it ended.
    async fn end(&mut self) -> (String, Duration) {
        let began = Instant::now();
        let mut text = Vec::new();
        // A reset ends the pipe, too.
        let _ = self.io.read_to_end(&mut text).await;
        (String::from_utf8(text).unwrap(), began.elapsed())
    }

    /// Sends `data` again and again until the server takes no more. Returns the number of bytes.
    async fn send_until_blocked(&mut self, data: &[u8]) -> usize {
        let mut sent = 0;
        while let Ok(len) = timeout(Duration::from_millis(1), self.io.write(data)).await {
            sent += len.unwrap();
        }
        sent
    }
}

#[tokio::test(start_paused = true)]
async fn answers_a_request_although_other_bytes_follow() {
    let server = Server::new(HttpLimits::default());
    for stray in ["GE", "\r\n", "\r", "GET / HTTP/1.1\r\nHost:"] {
        let mut client = server.connect();
        client.send(&format!("{STATUS}{stray}")).await;
        assert!(client.response().await.starts_with("HTTP/1.1 200"), "{stray:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn ignores_an_empty_line_before_a_request() {
    let server = Server::new(HttpLimits::default());
    let mut client = server.connect();
    for request in [format!("\r\n{STATUS}\r\n"), STATUS.to_owned(), format!("\r\n{STATUS}")] {
        client.send(&request).await;
        assert!(client.response().await.starts_with("HTTP/1.1 200"), "{request:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn answers_pipelined_requests_in_order() {
    let server = Server::new(HttpLimits::default());
    let mut client = server.connect();
    let one = "GET /none HTTP/1.1\r\nHost: x\r\n\r\n";
    let echo = "POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    client.send(&[STATUS, one, echo, STATUS, one].concat().repeat(40)).await;
    for _ in 0..40 {
        for status in ["200", "404", "200", "200", "404"] {
            assert!(client.response().await.starts_with(&format!("HTTP/1.1 {status}")));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refuses_malformed_requests_with_a_status() {
    let server = Server::new(HttpLimits::default());
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(32 << 10));
    let many = format!("GET / HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: a\r\n".repeat(101));
    let status = "/api/status";
    for (request, expected) in [
        ("GE\x01T / HTTP/1.1\r\n\r\n".to_owned(), "400"),
        ("GET /\r\n\r\n".to_owned(), "400"),
        ("hello\r\n\r\n".to_owned(), "400"),
        ("GET / HTTX/1.1\r\nHost: x\r\n\r\n".to_owned(), "400"),
        (format!("GET {status} HTTP/1.1\r\nHost x\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"), "400"),
        (long, "431"),
        (many, "431"),
        (format!("GET {status} HTTP/1.2\r\nHost: x\r\n\r\n"), "505"),
        (format!("GET {status} HTTP/2.0\r\nHost: x\r\n\r\n"), "505"),
        (format!("GET {status} HTTP/9.9\r\n\r\n"), "505"),
        (format!("GET {status} HTTP/1.1\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.1\r\nHost: a b\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.1\r\nHost: u@x\r\n\r\n"), "400"),
        (format!("GET {status} HTTP/1.0\r\n\r\n"), "200"),
        (format!("GET {status} HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n"), "200"),
        (format!("GET {status} HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n"), "200"),
        (format!("GET {status} HTTP/1.1\r\nHost: ::1:80\r\nConnection: close\r\n\r\n"), "200"),
        (
            format!(
                "GET {status} HTTP/1.1\r\nHost: 1:2:3:4:5:6:7:8:80\r\nConnection: close\r\n\r\n"
            ),
            "200",
        ),
        (
            format!(
                "GET {status} HTTP/1.1\r\nHost: 1:2:3:4:5:6:7:8:x\r\nConnection: close\r\n\r\n"
            ),
            "400",
        ),
    ] {
        for before in ["", STATUS] {
            let mut client = server.connect();
            client.send(&format!("{before}{request}")).await;
            if !before.is_empty() {
                assert!(client.response().await.starts_with("HTTP/1.1 200"), "{request}");
            }
            let (response, after) = client.end().await;
            let start = response.strip_prefix("HTTP/1.1 ").or(response.strip_prefix("HTTP/1.0 "));
            assert!(start.is_some_and(|s| s.starts_with(expected)), "{request:?}: {response:?}");
            assert_eq!(response.matches("HTTP/1.").count(), 1, "{response:?}");
            assert_eq!(after, Duration::ZERO);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_phase_has_its_time_limit() {
    let seconds = Duration::from_secs;
    let server = Server::new(HttpLimits {
        header_timeout: seconds(3),
        body_timeout: seconds(5),
        write_timeout: seconds(7),
        idle_timeout: seconds(11),
        ..HttpLimits::default()
    });
    let mut silent = server.connect();
    assert_eq!(silent.end().await, (String::new(), seconds(11)));

    let mut idle = server.connect();
    idle.send(STATUS).await;
    idle.response().await;
    assert_eq!(idle.end().await, (String::new(), seconds(11)));

    // Bytes do not extend the time for a head.
    let mut head = server.connect();
    for _ in 0..3 {
        head.send("X").await;
        sleep(Duration::from_millis(999)).await;
    }
    let (response, after) = head.end().await;
    assert!(response.starts_with("HTTP/1.1 408"), "{response}");
    assert_eq!(after, Duration::from_millis(3));

    let mut body = server.connect();
    body.send("POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\nabc").await;
    sleep(seconds(4)).await;
    body.send("def").await;
    assert_eq!(body.end().await.1, seconds(1));
    assert!(body.is_reset.load(Ordering::Relaxed));

    let mut write = server.connect();
    write.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let began = Instant::now();
    while !write.is_reset.load(Ordering::Relaxed) {
        sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(began.elapsed().as_secs(), 7);
    assert_eq!(server.count(|counters| &counters.timed_out), 5);
}

#[tokio::test(start_paused = true)]
async fn progress_extends_the_time_for_a_response_and_a_body() {
    let server = Server::new(HttpLimits::default());
    let mut reader = server.connect();
    reader.send("GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    let mut received = 0;
    let mut buf = vec![0; 128 << 10];
    loop {
        // 4 KiB a second and more.
        sleep(Duration::from_secs(20)).await;
        match reader.io.read(&mut buf).await.unwrap() {
            0 => break,
            len => received += len,
        }
    }
    assert!(received > 10 << 20, "{received}");

    let mut writer = server.connect();
    writer.send("POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 320000\r\n\r\n").await;
    let mut echoed = 0;
    for _ in 0..10 {
        sleep(Duration::from_secs(20)).await;
        writer.io.write_all(&[b'a'; 32_000]).await.unwrap();
        while let Ok(len) = timeout(Duration::from_millis(1), writer.io.read(&mut buf)).await {
            echoed += len.unwrap();
        }
    }
    assert!(echoed > 320_000, "{echoed}");
    assert_eq!(server.count(|counters| &counters.timed_out), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_holds_little() {
    let server = Server::new(HttpLimits::default());
    let mut clients = Vec::new();
    for number in 0..500 {
        let mut client = server.connect_from(["192.0.2.1", "2001:db8::1"][number % 2]);
        client.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n").await;
        clients.push(client);
    }
    sleep(Duration::from_millis(10)).await;
    let held = server.count(|counters| &counters.memory_bytes);
    assert!((6_000 << 10..40_000 << 10).contains(&held), "{held}");
    let mut other = server.connect_from("192.0.2.2");
    other.send(STATUS).await;
    assert!(other.response().await.starts_with("HTTP/1.1 200"));
    drop((clients, other));
    sleep(Duration::from_millis(10)).await;
    assert_eq!(server.count(|counters| &counters.memory_bytes), 0);
    assert_eq!(server.count(|counters| &counters.connections_open), 0);
}

#[tokio::test(start_paused = true)]
async fn body_that_waits_in_hyper_counts() {
    let server = Server::new(HttpLimits::default());
    // With the smallest send buffer, pieces of a file are small: hyper takes several.
    let mut client = server.connect_through("192.0.2.1", MIN_SEND_BUFFER_BYTES as usize);
    client.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n").await;
    sleep(Duration::from_millis(10)).await;
    let held = server.count(|counters| &counters.memory_bytes);
    assert!(held >= (CONNECTION_BYTES + READ_BUFFER_BYTES + (8 << 10)) as u64, "{held}");
}

#[tokio::test(start_paused = true)]
async fn an_echo_that_is_not_read_takes_little_of_the_request() {
    let server = Server::new(HttpLimits::default());
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = server.connect();
        client.send("POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n").await;
        let taken = client.send_until_blocked(&[b'x'; 10_000]).await;
        // Two pipes are full; the rest is in hyper.
        assert!((2 * PIPE_BYTES..3 * PIPE_BYTES + (32 << 10)).contains(&taken), "{taken}");
        clients.push(client);
    }
    let held = server.count(|counters| &counters.memory_bytes);
    assert!(held <= 20 * (100 << 10), "{held}");
}

#[tokio::test(start_paused = true)]
async fn responses_of_pipelined_requests_that_are_not_read_are_bounded() {
    let server = Server::new(HttpLimits::default());
    let mut client = server.connect();
    let taken = client.send_until_blocked(STATUS.repeat(100).as_bytes()).await;
    assert!(taken < 2 * PIPE_BYTES + (64 << 10), "{taken}");
    let held = server.count(|counters| &counters.memory_bytes);
    assert!(held <= 64 << 10, "{held}");
}

#[tokio::test(start_paused = true)]
async fn under_pressure_the_heaviest_source_loses_stalled_connections() {
    let server = Server::new(HttpLimits { memory_bytes: 4 << 20, ..HttpLimits::default() });
    let mut honest = server.connect_from("192.0.2.2");
    honest.send("GET /lar").await;
    let mut hostile = Vec::new();
    for _ in 0..100 {
        let mut client = server.connect_from("192.0.2.1");
        client.queued_bytes.store(32 << 10, Ordering::Relaxed);
        client.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n").await;
        hostile.push(client);
        sleep(Duration::from_millis(10)).await;
    }
    sleep(Duration::from_secs(2)).await;
    let evicted = server.count(|counters| &counters.evicted);
    assert!((20..80).contains(&evicted), "{evicted}");
    assert!(server.count(|counters| &counters.memory_bytes) <= 4 << 20);
    let is_reset = |client: &Client| client.is_reset.load(Ordering::Relaxed);
    assert_eq!(hostile.iter().filter(|client| is_reset(client)).count() as u64, evicted);
    // The longest waiting went first.
    assert!(hostile[..20].iter().all(is_reset) && !hostile[80..].iter().any(is_reset));
    honest.send("ge HTTP/1.1\r\nHost: x\r\nRange: bytes=0-9\r\n\r\n").await;
    assert!(honest.response().await.starts_with("HTTP/1.1 206"));
}

/// A client that took nothing of its last response is waited for, within limits.
#[tokio::test(start_paused = true)]
async fn closing_waits_for_acknowledgements() {
    let server = Server::new(HttpLimits::default());
    for (acknowledges, open_for) in [(true, 2), (false, 30)] {
        let mut client = server.connect();
        client.queued_bytes.store(4096, Ordering::Relaxed);
        client.send("GET /api/status HTTP/1.0\r\n\r\n").await;
        let (response, after) = client.end().await;
        assert!(response.starts_with("HTTP/1.0 200") && after == Duration::ZERO, "{response}");
        sleep(Duration::from_secs(1)).await;
        if acknowledges {
            client.queued_bytes.store(0, Ordering::Relaxed);
        }
        let began = Instant::now();
        while server.count(|counters| &counters.connections_open) > 0 {
            sleep(Duration::from_millis(100)).await;
        }
        let after = began.elapsed().as_secs() + 1;
        assert!((open_for..=open_for + 1).contains(&after), "{after}");
        assert_eq!(client.is_reset.load(Ordering::Relaxed), !acknowledges);
    }
}

#[tokio::test(start_paused = true)]
async fn stop_finishes_requests_and_ends_idle_connections() {
    let server = Server::new(HttpLimits::default());
    let mut idle = server.connect();
    idle.send(STATUS).await;
    idle.response().await;
    let mut busy = server.connect();
    busy.send("POST /api/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc").await;
    sleep(Duration::from_millis(1)).await;
    server.ledger.stop();
    assert_eq!(idle.end().await, (String::new(), Duration::ZERO));
    busy.send("def").await;
    let (response, _) = busy.end().await;
    assert!(response.ends_with("abcdef"), "{response}");
    sleep(Duration::from_millis(1)).await;
    assert_eq!(server.ledger.connections(), 0);
}
