//! Settings of a server that a reload replaces.

use super::limits::HttpLimits;
use crate::requests::{RequestPolicy, SessionSecret};

/// Settings of an HTTP server.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// Limits of connections.
    pub limits: HttpLimits,
    /// Admission of requests; `None` serves each as it comes.
    pub requests: Option<HttpRequests>,
}

/// Classes of requests, and the secret of their sessions.
#[derive(Clone, Debug)]
pub struct HttpRequests {
    /// Classes and their settings.
    pub policy: RequestPolicy,
    /// Secret that signs sessions.
    pub secret: SessionSecret,
}
