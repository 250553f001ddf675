//! BPF link: attachment of an XDP program to an interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::sys;

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `linux/if_link.h`.
const GENERIC_FLAG: u32 = 1 << 1;
const NATIVE_FLAG: u32 = 1 << 2;

/// BPF link that attaches an XDP program to an interface while any process holds the link's
/// descriptor. The program can be replaced atomically, without a moment without a program.
#[derive(Debug)]
pub struct XdpLink {
    fd: OwnedFd,
    /// True for native XDP (in the driver).
    native: bool,
}

impl XdpLink {
    /// Wraps a link that another process created, with the attach mode that the other process
    /// reported.
    pub fn inherited(fd: OwnedFd, native: bool) -> Self {
        Self { fd, native }
    }

    /// Attaches a program in the driver (`native`) or in front of the kernel's stack.
    pub(super) fn create(
        program: BorrowedFd<'_>,
        interface_index: u32,
        native: bool,
    ) -> io::Result<Self> {
        let flags = if native { NATIVE_FLAG } else { GENERIC_FLAG };
        let fd = sys::create_xdp_link(program, interface_index, flags)?;
        Ok(Self { fd, native })
    }

    /// Replaces the attached program atomically, between two frames.
    pub(super) fn replace(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        sys::update_link(self.fd.as_fd(), program)
    }

    /// Detaches the program, also if another process has a copy of the link, and ends the link.
    #[cfg(feature = "packet")]
    pub(super) fn detach(self) -> io::Result<()> {
        sys::detach_link(self.fd.as_fd())
    }

    /// True if the program runs in the driver, false if in front of the kernel's stack.
    pub fn native(&self) -> bool {
        self.native
    }
}

impl AsFd for XdpLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
