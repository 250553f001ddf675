//! Log of queries and answers as dnstap, which DNS servers and their tools have.
//!
//! Messages are protocol buffers (dnstap.proto of dnstap.info) in a Frame Streams stream, in a file
//! or to a receiver on a Unix socket, with a handshake. A thread of its own writes them; no query
//! waits for it.

mod frame_stream;

use std::io::{self, BufWriter, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prost::Message as _;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

use self::frame_stream::FrameStream;

/// Number of messages that wait for the receiver. More are lost, and counted.
const MAX_WAITING_MESSAGES: usize = 65_536;

/// Interval at which a lost receiver is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Log of the messages of a DNS server. Clones write to the same log.
#[derive(Clone, Debug)]
pub struct QueryLog {
    output: Output,
    messages: NonBlocking,
    identity: Option<Vec<u8>>,
    version: Option<Vec<u8>>,
    _worker: Arc<WorkerGuard>,
}

impl QueryLog {
    /// Connects to a Unix socket at `path` if there is one, and creates a file there otherwise.
    /// `identity` and `version` of the server are part of each message.
    ///
    /// # Errors
    /// The receiver does not take the connection, or the file exists or cannot be created.
    pub fn open(path: &Path, identity: Option<&str>, version: Option<&str>) -> io::Result<Self> {
        let output = Output::open(path)?;
        let builder = NonBlockingBuilder::default().lossy(true);
        let builder = builder.buffered_lines_limit(MAX_WAITING_MESSAGES).thread_name("dnstap");
        let (messages, worker) = builder.finish(output.clone());
        let bytes = |text: Option<&str>| text.map(|text| text.as_bytes().to_vec());
        Ok(Self {
            output,
            messages,
            identity: bytes(identity),
            version: bytes(version),
            _worker: Arc::new(worker),
        })
    }

    /// Begins a new file if the old one was renamed or removed.
    ///
    /// # Errors
    /// The file cannot be created. The old file stays in use.
    pub fn reopen(&self) -> io::Result<()> {
        if self.output.path.exists() { Ok(()) } else { self.output.reopen() }
    }

    /// Number of messages that were lost because the receiver was too slow, or gone.
    pub fn lost_messages(&self) -> u64 {
        let waiting = self.messages.error_counter().dropped_lines() as u64;
        waiting + self.output.lost.load(Ordering::Relaxed)
    }

    /// Writes a message that came from `client` at `time_ns` since the Unix epoch, and its answer.
    // Not inlined: a server without a log must not pay for this code.
    #[inline(never)]
    pub(super) fn write(
        &self,
        query: &[u8],
        client: SocketAddr,
        is_stream: bool,
        time_ns: u64,
        answer: Option<&[u8]>,
    ) {
        self.write_message(Record::of_query(query, client, is_stream, time_ns));
        if let Some(answer) = answer {
            self.write_message(Record::of_answer(answer, client, is_stream, time_ns));
        }
    }

    fn write_message(&self, record: Record) {
        let message = Dnstap {
            identity: self.identity.clone(),
            version: self.version.clone(),
            message: Some(record),
            r#type: DNSTAP_MESSAGE,
        };
        let frame = frame_stream::data_frame(&message.encode_to_vec());
        // A handle for this thread; a full queue is counted.
        let _ = self.messages.clone().write_all(&frame);
    }
}

/// Value of `Dnstap.type`.
const DNSTAP_MESSAGE: i32 = 1;

#[derive(Clone, PartialEq, prost::Message)]
struct Dnstap {
    #[prost(bytes = "vec", optional, tag = "1")]
    identity: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "2")]
    version: Option<Vec<u8>>,
    #[prost(message, optional, tag = "14")]
    message: Option<Record>,
    #[prost(int32, required, tag = "15")]
    r#type: i32,
}

