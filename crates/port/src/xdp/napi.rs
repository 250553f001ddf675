//! Busy polling of NAPI instances that no socket is tied to.
//!
//! An AF_XDP socket polls the NAPI instance of its queue, if the driver has
//! told the kernel which one that is (since Linux 6.13 it has to). Some have
//! not, veth among them. An `io_uring` can be told the instances by number
//! (Linux 6.13): whoever waits on it polls them, on his own core, and stops
//! when he stops waiting. Nothing is ever submitted to the ring.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::netdev::Netdev;
use super::sys;

/// How long one call polls. The kernel takes eight packets at a time and looks
/// at the time in between, so this is a quota of about 40 packets on a busy
/// device, and what an idle one costs.
const POLL_US: u32 = 10;

/// Runs the receive path of a device inside its own calls.
pub(super) struct NapiPoller {
    ring: OwnedFd,
}

impl NapiPoller {
    /// A poller for all NAPI instances of an interface.
    ///
    /// # Errors
    /// When the kernel is older than 6.13, does not let this process have an
    /// `io_uring`, or knows of no instance.
    pub(super) fn of(interface_index: u32) -> io::Result<Self> {
        let napis = Netdev::open()?.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ring = sys::uring()?;
        sys::uring_poll_napis(ring.as_fd(), POLL_US)?;
        for napi in napis {
            sys::uring_add_napi(ring.as_fd(), napi.id)?;
        }
        Ok(Self { ring })
    }

    /// Polls for a moment.
    ///
    /// # Errors
    /// Never in practice: the ring is ours alone.
    pub(super) fn poll(&self) -> io::Result<()> {
        sys::uring_wait(self.ring.as_fd(), POLL_US * 1000)
    }
}
