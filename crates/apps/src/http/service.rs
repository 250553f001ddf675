//! HTTP service: answers one request.

use std::io;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCEPT_RANGES, CONNECTION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HOST,
    HeaderValue, LAST_MODIFIED, LOCATION, RETRY_AFTER, SERVER,
};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode, Version};
use serde_json::{Value, json};

use super::access_log::AccessLog;
use super::api;
use super::body::ResponseBody;
use super::conditions::ConditionalOutcome;
use super::descriptors::is_out_of_descriptors;
use super::files::{DocumentRoot, FileEntry, FileLookup};
use super::response::{build_response, method_not_allowed, status_response};
use super::settings::HttpSettings;
use crate::{DurationCounts, work};

/// Counters of an HTTP server. May be read while the server runs.
#[derive(Debug, Default)]
pub struct HttpCounters {
    /// Connections currently open.
    pub connections_open: AtomicU64,
    /// Connections accepted so far.
    pub connections: AtomicU64,
    /// Connections that exceeded a time limit.
    pub timed_out: AtomicU64,
    /// Stalled connections that were ended because memory, connections or descriptors ran out.
    pub evicted: AtomicU64,
    /// Memory that the connections hold, with all that waits in their buffers, in bytes.
    pub memory_bytes: AtomicU64,
    /// Responses by status class: index 0 is 1xx, index 4 is 5xx.
    pub responses: [AtomicU64; 5],
    /// Requests that admission has refused.
    pub refused: AtomicU64,
    /// Sessions that admission has begun.
    pub sessions: AtomicU64,
    /// Requests of admitted sessions.
    pub session_requests: AtomicU64,
    /// Requests of admitted sessions that were refused.
    pub session_requests_refused: AtomicU64,
    /// Time that responses took to make, without their transfer.
    pub durations: DurationCounts,
}

impl HttpCounters {
    /// Number of responses of all classes.
    pub fn total_responses(&self) -> u64 {
        self.responses.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Replaces a connection's part of the memory. Returns the new part.
    pub(super) fn recount(&self, old_bytes: u64, new_bytes: usize) -> u64 {
        let new_bytes = new_bytes as u64;
        // The sum wraps around and back.
        self.memory_bytes.fetch_add(new_bytes.wrapping_sub(old_bytes), Ordering::Relaxed);
        new_bytes
    }
}

/// Source of further fields of `/api/status`.
type ExtraStatus = Box<dyn Fn() -> Value + Send + Sync>;

/// HTTP service: static files below a document root, and an API below `/api/`.
///
/// | path | methods | response |
/// |---|---|---|
/// | `/api/status` | GET, HEAD | the server's counters, as JSON |
/// | `/api/echo` | POST, PUT | the request body |
/// | any other | GET, HEAD | a file; for a directory its `index.html` |
///
/// Files have entity tags, modification dates and single ranges (RFC 9110). No path and no
/// symbolic link leads out of the document root.
pub struct Service {
    document_root: RwLock<Option<Arc<DocumentRoot>>>,
    new_settings: Mutex<NewSettings>,
    counters: HttpCounters,
    extra_status: ExtraStatus,
    /// Work before each response, in iterations.
    work_iterations: u64,
    access_log: Option<AccessLog>,
}

/// Settings that have replaced those of the server's start.
#[derive(Default)]
struct NewSettings {
    /// Number of replacements.
    generation: u64,
    settings: Option<HttpSettings>,
}

/// Value of the `Allow` header for files.
const FILE_METHODS: &str = "GET, HEAD";

impl Service {
    /// Creates a service for the files below `root`; without `root` it serves the API only.
    /// `/api/status` includes the fields of the object that `extra_status` returns.
    ///
    /// # Errors
    /// When the document root cannot be opened.
    pub fn new(
        root: Option<&Path>,
        extra_status: impl Fn() -> Value + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let document_root = root.map(DocumentRoot::open).transpose()?;
        Ok(Self {
            document_root: RwLock::new(document_root.map(Arc::new)),
            new_settings: Mutex::default(),
            counters: HttpCounters::default(),
            extra_status: Box::new(extra_status),
            work_iterations: 0,
            access_log: None,
        })
    }

