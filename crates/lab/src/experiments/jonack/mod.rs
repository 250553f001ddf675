//! Jonack and Murta (2006): capacity limit of servers, and their protection under a flood.

pub mod guard;
pub mod mlfrr;
pub mod protect;
pub mod sessions;
