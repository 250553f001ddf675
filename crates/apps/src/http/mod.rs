//! An HTTP/1.1 server: static files and a small API, on hyper.
//!
//! [`Service`] answers one request and is independent of sockets. [`serve_http`] runs it on
//! Tidegate, [`serve_http_kernel`] on kernel sockets.

mod api;
mod body;
mod conditions;
mod files;
mod response;
mod serve;
mod service;

pub use body::ResponseBody;
pub use serve::{HttpLimits, HttpListener, serve_http, serve_http_kernel};
pub use service::{HttpCounters, Service};