    /// Does this many iterations of work before each response, in place of an application's work.
    pub fn with_work(self, work_iterations: u64) -> Self {
        Self { work_iterations, ..self }
    }

    /// Logs each request.
    pub fn with_access_log(self, access_log: Option<AccessLog>) -> Self {
        Self { access_log, ..self }
    }

    /// Log of the requests, if there is one.
    pub fn access_log(&self) -> Option<&AccessLog> {
        self.access_log.as_ref()
    }

    /// Replaces the document root and the settings while the server runs. Requests in progress and
    /// open connections keep theirs.
    pub fn replace_settings(&self, root: Option<DocumentRoot>, settings: HttpSettings) {
        *self.document_root.write().unwrap_or_else(PoisonError::into_inner) = root.map(Arc::new);
        let mut new = self.lock_new_settings();
        new.generation += 1;
        new.settings = Some(settings);
    }

    /// Settings that have replaced those of the `seen` generation, if any; each core of the server
    /// keeps its own `seen`, 0 at first.
    pub(super) fn new_settings(&self, seen: &mut u64) -> Option<HttpSettings> {
        let new = self.lock_new_settings();
        let is_new = std::mem::replace(seen, new.generation) != new.generation;
        new.settings.clone().filter(|_| is_new)
    }

    fn lock_new_settings(&self) -> MutexGuard<'_, NewSettings> {
        self.new_settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn document_root(&self) -> Option<Arc<DocumentRoot>> {
        self.document_root.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counters so far.
    pub fn counters(&self) -> &HttpCounters {
        &self.counters
    }

    /// Answers one request.
    pub fn respond(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let began = Instant::now();
        if self.work_iterations > 0 {
            work::spend(self.work_iterations);
        }
        let response = if has_valid_host(&request) { self.route(request) } else { bad_request() };
        self.counters.durations.record(1, began.elapsed());
        self.finish(response)
    }

    /// Refuses one request, without work for it. A body that has not arrived is not waited for.
    pub(super) fn refuse(
        &self,
        request: &Request<Incoming>,
        retry_after_s: u32,
    ) -> Response<ResponseBody> {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        let mut response = status_response(StatusCode::SERVICE_UNAVAILABLE);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after_s));
        if !request.body().is_end_stream() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.finish(response)
    }

    /// Counts a response and names the server.
    fn finish(&self, mut response: Response<ResponseBody>) -> Response<ResponseBody> {
        let class = usize::from(response.status().as_u16() / 100).clamp(1, 5);
        self.counters.responses[class - 1].fetch_add(1, Ordering::Relaxed);
        response.headers_mut().insert(SERVER, HeaderValue::from_static("tidegate"));
        response
    }

    /// Object that `/api/status` returns.
    fn status(&self) -> Value {
        let counters = &self.counters;
        let count = |class: usize| counters.responses[class].load(Ordering::Relaxed);
        let mut status = json!({
            "server": "tidegate",
            "version": env!("CARGO_PKG_VERSION"),
            "connections": counters.connections.load(Ordering::Relaxed),
            "connections_open": counters.connections_open.load(Ordering::Relaxed),
            "timed_out": counters.timed_out.load(Ordering::Relaxed),
            "evicted": counters.evicted.load(Ordering::Relaxed),
            "memory_bytes": counters.memory_bytes.load(Ordering::Relaxed),
            "answers": counters.total_responses(),
            "answers_2xx": count(1),
            "answers_3xx": count(2),
            "answers_4xx": count(3),
            "answers_5xx": count(4),
            "refused": counters.refused.load(Ordering::Relaxed),
            "sessions": counters.sessions.load(Ordering::Relaxed),
            "session_requests": counters.session_requests.load(Ordering::Relaxed),
            "session_requests_refused": counters.session_requests_refused.load(Ordering::Relaxed),
        });
        if let (Value::Object(status), Value::Object(extra)) = (&mut status, (self.extra_status)())
        {
            status.extend(extra);
        }
        status
    }

