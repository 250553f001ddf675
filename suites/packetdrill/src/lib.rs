//! The stack under packetdrill, on a virtual clock.
//!
//! packetdrill loads this library (`--so_filename`) and makes the socket calls of a script through
//! a table of functions. It also injects and receives the IP packets, sleeps and reads the clock
//! through that table, so that a script of minutes takes milliseconds.
//!
//! `interface` is the table, `calls` the meaning of each call, `host` the stack with its clock,
//! `layout` the order of TCP options on the wire, `profile` the defaults of the system that a
//! script was written for.

mod address;
mod calls;
mod errno;
mod host;
mod interface;
mod layout;
mod profile;
mod socket_options;