/// `Message` of dnstap.proto.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int32, required, tag = "1")]
    r#type: i32,
    #[prost(int32, optional, tag = "2")]
    socket_family: Option<i32>,
    #[prost(int32, optional, tag = "3")]
    socket_protocol: Option<i32>,
    #[prost(bytes = "vec", optional, tag = "4")]
    query_address: Option<Vec<u8>>,
    #[prost(uint32, optional, tag = "6")]
    query_port: Option<u32>,
    #[prost(uint64, optional, tag = "8")]
    query_time_sec: Option<u64>,
    #[prost(fixed32, optional, tag = "9")]
    query_time_nsec: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "10")]
    query_message: Option<Vec<u8>>,
    #[prost(uint64, optional, tag = "12")]
    response_time_sec: Option<u64>,
    #[prost(fixed32, optional, tag = "13")]
    response_time_nsec: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "14")]
    response_message: Option<Vec<u8>>,
}

impl Record {
    const AUTH_QUERY: i32 = 1;
    const AUTH_RESPONSE: i32 = 2;

    fn of_query(query: &[u8], client: SocketAddr, is_stream: bool, time_ns: u64) -> Self {
        Self {
            r#type: Self::AUTH_QUERY,
            query_message: Some(query.to_vec()),
            ..Self::of_client(client, is_stream, time_ns)
        }
    }

    fn of_answer(answer: &[u8], client: SocketAddr, is_stream: bool, time_ns: u64) -> Self {
        let record = Self::of_client(client, is_stream, time_ns);
        Self {
            r#type: Self::AUTH_RESPONSE,
            response_time_sec: record.query_time_sec,
            response_time_nsec: record.query_time_nsec,
            response_message: Some(answer.to_vec()),
            ..record
        }
    }

    fn of_client(client: SocketAddr, is_stream: bool, time_ns: u64) -> Self {
        let (family, address) = match client.ip().to_canonical() {
            IpAddr::V4(ip) => (1, ip.octets().to_vec()),
            IpAddr::V6(ip) => (2, ip.octets().to_vec()),
        };
        Self {
            socket_family: Some(family),
            socket_protocol: Some(if is_stream { 2 } else { 1 }),
            query_address: Some(address),
            query_port: Some(client.port().into()),
            query_time_sec: Some(time_ns / 1_000_000_000),
            query_time_nsec: Some((time_ns % 1_000_000_000) as u32),
            ..Self::default()
        }
    }
}

/// File or connection that can be replaced while its writer holds it.
#[derive(Clone, Debug)]
struct Output {
    path: PathBuf,
    stream: Arc<Mutex<StreamState>>,
    lost: Arc<AtomicU64>,
    /// The loss of the receiver was told.
    is_loss_known: Arc<AtomicBool>,
}

#[derive(Debug)]
enum StreamState {
    Open(BufWriter<FrameStream>),
    /// Gone, and when to try again.
    Lost(Instant),
}

impl StreamState {
    fn open(path: &Path) -> io::Result<Self> {
        FrameStream::open(path).map(|stream| Self::Open(BufWriter::new(stream)))
    }

    fn lost() -> Self {
        Self::Lost(Instant::now() + RETRY_INTERVAL)
    }
}

impl Output {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            stream: Arc::new(Mutex::new(StreamState::open(path)?)),
            lost: Arc::default(),
            is_loss_known: Arc::default(),
        })
    }

    fn reopen(&self) -> io::Result<()> {
        let stream = StreamState::open(&self.path)?;
        *self.lock() = stream;
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, StreamState> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, step: impl FnOnce(&mut BufWriter<FrameStream>) -> io::Result<()>) -> bool {
        let mut state = self.lock();
        if let StreamState::Lost(retry_at) = *state
            && Instant::now() >= retry_at
        {
            let opened = StreamState::open(&self.path);
            *state = opened.unwrap_or_else(|_| StreamState::lost());
        }
        let StreamState::Open(stream) = &mut *state else { return false };
        match step(stream) {
            Ok(()) => {
                self.is_loss_known.store(false, Ordering::Relaxed);
                true
            }
            Err(error) => {
                if !self.is_loss_known.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "{}: {error}: messages of the query log are lost until it takes them again",
                        self.path.display()
                    );
                }
                *state = StreamState::lost();
                false
            }
        }
    }
}

