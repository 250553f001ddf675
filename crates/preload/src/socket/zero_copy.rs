//! Notifications about data sent with `MSG_ZEROCOPY`. Tidegate copies the data, so the program's
//! memory is free when the call returns, and the notification says that the data was copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidegate::Source;

use crate::raw::ControlMessage;

/// Constants that the `libc` crate does not define: origin of a notification, and its code for data
/// that was copied.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;

/// `SO_ZEROCOPY` of a socket, and its calls that sent with `MSG_ZEROCOPY`.
#[derive(Default)]
pub(crate) struct ZeroCopy {
    is_on: AtomicBool,
    calls: Mutex<CallNumbers>,
}

/// Numbers of calls, which wrap around.
#[derive(Default)]
struct CallNumbers {
    /// Number of the next call.
    next: u32,
    /// First call of the next notification.
    first: u32,
}

impl ZeroCopy {
    pub(super) fn set(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Counts a call with `MSG_ZEROCOPY` that has sent data. As at the kernel, one notification
    /// tells of all calls since the last.
    pub(super) fn on_sent(&self, source: &dyn Source) {
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let mut calls = self.lock();
        calls.next = calls.next.wrapping_add(1);
        source.set_report(true);
    }

    /// Takes the notification, as the kernel's control message of a socket of this family.
    pub(super) fn take(&self, source: &dyn Source, is_v6: bool) -> Option<ControlMessage> {
        let mut calls = self.lock();
        if calls.next == calls.first {
            return None;
        }
        let (first, last) = (calls.first, calls.next.wrapping_sub(1));
        calls.first = calls.next;
        source.set_report(false);
        Some(message(first, last, is_v6))
    }

    fn lock(&self) -> MutexGuard<'_, CallNumbers> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kernel's `sock_extended_err` and an address of no family.
fn message(first: u32, last: u32, is_v6: bool) -> ControlMessage {
    let (level, kind, address_bytes) = match is_v6 {
        true => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, size_of::<libc::sockaddr_in6>()),
        false => (libc::IPPROTO_IP, libc::IP_RECVERR, size_of::<libc::sockaddr_in>()),
    };
    let mut data = vec![0; 4];
    data.extend([SO_EE_ORIGIN_ZEROCOPY, 0, SO_EE_CODE_ZEROCOPY_COPIED, 0]);
    data.extend([first, last].map(u32::to_ne_bytes).concat());
    data.resize(data.len() + address_bytes, 0);
    ControlMessage { level, kind, data }
}
