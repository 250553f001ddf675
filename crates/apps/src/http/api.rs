//! HTTP API below `/api/`.

use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::Value;

use super::body::ResponseBody;
use super::response::{build_response, method_not_allowed, status_response};

const OCTET_STREAM: &str = "application/octet-stream";

/// Answers a request below `/api/`. `read_status` returns the server's status object.
pub(super) fn respond(
    request: Request<Incoming>,
    read_status: impl FnOnce() -> Value,
) -> Response<ResponseBody> {
    match (request.uri().path(), request.method()) {
        ("/api/status", &Method::GET | &Method::HEAD) => status(&read_status(), request.method()),
        ("/api/status", _) => method_not_allowed("GET, HEAD"),
        ("/api/echo", &Method::POST | &Method::PUT) => echo(request),
        ("/api/echo", _) => method_not_allowed("POST, PUT"),
        _ => status_response(StatusCode::NOT_FOUND),
    }
}

fn status(status: &Value, method: &Method) -> Response<ResponseBody> {
    let text = format!("{status}\n");
    let builder = Response::builder()
        .header(CONTENT_TYPE, "application/json")
        .header(CACHE_CONTROL, "no-store")
        .header(CONTENT_LENGTH, text.len());
    let is_head = method == Method::HEAD;
    build_response(builder, if is_head { ResponseBody::empty() } else { ResponseBody::bytes(text) })
}

/// Streams the request body back without buffering all of it.
fn echo(request: Request<Incoming>) -> Response<ResponseBody> {
    let media_type = request.headers().get(CONTENT_TYPE).cloned();
    let media_type = media_type.unwrap_or(hyper::header::HeaderValue::from_static(OCTET_STREAM));
    let builder = Response::builder().header(CONTENT_TYPE, media_type);
    build_response(builder, ResponseBody::echo(request.into_body()))
}
