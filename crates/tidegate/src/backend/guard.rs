//! Locked stack.
//!
//! Wakers are called after the stack is unlocked: a waker may run code of the application,
//! which may drop a socket.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::task::Waker;

use crate::types::socket_ops::SocketOps;

/// Wakers to call on drop.
struct WakeOnDrop(Vec<Waker>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }
}

/// Locked stack.
pub(crate) struct StackGuard<'a, C: SocketOps> {
    // Drop order of fields: the lock is released first, then the wakers are called.
    core: MutexGuard<'a, C>,
    // Boxed: every socket call drops a guard, mostly without waiting tasks.
    woken: Option<Box<WakeOnDrop>>,
}

impl<'a, C: SocketOps> StackGuard<'a, C> {
    #[inline]
    pub(crate) fn new(core: MutexGuard<'a, C>) -> Self {
        Self { core, woken: None }
    }
}

impl<C: SocketOps> Deref for StackGuard<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.core
    }
}

impl<C: SocketOps> DerefMut for StackGuard<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.core
    }
}

impl<C: SocketOps> Drop for StackGuard<'_, C> {
    #[inline]
    fn drop(&mut self) {
        self.core.on_release();
        if let Some(woken) = self.core.tasks().take_woken() {
            self.woken = Some(Box::new(WakeOnDrop(woken)));
        }
    }
}
