//! Admission of requests by servers: section `[requests]` of a configuration file, its classes, and
//! the sessions of HTTP clients.
//!
//! [`RequestsConfig`] is the section, [`RequestPolicy`] the same checked. The HTTP and the DNS
//! server ask a policy for the class of a request, and `tidegate_gate::requests` for the decision.

#[cfg(any(test, fuzzing))]
pub mod any_request;
mod config;
mod matching;
mod session;

pub use config::{DnsRefusal, RequestClassConfig, RequestPolicy, RequestsConfig, RequestsError};
pub use matching::RequestMatch;
pub(crate) use matching::{DnsMeta, HttpMeta};
pub(crate) use session::Session;
pub use session::SessionSecret;
