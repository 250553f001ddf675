//! The API.

use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::Value;

use super::answer::{finish, not_allowed, plain};
use super::body::ResponseBody;

const OCTETS: &str = "application/octet-stream";

/// Answers a request for something under `/api/`. `tell_status` says what the
/// server has done so far.
pub(super) fn respond(
    request: Request<Incoming>,
    tell_status: impl FnOnce() -> Value,
) -> Response<ResponseBody> {
    match (request.uri().path(), request.method()) {
        ("/api/status", &Method::GET | &Method::HEAD) => status(&tell_status(), request.method()),
        ("/api/status", _) => not_allowed("GET, HEAD"),
        ("/api/echo", &Method::POST | &Method::PUT) => echo(request),
        ("/api/echo", _) => not_allowed("POST, PUT"),
        _ => plain(StatusCode::NOT_FOUND),
    }
}

fn status(status: &Value, method: &Method) -> Response<ResponseBody> {
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
