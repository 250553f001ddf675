//! What holds a program to an interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::sys;

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `linux/if_link.h`.
const GENERIC_FLAG: u32 = 1 << 1;
const NATIVE_FLAG: u32 = 1 << 2;

/// What holds a program to an interface, as long as any process has it. It can be
/// made to hold another program, and at no time holds none.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
    /// Whether the program is in the driver.
    native: bool,
}

impl Link {
    /// One that another process has made, with what that said.
    pub fn inherited(fd: OwnedFd, native: bool) -> Self {
        Self { fd, native }
    }

    /// Attaches a program, in the driver or in front of the kernel's stack.
    pub(super) fn create(
        program: BorrowedFd<'_>,
        interface_index: u32,
        native: bool,
    ) -> io::Result<Self> {
        let flags = if native { NATIVE_FLAG } else { GENERIC_FLAG };
        let fd = sys::link_xdp(program, interface_index, flags)?;
        Ok(Self { fd, native })
    }

    /// Puts another program in the place of the one that is attached, between two
    /// frames.
    pub(super) fn replace(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        sys::update_link(self.fd.as_fd(), program)
    }

    /// Whether the program is in the driver, and not in front of the kernel's stack.
    pub fn native(&self) -> bool {
        self.native
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
