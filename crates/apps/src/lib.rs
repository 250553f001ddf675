//! Servers that run on Tidegate or on kernel sockets by the same code.
//!
//! A server is a [`Responder`]: it turns a request datagram into a reply and is independent of
//! sockets. [`dns::DnsServer`], [`echo::Echo`] and [`work::Work`] are responders. [`embedded`] and
//! [`readers`] run them on Tidegate, [`kernel`] on kernel sockets.
//!
//! [`streams`], [`http`] and [`nfs`] serve TCP connections; [`kernel_streams`] and [`kernel_uring`] are
//! their counterparts on kernel sockets.
//!
//! A [`router`] forwards packets, and may ask a packet [`filter`] about each of them. A [`monitor`]
//! counts the packets of an interface by flow.

mod counters;
pub mod dns;
mod durations;
pub mod echo;
pub mod embedded;
pub mod filter;
pub mod http;
pub mod kernel;
mod kernel_listener;
mod kernel_poll;
pub mod kernel_streams;
pub mod kernel_uring;
mod messages;
pub mod monitor;
pub mod nfs;
pub mod readers;
pub mod requests;
mod responder;
pub mod router;
mod slots;
mod source;
pub mod streams;
pub mod work;

pub use counters::ServeCounters;
pub use durations::DurationCounts;
pub use embedded::ServeState;
pub use kernel_poll::KernelBusyPoll;
pub use messages::MessageLimits;
pub use responder::Responder;
