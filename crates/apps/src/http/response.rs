//! Responses that consist of a status and headers.

use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::http::response::Builder;
use hyper::{Response, StatusCode};

use super::body::ResponseBody;

/// Builds a response from `builder` and `body`.
pub(super) fn build_response(builder: Builder, body: ResponseBody) -> Response<ResponseBody> {
    builder.body(body).unwrap_or_else(|_| {
        // The file name contains bytes that no header can hold.
        let mut response = Response::new(ResponseBody::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    })
}

/// Response with the status as its plain-text body.
pub(super) fn status_response(status: StatusCode) -> Response<ResponseBody> {
    let builder = Response::builder().status(status);
    let builder = builder.header(CONTENT_TYPE, "text/plain; charset=utf-8");
    build_response(builder, ResponseBody::bytes(format!("{status}\n")))
}

pub(super) fn method_not_allowed(methods: &'static str) -> Response<ResponseBody> {
    let mut response = status_response(StatusCode::METHOD_NOT_ALLOWED);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}
