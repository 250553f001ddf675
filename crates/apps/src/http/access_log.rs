//! Log of requests in the combined format, which Apache, nginx and their tools have.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::body::Body;
use hyper::header::{HeaderName, REFERER, USER_AGENT};
use hyper::{Request, Response};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Number of lines that wait for the disk. More are lost, and counted: no request waits for a log.
const MAX_WAITING_LINES: usize = 65_536;
/// Longest part of a line that a client chooses, in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// Log of requests. A thread of its own writes the lines.
#[derive(Debug)]
pub struct AccessLog {
    path: PathBuf,
    file: LogFile,
    lines: NonBlocking,
    _worker: WorkerGuard,
}

impl AccessLog {
    /// Appends to the file, which is created if it does not exist.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = LogFile(Arc::new(Mutex::new(append_to(path)?)));
        let builder = NonBlockingBuilder::default().lossy(true);
        let builder = builder.buffered_lines_limit(MAX_WAITING_LINES).thread_name("access-log");
        let (lines, worker) = builder.finish(file.clone());
        Ok(Self { path: path.to_owned(), file, lines, _worker: worker })
    }

    /// Opens the file anew, after it was renamed. On an error the old file stays in use.
    ///
    /// # Errors
    /// As [`AccessLog::open`].
    pub fn reopen(&self) -> io::Result<()> {
        let file = append_to(&self.path)?;
        *self.file.0.lock().unwrap_or_else(PoisonError::into_inner) = file;
        Ok(())
    }

    /// Number of lines that were lost because the disk was too slow.
    pub fn lost_lines(&self) -> u64 {
        self.lines.error_counter().dropped_lines() as u64
    }

    /// Begins the line of a request, before the request is consumed.
    pub(super) fn begin<B>(&self, peer: IpAddr, request: &Request<B>) -> PendingLine {
        PendingLine::new(peer, Timestamp::now(), request)
    }

    /// Writes the line of a request and its response.
    pub(super) fn write<B: Body>(&self, line: PendingLine, response: &Response<B>) {
        let text = line.finish(response.status().as_u16(), response.body().size_hint().exact());
        // A handle for this thread; a full queue is counted.
        let _ = self.lines.clone().write_all(text.as_bytes());
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// File that can be replaced while its writer holds it.
#[derive(Clone, Debug)]
struct LogFile(Arc<Mutex<File>>);

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}

/// Line without the response.
pub(super) struct PendingLine {
    head: String,
    tail: String,
}

impl PendingLine {
    fn new<B>(peer: IpAddr, time: Timestamp, request: &Request<B>) -> Self {
        let time = time.to_zoned(TimeZone::UTC);
        let mut head = format!("{peer} - - [{}] \"", time.strftime("%d/%b/%Y:%H:%M:%S %z"));
        push_escaped(&mut head, request.method().as_str().as_bytes());
        head.push(' ');
        let target = request.uri().path_and_query().map_or("*", |target| target.as_str());
        push_escaped(&mut head, target.as_bytes());
        // HTTP/1.0 and HTTP/1.1 are written so by Debug.
        let _ = write!(head, " {:?}\"", request.version());
        let mut tail = String::new();
        for name in [REFERER, USER_AGENT] {
            tail.push_str(" \"");
            push_escaped(&mut tail, header(request, &name));
            tail.push('"');
        }
        Self { head, tail }
    }

    fn finish(self, status: u16, bytes: Option<u64>) -> String {
        let Self { mut head, tail } = self;
        let bytes = bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
        let _ = writeln!(head, " {status} {bytes}{tail}");
        head
    }
}

fn header<'r, B>(request: &'r Request<B>, name: &HeaderName) -> &'r [u8] {
    request.headers().get(name).map_or(b"-", |value| value.as_bytes())
}

/// Appends text that a client chose. Only printable characters stay as they are, so that no client
/// can write a line of its own, or to a terminal.
fn push_escaped(line: &mut String, text: &[u8]) {
    for &byte in text.iter().take(MAX_TEXT_BYTES) {
        match byte {
            b'"' | b'\\' => line.extend(['\\', byte as char]),
            b' '..=b'~' => line.push(byte as char),
            _ => {
                let _ = write!(line, "\\x{byte:02x}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(request: &Request<()>, status: u16, bytes: Option<u64>) -> String {
        let time = "2026-11-28T05:13:37Z".parse().unwrap();
        PendingLine::new("192.0.2.7".parse().unwrap(), time, request).finish(status, bytes)
    }

    #[test]
    fn line_has_the_combined_format() {
        let request = Request::get("/index.html?a=b")
            .header("referer", "http://example.org/")
            .header("user-agent", "curl/8.0")
            .body(())
            .unwrap();
        assert_eq!(
            line(&request, 200, Some(5)),
            "192.0.2.7 - - [28/Nov/2026:05:13:37 +0000] \"GET /index.html?a=b HTTP/1.1\" 200 5 \
             \"http://example.org/\" \"curl/8.0\"\n"
        );
        let bare = Request::get("/").body(()).unwrap();
        assert!(line(&bare, 404, None).ends_with("\" 404 - \"-\" \"-\"\n"));
    }

    #[test]
    fn client_cannot_begin_a_line_or_end_a_field() {
        let agent = hyper::header::HeaderValue::from_bytes(b"a\"b\\c\td\xff\x80").unwrap();
        let request = Request::get("/").header(USER_AGENT, agent).body(()).unwrap();
        let text = line(&request, 200, None);
        assert!(text.ends_with("\"a\\\"b\\\\c\\x09d\\xff\\x80\"\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
        let long = Request::get("/").header(USER_AGENT, "x".repeat(60_000)).body(()).unwrap();
        assert!(line(&long, 200, None).len() < 5_000);
    }

    #[test]
    fn renamed_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let log = AccessLog::open(&path).unwrap();
        let request = Request::get("/first").body(()).unwrap();
        let old = folder.path().join("access.log.1");
        let write = |request: &Request<()>| {
            let pending = log.begin("192.0.2.7".parse().unwrap(), request);
            log.write(pending, &Response::new(String::new()));
        };
        write(&request);
        while std::fs::read_to_string(&path).unwrap().is_empty() {
            std::thread::yield_now();
        }
        std::fs::rename(&path, &old).unwrap();
        log.reopen().unwrap();
        write(&Request::get("/second").body(()).unwrap());
        drop(log);
        assert!(std::fs::read_to_string(&old).unwrap().contains("GET /first "));
        assert!(std::fs::read_to_string(&path).unwrap().contains("GET /second "));
    }
}
