//! An HTTP/1.1 server: static files and a small API, on hyper.
//!
//! [`Service`] answers one request and is independent of sockets. [`serve_http`] runs it on
//! Tidegate, [`serve_http_kernel`] on kernel sockets. [`HttpLimits`] bound the memory and the
//! time of connections; [`HttpRequests`] say which requests are served first under overload.

mod access_log;
mod api;
mod body;
mod channel;
mod conditions;
mod connection;
mod descriptors;
mod exchange;
mod files;
mod ledger;
mod limits;
mod listener;
mod request_queue;
mod response;
mod serve;
mod service;
mod settings;

pub use access_log::AccessLog;
pub use body::ResponseBody;
pub use files::DocumentRoot;
pub use limits::HttpLimits;
pub use listener::{HttpListener, HttpStream};
pub use serve::{serve_http, serve_http_kernel};
pub use service::{HttpCounters, Service};
pub use settings::{HttpRequests, HttpSettings};
