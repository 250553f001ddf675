//! Fork of an attached process.

use std::io;

use super::attachments::Attachments;
use super::core::{AttachedCore, new_idle};
use super::stack::AttachedStack;
use crate::backend::guard::StackGuard;
use crate::types::sleeper;

/// Fork in progress of an attached process.
///
/// The attachments are locked while this value exists. Call [`Fork::in_parent`] in the parent
/// and [`Fork::in_child`] in the child.
pub struct Fork<'a> {
    core: StackGuard<'a, AttachedCore>,
    children: io::Result<Attachments>,
}

impl<'a> Fork<'a> {
    /// Prepares a fork: creates an attachment for the child, and blocks the other threads
    /// until the fork is done.
    pub(crate) fn prepare(stack: &'a AttachedStack) -> Self {
        let mut core = stack.lock();
        let children = core.attachments.fork_children();
        Self { core, children }
    }
}

impl Fork<'_> {
    /// Continues in the parent, also when the fork failed.
    pub fn in_parent(self) {}

    /// Continues in the child: it holds the parent's sockets through attachments of its own.
    ///
    /// # Errors
    /// When the child got no attachment, because the daemon has exited or this user may not
    /// attach. All later calls fail.
    pub fn in_child(self) -> io::Result<()> {
        let Self { mut core, children } = self;
        // The registered sleepers and tasks are threads and tasks of the parent.
        sleeper::forget_thread_bell();
        // Now, since the child may soon give up to open descriptors. Without a bell a wait fails.
        let _ = sleeper::thread_bell();
        core.forget_threads();
        core.idle = new_idle(0);
        let result = children.map(|heirs| core.attachments = heirs);
        if result.is_err() {
            core.attachments.abandon();
            core.fail();
        }
        result
    }
}

impl std::fmt::Debug for Fork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fork").field("is_prepared", &self.children.is_ok()).finish_non_exhaustive()
    }
}
