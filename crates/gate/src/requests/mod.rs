//! Admission of requests: which requests a server serves under overload, and which it refuses
//! before it has worked for them.
//!
//! [`crate::admission`] decides about packets, which say little about what they ask for. A server
//! that has read a request knows more: the path, the name, the session. The server sorts requests
//! into classes by rules of its own, and asks here. Nothing here knows packets, HTTP or DNS.
//!
//! Overload is a queue that does not empty. While the wait of a request is short, every request is
//! admitted. A class is refused once its requests would wait too long, the last rank first
//! ([`RequestAdmission`]). New sessions are admitted as far as the work of sessions that were
//! admitted before leaves time ([`SessionReservation`]), and one session gets no more than a rate
//! ([`SessionRate`]).
//!
//! Time comes from the caller, and no state grows with what arrives.

mod admission;
mod session_rate;
mod session_reservation;
mod standing_queue;

pub use admission::{RequestAdmission, RequestClass, RequestRefusal};
pub use session_rate::SessionRate;
pub use session_reservation::SessionReservation;
pub use standing_queue::StandingQueue;
