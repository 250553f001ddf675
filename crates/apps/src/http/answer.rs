//! Answers that say it all with their status and headers.

use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::http::response::Builder;
use hyper::{Response, StatusCode};

use super::body::ResponseBody;

/// An answer that has its headers.
pub(super) fn finish(builder: Builder, body: ResponseBody) -> Response<ResponseBody> {
    builder.body(body).unwrap_or_else(|_| {
        // A name of a file that no header can hold.
        let mut response = Response::new(ResponseBody::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    })
}

/// A status that says everything.
pub(super) fn plain(status: StatusCode) -> Response<ResponseBody> {
    let builder = Response::builder().status(status);
    let builder = builder.header(CONTENT_TYPE, "text/plain; charset=utf-8");
    finish(builder, ResponseBody::bytes(format!("{status}\n")))
}

pub(super) fn not_allowed(methods: &'static str) -> Response<ResponseBody> {
    let mut response = plain(StatusCode::METHOD_NOT_ALLOWED);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}
