//! Transmit classes: frames wait by class and flow, and leave when it is their turn.
//!
//! Frames reach the classes from the transmit queue of the interface, which holds them for no
//! longer than a burst. TCP makes segments only while their flow has few bytes waiting: data waits
//! in the send buffer, where it delays no other flow.

mod classes;
mod output;
mod packet;

pub(crate) use classes::TransmitClasses;
