//! The API.

use std::sync::atomic::Ordering;

use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

use super::Service;
use super::body::ResponseBody;
use super::service::{finish, not_allowed, plain};

const OCTETS: &str = "application/octet-stream";

/// Answers a request for something under `/api/`.
pub(super) fn respond(service: &Service, request: Request<Incoming>) -> Response<ResponseBody> {
    match (request.uri().path(), request.method()) {
        ("/api/status", &Method::GET | &Method::HEAD) => status(service, request.method()),
        ("/api/status", _) => not_allowed("GET, HEAD"),
        ("/api/echo", &Method::POST | &Method::PUT) => echo(request),
        ("/api/echo", _) => not_allowed("POST, PUT"),
        _ => plain(StatusCode::NOT_FOUND),
    }
}

fn status(service: &Service, method: &Method) -> Response<ResponseBody> {
    let counters = service.counters();
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
    if let (Value::Object(status), Value::Object(more)) = (&mut status, (service.more_status)()) {
        status.extend(more);
    }
    let text = format!("{status}\n");
    let builder = Response::builder()
        .header(CONTENT_TYPE, "application/json")
        .header(CACHE_CONTROL, "no-store")
        .header(CONTENT_LENGTH, text.len());
    let is_head = method == Method::HEAD;
    finish(builder, if is_head { ResponseBody::empty() } else { ResponseBody::bytes(text) })
}

/// What comes goes back as it comes: nothing is gathered.
fn echo(request: Request<Incoming>) -> Response<ResponseBody> {
    let media_type = request.headers().get(CONTENT_TYPE).cloned();
    let media_type = media_type.unwrap_or(hyper::header::HeaderValue::from_static(OCTETS));
    let builder = Response::builder().header(CONTENT_TYPE, media_type);
    finish(builder, ResponseBody::Echo(request.into_body()))
}
