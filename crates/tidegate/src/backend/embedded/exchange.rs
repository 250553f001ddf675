//! Exchanges on an embedded stack: replies are written in frames.

use std::io;

use tidegate_stack::UdpId;

use super::core::EmbeddedCore;
use crate::types::exchange::Exchange;
use crate::types::socket_ops::SocketOps;

impl EmbeddedCore {
    /// Answers a batch of datagrams, and transmits the replies. Returns the number of datagrams
    /// taken; `None` when none is waiting.
    #[inline]
    pub(crate) fn udp_exchange(
        &mut self,
        id: UdpId,
        exchange: &mut impl Exchange,
    ) -> Option<io::Result<usize>> {
        if let Some(error) = self.udp_take_error(id) {
            return Some(Err(error));
        }
        let (stack, arena, now_ns) = self.engine.parts();
        let taken = exchange.answer_in_frames(stack, arena, now_ns, id);
        if taken == 0 {
            return None;
        }
        self.wake_next_reader(id);
        Some(self.engine.flush().map(|()| taken))
    }
}
