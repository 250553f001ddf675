//! Resources and settings that all connections share.

use std::sync::Arc;

use super::BufferPool;
use crate::tcp::receive::OutOfOrderQueue;
use crate::tcp::recovery::Flight;
use crate::tcp::socket::TcpOptions;

/// Resources and settings that all connections of a table share.
pub(crate) struct TcpShared {
    pub(crate) pool: BufferPool,
    /// Options interned last: most connections have equal ones.
    last_options: Arc<TcpOptions>,
    /// Unused scoreboards and out-of-order queues, kept for reuse.
    #[expect(clippy::vec_box, reason = "connections hold the boxes and return them here")]
    spare_flights: Vec<Box<Flight>>,
    #[expect(clippy::vec_box, reason = "connections hold the boxes and return them here")]
    spare_out_of_order: Vec<Box<OutOfOrderQueue>>,
    /// Largest payload that the link carries, without options, on IPv4.
    pub(crate) link_mss: u16,
    /// Duration of TIME-WAIT, and of FIN-WAIT-2 after the application has closed.
    pub(crate) time_wait_ns: u64,
    pub(crate) fin_wait_2_ns: u64,
}

/// Most scoreboards, and most out-of-order queues, that are kept for reuse.
const MAX_SPARES: usize = 256;

impl TcpShared {
    pub(crate) fn new(limit_bytes: usize, time_wait_ns: u64, link_mss: u16) -> Self {
        Self {
            link_mss,
            pool: BufferPool::new(limit_bytes),
            last_options: Arc::default(),
            spare_flights: Vec::new(),
            spare_out_of_order: Vec::new(),
            time_wait_ns,
            fin_wait_2_ns: time_wait_ns,
        }
    }

    /// Limits `options` to valid values and interns them: connections with equal options share one
    /// allocation.
    pub(crate) fn intern_options(&mut self, options: TcpOptions) -> Arc<TcpOptions> {
        let options = options.within_limits();
        if *self.last_options != options {
            self.last_options = Arc::new(options);
        }
        Arc::clone(&self.last_options)
    }

    pub(crate) fn acquire_flight(&mut self) -> Box<Flight> {
        self.spare_flights.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_flight(&mut self, mut flight: Box<Flight>) {
        if self.spare_flights.len() < MAX_SPARES && flight.recycle() {
            self.spare_flights.push(flight);
        }
    }

    pub(crate) fn acquire_out_of_order(&mut self) -> Box<OutOfOrderQueue> {
        self.spare_out_of_order.pop().unwrap_or_default()
    }

    pub(crate) fn recycle_out_of_order(&mut self, mut queue: Box<OutOfOrderQueue>) {
        if self.spare_out_of_order.len() < MAX_SPARES {
            queue.clear();
            self.spare_out_of_order.push(queue);
        }
    }
}
