//! Waiting for sockets together with other events of an application.

use std::io;
use std::time::Duration;

use super::handle::Net;
use super::source::Source;
use crate::types::deadline::Deadline;
use crate::types::readiness::Interest;
use crate::types::sleeper::Sleeper;
use crate::types::socket_id::SocketId;

impl Net {
    /// Runs the stack until one of the sockets has the wanted readiness, or `sleeper` has found
    /// an event of its own. Returns `false` when `timeout` expires (`None`: no limit). The
    /// stack runs at least once, and the sleeper is called when no socket is ready.
    ///
    /// # Errors
    /// The error of `sleeper`; an error when the device has failed.
    pub fn wait(
        &self,
        sources: &[(&dyn Source, Interest)],
        timeout: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        let deadline = match timeout {
            Some(Duration::ZERO) => Deadline::Now,
            timeout => Deadline::after(timeout),
        };
        let ids: Vec<SocketId> = sources.iter().map(|(source, _)| source.id()).collect();
        self.backend().wait(&ids, deadline, sleeper, |ops| {
            let interests = sources.iter().map(|(_, interest)| *interest);
            ids.iter().zip(interests).any(|(&id, interest)| ops.readiness(id).meets(interest))
        })
    }

    /// Defers transmission for the next `calls` calls: their frames leave together with those
    /// of the call after them, or when the stack runs. For applications that have several ready
    /// sockets and will reply on most of them before the next wait.
    pub fn defer_transmit(&self, calls: u32) {
        self.backend().defer_transmit(calls);
    }

    /// True if `address` is one of this stack's.
    pub fn has_address(&self, address: std::net::IpAddr) -> bool {
        self.with(|ops| ops.has_address(address.to_canonical()))
    }

    /// True if a UDP socket can be bound to `address`: one of this stack's, or a broadcast address of
    /// its networks.
    pub fn has_datagram_address(&self, address: std::net::IpAddr) -> bool {
        self.with(|ops| ops.has_datagram_address(address.to_canonical()))
    }

    /// Length in bytes of the longest packet to `destination` that is not fragmented, as far as is
    /// known.
    pub fn path_mtu(&self, destination: std::net::IpAddr) -> Option<usize> {
        self.with(|ops| ops.path_mtu(destination.to_canonical()))
    }

    /// Source address of packets to `destination`; `None` without a route.
    pub fn source_for(&self, destination: std::net::IpAddr) -> Option<std::net::IpAddr> {
        self.with(|ops| ops.source_for(destination.to_canonical()))
    }
}
