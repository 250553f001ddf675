//! Placement of memory on NUMA nodes.

use std::io;
use std::marker::PhantomData;
use std::ptr::{NonNull, null};

/// Words of a set of nodes: as many nodes as the kernel can have.
const NODE_WORDS: usize = 1024 / NODE_BITS;
const NODE_BITS: usize = libc::c_ulong::BITS as usize;

/// Flags of `get_mempolicy` (`linux/mempolicy.h`): return the node, of the page at an address.
const MPOL_F_NODE: libc::c_ulong = 1;
const MPOL_F_ADDR: libc::c_ulong = 2;

/// Length of a set in system calls, which count one bit more than they read and write.
const SET_BITS: usize = NODE_WORDS * NODE_BITS + 1;

/// Set of nodes as the kernel takes it.
type NodeSet = [libc::c_ulong; NODE_WORDS];

/// Preference of the calling thread for the memory of a node. Dropping it restores what the thread
/// preferred before.
#[derive(Debug)]
pub struct NodePreference {
    mode: libc::c_int,
    nodes: NodeSet,
    /// The policy belongs to a thread.
    not_send: PhantomData<*const ()>,
}

impl NodePreference {
    /// Prefers the memory of a node for pages that this thread touches first: pages come from
    /// another node when this one has none left.
    ///
    /// # Errors
    /// If there is no such node, or the process may not choose.
    pub fn set(node: usize) -> io::Result<Self> {
        let (mut mode, mut previous): (libc::c_int, NodeSet) = (0, [0; NODE_WORDS]);
        // SAFETY: the kernel writes the mode, and no more bits than the set has.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                previous.as_mut_ptr(),
                SET_BITS,
                null::<libc::c_void>(),
                0,
            )
        };
        check(result)?;
        let mut nodes: NodeSet = [0; NODE_WORDS];
        let word = nodes.get_mut(node / NODE_BITS).ok_or(io::ErrorKind::InvalidInput)?;
        *word = 1 << (node % NODE_BITS);
        set_policy(libc::MPOL_PREFERRED, &nodes)?;
        Ok(Self { mode, nodes: previous, not_send: PhantomData })
    }
}

impl Drop for NodePreference {
    fn drop(&mut self) {
        let restored = set_policy(self.mode, &self.nodes);
        debug_assert!(restored.is_ok(), "the policy was in force before: {restored:?}");
    }
}

fn set_policy(mode: libc::c_int, nodes: &NodeSet) -> io::Result<()> {
    // SAFETY: the kernel reads no more bits than the set has.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes.as_ptr(), SET_BITS) };
    check(result)
}

/// Node of the page at an address; `None` if the kernel does not tell it.
pub(crate) fn node_of_page(address: NonNull<u8>) -> Option<usize> {
    let mut node: libc::c_int = -1;
    // SAFETY: the kernel writes the node only; the address is looked up and not written.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            null::<libc::c_ulong>(),
            0,
            address.as_ptr(),
            MPOL_F_NODE | MPOL_F_ADDR,
        )
    };
    check(result).ok().and_then(|()| usize::try_from(node).ok())
}

/// Node of the processor on which the calling thread runs.
pub fn current_node() -> Option<usize> {
    let mut node: libc::c_uint = 0;
    // SAFETY: the kernel writes the node only.
    let result =
        unsafe { libc::syscall(libc::SYS_getcpu, null::<libc::c_uint>(), &raw mut node, 0) };
    check(result).ok().and_then(|()| usize::try_from(node).ok())
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::{Arena, ArenaConfig, FrameSize};

    fn policy() -> (libc::c_int, NodeSet) {
        let (mut mode, mut nodes): (libc::c_int, NodeSet) = (0, [0; NODE_WORDS]);
        // SAFETY: as in `NodePreference::set`.
        let result = unsafe {
            let (mode, nodes) = (&raw mut mode, nodes.as_mut_ptr());
            libc::syscall(libc::SYS_get_mempolicy, mode, nodes, SET_BITS, null::<u8>(), 0)
        };
        check(result).unwrap();
        (mode, nodes)
    }

    #[test]
    fn preference_holds_until_it_is_dropped() {
        // A kernel without NUMA, and a sandbox, refuse the call.
        let Some(node) = current_node() else { return };
        let before = policy();
        let Ok(preference) = NodePreference::set(node) else { return };
        let (mode, nodes) = policy();
        assert_eq!(mode, libc::MPOL_PREFERRED);
        assert_eq!(nodes[node / NODE_BITS], 1 << (node % NODE_BITS));
        let arena = ArenaConfig { frames: 16, frame_size: FrameSize::K2, hugepages: false };
        let arena = Arena::new(arena).unwrap();
        assert_eq!(arena.memory().node(), Some(node));
        drop(preference);
        assert_eq!(policy(), before);
    }

    #[test]
    fn missing_node_changes_nothing() {
        let before = policy();
        for node in [NODE_WORDS * NODE_BITS - 1, NODE_WORDS * NODE_BITS, usize::MAX] {
            assert!(NodePreference::set(node).is_err(), "{node}");
        }
        assert_eq!(policy(), before);
    }
}
