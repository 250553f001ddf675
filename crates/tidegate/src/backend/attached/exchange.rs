//! Exchanges on an attached stack: requests are copied out of shared memory, and replies into
//! it.

use std::io;

use tidegate_stack::UdpId;

use super::core::AttachedCore;
use crate::types::datagram::DatagramMeta;
use crate::types::errors::{OpError, OpResult};
use crate::types::exchange::{Exchange, ExchangeBuffers, MAX_EXCHANGE_DATAGRAMS};
use crate::types::socket_ops::SocketOps;

impl AttachedCore {
    /// Answers a batch of datagrams. Returns the number of datagrams taken; `None` when none is
    /// waiting.
    pub(crate) fn udp_exchange(
        &mut self,
        id: UdpId,
        exchange: &mut impl Exchange,
    ) -> Option<io::Result<usize>> {
        // Allocated by the first exchange; taken out, because the callback borrows them.
        let mut buffers = self.exchange_buffers.take().unwrap_or_else(ExchangeBuffers::new);
        let mut taken = 0;
        let mut failure = None;
        while taken < MAX_EXCHANGE_DATAGRAMS {
            match self.recv_request(id, &mut buffers.request) {
                Ok(request) => {
                    taken += 1;
                    if let Some(reply) = exchange.answer_copy(&mut buffers, &request)
                        && let Err(error) = self.send_reply(id, reply, &request)
                    {
                        failure = Some(error);
                        break;
                    }
                }
                Err(OpError::WouldBlock) => break,
                Err(OpError::Failed(error)) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        self.exchange_buffers = Some(buffers);
        match failure {
            Some(error) => Some(Err(error)),
            None => (taken > 0).then_some(Ok(taken)),
        }
    }

    /// Receives a datagram. An error of an earlier reply is dropped with the reply, as on an
    /// embedded stack.
    fn recv_request(&mut self, id: UdpId, buf: &mut [u8]) -> OpResult<DatagramMeta> {
        match self.udp_recv(id, buf, false) {
            Err(OpError::Failed(_)) if self.is_unconnected(id) => self.udp_recv(id, buf, false),
            received => received,
        }
    }

    /// Sends a reply from the address that its request was sent to. A reply that cannot be sent
    /// is dropped.
    ///
    /// # Errors
    /// An error that the connected peer's host reported (ICMP), and the exit of the daemon.
    fn send_reply(&mut self, id: UdpId, reply: &[u8], request: &DatagramMeta) -> io::Result<()> {
        // Requests to a multicast or broadcast address are answered from the interface's
        // address.
        let from = self.has_address(request.to.to_canonical()).then_some(request.to);
        let mut sent = self.udp_send(id, reply, Some(request.from), from.into());
        if let Err(OpError::Failed(error)) = sent {
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if !self.is_unconnected(id) {
                return Err(error);
            }
            // The error may be that of an earlier reply.
            sent = self.udp_send(id, reply, Some(request.from), from.into());
        }
        let (Ok(()) | Err(_)) = sent;
        Ok(())
    }

    /// True if errors of a socket can only be those of its replies: a peer's host reports errors
    /// to connected sockets only.
    fn is_unconnected(&mut self, id: UdpId) -> bool {
        self.udp_peer_addr(id).is_none()
    }
}