/// Takes whole frames, and loses those that the receiver does not take.
impl Write for Output {
    fn write(&mut self, frame: &[u8]) -> io::Result<usize> {
        if !self.run(|stream| stream.write_all(frame)) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(frame.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.run(BufWriter::flush);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::frame_stream::{Control, data_frame};
    use super::*;

    const CLIENT: &str = "[2001:db8::1]:5353";

    fn messages(mut bytes: &[u8]) -> Vec<Dnstap> {
        let mut messages = Vec::new();
        while let Some((len, rest)) = bytes.split_first_chunk() {
            let len = u32::from_be_bytes(*len) as usize;
            if len == 0 {
                let (len, rest) = rest.split_first_chunk().unwrap();
                bytes = &rest[u32::from_be_bytes(*len) as usize..];
                continue;
            }
            messages.push(Dnstap::decode(&rest[..len]).unwrap());
            bytes = &rest[len..];
        }
        messages
    }

    #[test]
    fn file_has_query_and_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.dnstap");
        let log = QueryLog::open(&path, Some("ns1"), None).unwrap();
        log.write(b"question", CLIENT.parse().unwrap(), true, 7_000_000_009, Some(b"answer"));
        log.write(b"dropped", "192.0.2.1:9".parse().unwrap(), false, 0, None);
        drop(log);
        let found = messages(&std::fs::read(&path).unwrap());
        assert_eq!(found.len(), 3);
        assert!(found.iter().all(|message| message.identity.as_deref() == Some(b"ns1".as_slice())));
        let records: Vec<Record> = found.into_iter().map(|found| found.message.unwrap()).collect();
        assert_eq!(records[0].query_message.as_deref(), Some(b"question".as_slice()));
        assert_eq!((records[0].r#type, records[0].socket_protocol), (1, Some(2)));
        assert_eq!((records[1].r#type, records[1].query_port), (2, Some(5353)));
        assert_eq!(records[1].response_message.as_deref(), Some(b"answer".as_slice()));
        assert_eq!(
            (records[1].response_time_sec, records[1].response_time_nsec),
            (Some(7), Some(9))
        );
        assert_eq!((records[2].socket_family, records[2].query_port), (Some(1), Some(9)));
        let existing = QueryLog::open(&path, None, None).unwrap_err();
        assert_eq!(existing.kind(), io::ErrorKind::AlreadyExists, "an old log is kept");
    }

    #[test]
    fn renamed_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.dnstap");
        let log = QueryLog::open(&path, None, None).unwrap();
        let old = folder.path().join("old");
        std::fs::rename(&path, &old).unwrap();
        log.reopen().unwrap();
        log.write(b"question", CLIENT.parse().unwrap(), false, 0, None);
        drop(log);
        assert_eq!(messages(&std::fs::read(&path).unwrap()).len(), 1);
        assert_eq!(messages(&std::fs::read(&old).unwrap()).len(), 0);
    }

    /// Takes one connection with its handshake, and returns the bytes after it.
    fn receive(listener: &UnixListener) -> Vec<u8> {
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(Control::read(&mut stream).unwrap(), Control::Ready);
        Control::Accept.write(&mut stream).unwrap();
        assert_eq!(Control::read(&mut stream).unwrap(), Control::Start);
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn receiver_on_a_socket_gets_messages_after_its_handshake() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let receiver = thread::spawn(move || receive(&listener));
        let log = QueryLog::open(&path, None, None).unwrap();
        log.write(b"question", CLIENT.parse().unwrap(), false, 0, None);
        assert_eq!(log.lost_messages(), 0);
        drop(log);
        assert_eq!(messages(&receiver.join().unwrap()).len(), 1);
    }

    #[test]
    fn messages_for_a_receiver_that_is_gone_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let receiver = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            Control::read(&mut stream).unwrap();
            Control::Accept.write(&mut stream).unwrap();
            Control::read(&mut stream).unwrap();
            // The listener and the connection end here.
        });
        let log = QueryLog::open(&path, None, None).unwrap();
        receiver.join().unwrap();
        let client = CLIENT.parse().unwrap();
        while log.lost_messages() < 2 {
            log.write(b"question", client, false, 0, None);
            thread::yield_now();
        }
    }

    #[test]
    fn receiver_that_refuses_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let receiver = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            Control::read(&mut stream).unwrap();
            stream.write_all(&data_frame(b"no control frame")).unwrap();
        });
        assert!(QueryLog::open(&path, None, None).is_err());
        receiver.join().unwrap();
    }
}
