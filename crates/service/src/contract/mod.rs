//! What the daemon and an application agree on.
//!
//! An application connects to the daemon's Unix socket and is handed two pieces
//! of sealed memory ([`greeting`]). The first holds a ring of commands, a ring of
//! notices and a place of words for each socket; the second the bytes of the
//! sockets' streams, there only when they are used ([`layout`]). The connection
//! stays: one byte on it wakes the other side, and its end is the end of either.
//!
//! A process that is about to be forked connects once more, with the [`ticket`] it
//! was given: the child's attachment has the sockets of its parent, at the same
//! places and by the same names. Their words and streams stay where they are; only
//! the wish to be told of changes is a word of each attachment's own.
//!
//! A socket that is handed to another process, with its descriptor of the kernel's,
//! is offered before and taken after on connections of their own ([`taken`]). Its
//! words and streams stay where they are, too.
//!
//! A program may attach several times, to have its sockets on several cores: those that
//! have one port [`together`] divide what comes to it.
//!
//! Whatever comes from the other side is a copy that was parsed.

pub mod command;
pub mod datagram;
pub mod descriptors;
pub mod failure;
pub mod greeting;
pub mod layout;
pub mod notice;
pub mod status;
pub mod taken;
pub mod ticket;
pub mod together;
mod words;
