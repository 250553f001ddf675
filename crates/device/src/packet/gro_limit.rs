//! Limit on the frames that the kernel coalesces on receive (GRO).

use std::io;

use crate::interface_settings::{InterfaceId, Settings, SettingsAccess, SettingsGuard};
use crate::netlink::Interface;

/// Limit on the bytes that an interface coalesces into one frame, until this value is dropped. Of
/// several limits on one interface, the first dropped restores the size that it found.
pub(super) struct GroLimit {
    guard: SettingsGuard,
    /// Restorations of the guard that this process knows of.
    restorations: u64,
}

impl GroLimit {
    /// Sets the limit for IP packets in bytes; `None` when the kernel already coalesces no larger
    /// packets.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, when the kernel has no such setting (before Linux 5.19), or when
    /// another process has changed it.
    pub(super) fn set(interface: &Interface, bytes: u32) -> io::Result<Option<Self>> {
        let id = InterfaceId { index: interface.index, mac: interface.mac.0 };
        let guard = SettingsGuard::begin(id, SettingsAccess::to_gro()?, |original| {
            let Settings::Gro(sizes) = original else { return None };
            let limited = sizes.limited_to(bytes);
            (limited != *sizes).then_some(Settings::Gro(limited))
        })?;
        Ok(guard.map(|guard| Self { restorations: guard.restorations(), guard }))
    }

    /// Sets the limit again if it was lifted while this process was stopped.
    #[inline]
    pub(super) fn apply_again(&mut self) {
        let restorations = self.guard.restorations();
        if self.restorations != restorations {
            self.restorations = restorations;
            // If the kernel refuses, frames that do not fit are dropped and counted.
            let _ = self.guard.apply();
        }
        if self.guard.is_pending() {
            let _ = self.guard.poll_request();
        }
    }
}
