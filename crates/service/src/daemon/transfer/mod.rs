//! Transfer of sockets between processes.
//!
//! A process hands a socket on by sending the kernel descriptor that stands for it, over a Unix
//! socket or through `exec`. The daemon sees neither. The sending process announces the
//! transfer before, and the receiving process asks for the socket after; both present the
//! descriptor. The kernel's cookie of the descriptor identifies the socket, and a process can
//! only present a descriptor it has.
//!
//! The receiving application gets the memory of the socket, like a fork child, so both must run
//! as one user. A socket in transit has a holder of its own, so that it outlives its sender.

mod exchange;
pub(super) mod request;
pub(super) mod table;
