//! Fast path: plain packets of UDP and TCP, received and sent.
//!
//! Only accepts packets that are plain and valid, or declines them. Every declined packet goes
//! through the parsers of the slow path, which find the reason: without this module, the stack
//! would behave the same.

pub(crate) mod family;
pub(crate) mod plain;
mod tcp;
pub(crate) mod template;
mod udp;

pub(crate) use tcp::may_be_plain_tcp;
