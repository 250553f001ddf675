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
    pub(crate) fn udp_exchange<E: Exchange>(
        &mut self,
        id: UdpId,
        exchange: &mut E,
    ) -> Option<io::Result<usize>> {
        if let Some(error) = self.udp_take_error(id) {
            return Some(Err(error));
        }
        // Known at compile time: an exchange without times does nothing here.
        let queued = exchange.times().map(|_| {
            self.engine.measure_arrivals();
            self.engine.stack().udp_queue_len(id)
        });
        let (stack, arena, now_ns) = self.engine.parts();
        let taken = exchange.answer_in_frames(stack, arena, now_ns, id);
        if taken == 0 {
            return None;
        }
        self.wake_next_reader(id);
        let flushed = self.engine.flush();
        if let (Some(queued), Some(times)) = (queued, exchange.times()) {
            let arrival_ns = self.engine.arrival_ns();
            times.on_exchange(queued, arrival_ns, taken, || self.engine.time_ns());
        }
        Some(flushed.map(|()| taken))
    }
}
