//! Servers that run on Tidegate or on kernel sockets by the same code.
//!
//! A server is a [`Responder`]: it turns one datagram into another and knows
//! nothing of sockets. [`dns::Server`], [`echo::Echo`] and [`work::Work`] are
//! responders.
//! A [`router`] is none: it forwards packets, and asks a [`screen`] about them.
//! [`streams`] and [`http`] serve streams.
//! [`embedded`] runs them on Tidegate, [`kernel`], [`kernel_streams`] and
//! [`kernel_uring`] on the kernel's sockets.

mod counters;
pub mod dns;
pub mod echo;
pub mod embedded;
pub mod http;
pub mod kernel;
mod kernel_listener;
pub mod kernel_streams;
pub mod kernel_uring;
mod messages;
pub mod readers;
mod responder;
pub mod router;
pub mod screen;
mod slots;
pub mod streams;
pub mod work;

pub use counters::ServeCounters;
pub use messages::MessageLimits;
pub use responder::Responder;
