//! An HTTP/1.1 server: static files and a small API, on hyper.
//!
//! [`Service`] answers one request and knows nothing of sockets. [`serve_http`]
//! puts it on Tidegate, [`serve_http_kernel`] on the kernel's sockets.

mod answer;
mod api;
mod body;
mod conditions;
mod files;
mod serve;
mod service;

pub use body::ResponseBody;
pub use serve::{HttpLimits, HttpSocket, serve_http, serve_http_kernel};
pub use service::{HttpCounters, Service};
