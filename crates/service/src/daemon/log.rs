//! Log of the daemon.

use std::sync::Arc;

/// Log sink: receives one line for each event of an application.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;