    fn route(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let path = request.uri().path();
        if path.starts_with("/api/") {
            return api::respond(request, || self.status());
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return method_not_allowed(FILE_METHODS);
        }
        let Some(document_root) = self.document_root() else {
            return status_response(StatusCode::NOT_FOUND);
        };
        match document_root.find(path) {
            Ok(FileLookup::File(entry)) => file_response(&request, entry),
            Ok(FileLookup::DirectoryWithoutSlash) => redirect_with_slash(&request),
            Ok(FileLookup::NotFound) => status_response(StatusCode::NOT_FOUND),
            Ok(FileLookup::Forbidden) => status_response(StatusCode::FORBIDDEN),
            // Out of descriptors: another connection has to end first.
            Err(error) if is_out_of_descriptors(&error) => {
                status_response(StatusCode::SERVICE_UNAVAILABLE)
            }
            Err(_) => status_response(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("document_root", &self.document_root())
            .finish_non_exhaustive()
    }
}

/// Returns true if the request names its host as RFC 9112 section 3.2 demands: exactly once with
/// HTTP/1.1, at most once with HTTP/1.0, as an authority without user information.
fn has_valid_host(request: &Request<Incoming>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => request.version() < Version::HTTP_11,
        (Some(host), None) => {
            let host = host.as_bytes();
            host.is_empty()
                || !host.contains(&b'@') && Authority::try_from(host).is_ok()
                || is_ipv6_without_brackets(host)
        }
        (Some(_), Some(_)) => false,
    }
}

/// Returns true for an IPv6 address without brackets, perhaps with a port behind it. RFC 3986 asks
/// for brackets; h2load sends none.
fn is_ipv6_without_brackets(host: &[u8]) -> bool {
    let is_address = |text: &str| text.parse::<Ipv6Addr>().is_ok();
    str::from_utf8(host).is_ok_and(|host| {
        let without_port = || host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        is_address(host) || without_port().is_some_and(|(address, _)| is_address(address))
    })
}

/// Refuses a request and closes the connection.
fn bad_request() -> Response<ResponseBody> {
    let mut response = status_response(StatusCode::BAD_REQUEST);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Redirects to the path with a trailing slash, so that relative links in the page resolve.
fn redirect_with_slash(request: &Request<Incoming>) -> Response<ResponseBody> {
    // Exactly one leading slash: a URL that starts with two names another host.
    let path = request.uri().path().trim_start_matches('/');
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let builder = Response::builder().status(StatusCode::MOVED_PERMANENTLY);
    build_response(builder.header(LOCATION, format!("/{path}/{query}")), ResponseBody::empty())
}

fn file_response(request: &Request<Incoming>, entry: FileEntry) -> Response<ResponseBody> {
    let FileEntry { file, len, validators, media_type } = entry;
    let outcome = validators.evaluate(request.headers(), len);
    let builder = Response::builder()
        .header(ETAG, &validators.etag)
        .header(LAST_MODIFIED, httpdate::fmt_http_date(validators.modified))
        .header(ACCEPT_RANGES, "bytes");
    let (status, first, count) = match outcome {
        ConditionalOutcome::NotModified => {
            return build_response(builder.status(StatusCode::NOT_MODIFIED), ResponseBody::empty());
        }
        ConditionalOutcome::PreconditionFailed => {
            return status_response(StatusCode::PRECONDITION_FAILED);
        }
        ConditionalOutcome::Unsatisfiable => {
            let builder = builder.status(StatusCode::RANGE_NOT_SATISFIABLE);
            let builder = builder.header(CONTENT_RANGE, format!("bytes */{len}"));
            return build_response(builder, ResponseBody::empty());
        }
        ConditionalOutcome::Full => (StatusCode::OK, 0, len),
        ConditionalOutcome::Range(first, last) => {
            (StatusCode::PARTIAL_CONTENT, first, last - first + 1)
        }
    };
    let mut builder = builder.status(status).header(CONTENT_TYPE, media_type);
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {first}-{}/{len}", first + count - 1);
        builder = builder.header(CONTENT_RANGE, range);
    }
    if request.method() == Method::HEAD {
        return build_response(builder.header(CONTENT_LENGTH, count), ResponseBody::empty());
    }
    match ResponseBody::file(file, first, count) {
        Ok(body) => build_response(builder, body),
        Err(_) => status_response(StatusCode::INTERNAL_SERVER_ERROR),
    }
}
