//! Mogul and Ramakrishnan (1996): receive livelock, on a service, on a router and on a passive
//! monitor.

pub mod livelock;
pub mod monitor;
pub mod router;
