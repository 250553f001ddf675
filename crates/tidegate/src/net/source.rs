//! Sockets as sources of readiness.

use super::handle::Net;
use crate::types::readiness::Readiness;
use crate::types::socket_id::SocketId;

/// Socket that can be waited for: [`crate::UdpSocket`], [`crate::TcpListener`] and
/// [`crate::TcpStream`]. A [`crate::Poll`] is a source too, for [`Net::wait`]: it is readable when one
/// of its sockets is ready.
#[expect(private_bounds, reason = "only sockets of this crate can be waited for")]
pub trait Source: Pollable {
    /// Current readiness. Neither blocks nor runs the stack.
    fn readiness(&self) -> Readiness {
        self.net().with(|ops| {
            ops.take_notifications();
            ops.readiness(self.id())
        })
    }

    /// Announces a report of the application's own, which those who wait for the socket learn of
    /// ([`Readiness::has_report`]), or that it was taken.
    fn set_report(&self, has_report: bool) {
        self.net().with(|ops| {
            ops.added_readiness().set_report(self.id(), has_report);
            if has_report {
                ops.notify(self.id());
            }
        });
    }
}

/// Stack and identifier of a source.
pub(crate) trait Pollable {
    fn net(&self) -> &Net;
    fn id(&self) -> SocketId;
}
