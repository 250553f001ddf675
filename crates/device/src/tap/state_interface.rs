//! TUN interface whose state is a message: routing daemons follow it, and no packet passes it.

use std::os::fd::{AsFd, OwnedFd};

use super::{TapError, open_driver, permission_error, sys};
use crate::netlink::{self, Interface, NetlinkError};

/// TUN interface without traffic, down at first. A routing daemon that has a route over this
/// interface uses that route only while the interface is up. The kernel removes the interface with
/// its descriptor, however the process ends.
#[derive(Debug)]
pub struct StateInterface {
    _descriptor: OwnedFd,
    name: String,
    index: u32,
}

impl StateInterface {
    /// Creates the interface.
    ///
    /// # Errors
    /// [`TapError::Busy`] if an interface of this name exists; it may outlive this process.
    pub fn create(name: &str) -> Result<Self, TapError> {
        let descriptor = open_driver(name)?;
        let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_TUN_EXCL;
        let name = sys::attach(descriptor.as_fd(), name, flags).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::EBUSY | libc::EINVAL) => TapError::Busy(name.to_owned()),
                Some(libc::EPERM | libc::EACCES) => permission_error(name),
                _ => TapError::Setup { step: "create the device", name: name.to_owned(), source },
            }
        })?;
        let index = Interface::by_name(&name)?.index;
        Ok(Self { _descriptor: descriptor, name, index })
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the interface up or down.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN.
    pub fn set_up(&self, is_up: bool) -> Result<(), NetlinkError> {
        if is_up { netlink::set_up(self.index) } else { netlink::set_down(self.index) }
    }
}
