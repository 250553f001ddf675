//! Mogul and Ramakrishnan (1996): receive livelock, on a service, on a router, on a passive monitor
//! and on a network file service.

pub mod livelock;
pub mod monitor;
pub mod nfs;
pub mod router;
