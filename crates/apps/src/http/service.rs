//! What is answered to one request.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderValue, LAST_MODIFIED,
    LOCATION, SERVER,
};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

use super::answer::{finish, not_allowed, plain};
use super::api;
use super::body::ResponseBody;
use super::conditions::Part;
use super::files::{Entry, Folder, Found};

/// What a server has done so far. May be read while it runs.
#[derive(Debug, Default)]
pub struct HttpCounters {
    /// Connections that are open.
    pub connections_open: AtomicU64,
    /// Connections that were accepted.
    pub connections: AtomicU64,
    /// Answers by the first digit of their status, from 1 on.
    pub answers: [AtomicU64; 5],
}

impl HttpCounters {
    /// All answers.
    pub fn answered(&self) -> u64 {
        self.answers.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// What more `/api/status` tells.
type MoreStatus = Box<dyn Fn() -> Value + Send + Sync>;

/// Answers requests: the files below a folder, and an API under `/api/`.
///
/// | path | methods | answer |
/// |---|---|---|
/// | `/api/status` | GET, HEAD | what the server has done so far, as JSON |
/// | `/api/echo` | POST, PUT | the body that was sent |
/// | anything else | GET, HEAD | a file; of a folder its `index.html` |
///
/// Files have entity tags, dates and single ranges (RFC 9110). No name and no
/// link leads out of the folder.
pub struct Service {
    folder: Option<Folder>,
    counters: HttpCounters,
    more_status: MoreStatus,
}

/// Headers of every method that is meant for files.
const READS: &str = "GET, HEAD";

impl Service {
    /// Serves the files below `root`; without it only the API.
    /// `more_status` is shown by `/api/status`.
    ///
    /// # Errors
    /// When the folder cannot be opened.
    pub fn new(
        root: Option<&Path>,
        more_status: impl Fn() -> Value + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let folder = root.map(Folder::open).transpose()?;
        Ok(Self { folder, counters: HttpCounters::default(), more_status: Box::new(more_status) })
    }

    /// What was done so far.
    pub fn counters(&self) -> &HttpCounters {
        &self.counters
    }

    /// Answers one request.
    ///
    /// # Errors
    /// None: trouble is an answer too.
    pub async fn respond(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<ResponseBody>, Infallible> {
        let mut response = self.route(request);
        let class = usize::from(response.status().as_u16() / 100).clamp(1, 5);
        self.counters.answers[class - 1].fetch_add(1, Ordering::Relaxed);
        response.headers_mut().insert(SERVER, HeaderValue::from_static("tidegate"));
        Ok(response)
    }

    /// What `/api/status` tells.
    fn status(&self) -> Value {
        let counters = &self.counters;
        let count = |class: usize| counters.answers[class].load(Ordering::Relaxed);
        let mut status = json!({
            "server": "tidegate",
            "version": env!("CARGO_PKG_VERSION"),
            "connections": counters.connections.load(Ordering::Relaxed),
            "connections_open": counters.connections_open.load(Ordering::Relaxed),
            "answers": counters.answered(),
            "answers_2xx": count(1),
            "answers_3xx": count(2),
            "answers_4xx": count(3),
            "answers_5xx": count(4),
        });
        if let (Value::Object(status), Value::Object(more)) = (&mut status, (self.more_status)()) {
            status.extend(more);
        }
        status
    }

    fn route(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let path = request.uri().path();
        if path.starts_with("/api/") {
            return api::respond(request, || self.status());
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return not_allowed(READS);
        }
        let Some(folder) = &self.folder else { return plain(StatusCode::NOT_FOUND) };
        match folder.find(path) {
            Ok(Found::File(entry)) => file(&request, entry),
            Ok(Found::FolderWithoutSlash) => with_slash(&request),
            Ok(Found::Nothing) => plain(StatusCode::NOT_FOUND),
            Ok(Found::Forbidden) => plain(StatusCode::FORBIDDEN),
            Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Links of a page count from its name: a folder needs its slash.
fn with_slash(request: &Request<Incoming>) -> Response<ResponseBody> {
    // One slash at the front: two would be the name of another host.
    let path = request.uri().path().trim_start_matches('/');
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let builder = Response::builder().status(StatusCode::MOVED_PERMANENTLY);
    finish(builder.header(LOCATION, format!("/{path}/{query}")), ResponseBody::empty())
}

fn file(request: &Request<Incoming>, entry: Entry) -> Response<ResponseBody> {
    let Entry { file, len, validators, media_type } = entry;
    let part = validators.judge(request.headers(), len);
    let builder = Response::builder()
        .header(ETAG, &validators.etag)
        .header(LAST_MODIFIED, httpdate::fmt_http_date(validators.modified))
        .header(ACCEPT_RANGES, "bytes");
    let (status, first, count) = match part {
        Part::NotModified => {
            return finish(builder.status(StatusCode::NOT_MODIFIED), ResponseBody::empty());
        }
        Part::PreconditionFailed => return plain(StatusCode::PRECONDITION_FAILED),
        Part::Unsatisfiable => {
            let builder = builder.status(StatusCode::RANGE_NOT_SATISFIABLE);
            let builder = builder.header(CONTENT_RANGE, format!("bytes */{len}"));
            return finish(builder, ResponseBody::empty());
        }
        Part::Whole => (StatusCode::OK, 0, len),
        Part::Range(first, last) => (StatusCode::PARTIAL_CONTENT, first, last - first + 1),
    };
    let mut builder = builder.status(status).header(CONTENT_TYPE, media_type);
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {first}-{}/{len}", first + count - 1);
        builder = builder.header(CONTENT_RANGE, range);
    }
    if request.method() == Method::HEAD {
        return finish(builder.header(CONTENT_LENGTH, count), ResponseBody::empty());
    }
    match ResponseBody::file(file, first, count) {
        Ok(body) => finish(builder, body),
        Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR),
    }
}
