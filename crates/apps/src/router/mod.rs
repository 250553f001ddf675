//! An IPv4 and IPv6 router over several devices, behind the gate.
//!
//! [`Forwarder`] is the engine: devices, one arena, one [`tidegate_stack::Router`] and a
//! [`Gate`](tidegate_gate::Gate). Packets run to completion: a burst is received, its routes are
//! looked up, the packet filter is asked if there is one, and each packet joins the transmit queue
//! of its outgoing device. Frames are not copied: all devices use the same arena. [`run`] drives
//! the engine in any mode of the gate; in `interrupt` and `moderated` a thread of its own
//! receives.
//!
//! Not supported: routing protocols, router advertisements, multicast, redirects, source routes
//! and NAT. The router takes its interfaces exclusively.

mod forwarder;
mod open;
mod run;
mod sys;

pub use forwarder::{
    Forwarder, ForwarderCounters, ForwarderStep, InterfaceReport, IntervalCallback, ReadyCallback,
};
pub use open::{
    InterfaceSpec, InterfaceSpecError, RouterConfig, RouterDevice, RouterError, open, open_cores,
};
pub use run::{Priorities, run};
