//! An IPv4 and IPv6 router over several ports, with the gate in front.
//!
//! [`Forwarder`] is the engine: ports, one arena, one [`tidegate_stack::Router`]
//! and a [`Gate`](tidegate_gate::Gate). Packets run to completion: one burst is
//! received, looked up, shown to the packet screen if there is one, and put
//! into the transmit queue of the port that it leaves by. Frames are not
//! copied: both ports use the same arena. [`run`] drives it in any mode of the
//! gate; in `interrupt` and `moderated` receiving is a thread of its own.
//!
//! What this router does not do: routing protocols, router advertisements,
//! multicast, redirects, source routes, NAT. It takes its interfaces whole.

mod forwarder;
mod open;
mod run;
mod sys;

pub use forwarder::{Forwarder, ForwarderCounters, PortReport, Step};
pub use open::{PortSpec, PortSpecError, RouterConfig, RouterError, RouterPort, open};
pub use run::{Priorities, run};
