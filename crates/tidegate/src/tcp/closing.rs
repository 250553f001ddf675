//! Connections whose last handle was dropped.

use std::cell::RefCell;
use std::sync::Arc;

use tidegate_engine::PortClaim;
use tidegate_stack::TcpId;

use crate::net::handle::Net;
use crate::types::batch_scope;
use crate::types::socket_ops::SocketOps;

thread_local! {
    /// Streams that this thread dropped inside a batch.
    static DROPPED: RefCell<Vec<ClosingStream>> = const { RefCell::new(Vec::new()) };
}

/// Connection whose last handle was dropped. Dropping this value closes the connection.
pub(crate) struct ClosingStream {
    net: Net,
    id: TcpId,
    reset_on_close: bool,
    claim: Option<Arc<PortClaim>>,
    is_closed: bool,
}

impl ClosingStream {
    pub(super) fn new(
        net: Net,
        id: TcpId,
        reset_on_close: bool,
        claim: Option<Arc<PortClaim>>,
    ) -> Self {
        Self { net, id, reset_on_close, claim, is_closed: false }
    }

    /// Closes the connection: at the end of the batch if this thread is inside a batch, else
    /// now.
    pub(super) fn close(self) {
        if batch_scope::is_active() {
            DROPPED.with_borrow_mut(|dropped| dropped.push(self));
        }
    }

    /// Closes the connection if it belongs to the stack `net`; otherwise returns the value.
    pub(crate) fn close_in(mut self, net: &Net, ops: &mut dyn SocketOps) -> Option<Self> {
        if !self.net.is_same(net) {
            return Some(self);
        }
        self.close_with(ops);
        None
    }

    fn close_with(&mut self, ops: &mut dyn SocketOps) {
        self.is_closed = true;
        ops.tcp_close(self.id, self.reset_on_close, self.claim.take());
    }
}

impl Drop for ClosingStream {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        let net = self.net.clone();
        net.with(|ops| {
            self.close_with(ops);
            // A device error is reported to the next call.
            let _ = ops.commit();
        });
    }
}

/// Marks this thread as inside a batch until dropped.
pub(crate) struct BatchGuard(());

impl BatchGuard {
    pub(crate) fn enter() -> Self {
        batch_scope::set_active(true);
        Self(())
    }

    /// Leaves the batch. Returns the streams that were dropped inside it.
    pub(crate) fn leave(self) -> Vec<ClosingStream> {
        DROPPED.take()
    }
}

impl Drop for BatchGuard {
    fn drop(&mut self) {
        batch_scope::set_active(false);
        // Dropped streams remain only if the closure panicked. They are leaked, together with
        // the lock that the thread held.
        std::mem::forget(DROPPED.take());
    }
}
