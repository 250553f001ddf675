//! Jonack and Murta (2006): capacity limit of servers, and their protection under a flood.

pub mod guard;
mod load_levels;
pub mod mlfrr;
pub mod protect;
pub mod sessions;
pub mod web_server;
