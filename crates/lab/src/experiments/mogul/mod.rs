//! Mogul and Ramakrishnan (1996): receive livelock, on a service and on a router.

pub mod livelock;
pub mod router;
