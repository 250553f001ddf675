//! Neighbours, routes, fragments, ICMP and UDP, as a pure state machine.
#![forbid(unsafe_code)]
