//! Doubly linked list with the links beside the values, as the kernel's `sk_buff` list: the
//! packet queue of Rivera's model.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

/// List with a single owner: values are added at the end and taken from the front.
///
/// Freed nodes are reused, so that a list in steady use allocates no memory.
pub(super) struct List<T> {
    first: *mut Node<T>,
    last: *mut Node<T>,
    /// Nodes without values, linked by `next`.
    free: *mut Node<T>,
    owns: PhantomData<Box<Node<T>>>,
}

struct Node<T> {
    next: *mut Node<T>,
    previous: *mut Node<T>,
    value: Option<T>,
}

// SAFETY: the list owns its nodes, and no pointer to them leaves the list.
unsafe impl<T: Send> Send for List<T> {}

impl<T> List<T> {
    pub(super) fn new() -> Self {
        let none = ptr::null_mut();
        Self { first: none, last: none, free: none, owns: PhantomData }
    }

    /// Adds a value at the end.
    #[inline]
    pub(super) fn push_back(&mut self, value: T) {
        let node = self.unused_node();
        // SAFETY: the list owns `node`, which is in no chain.
        unsafe {
            (*node.as_ptr()).value = Some(value);
            (*node.as_ptr()).next = ptr::null_mut();
            (*node.as_ptr()).previous = self.last;
        }
        if self.last.is_null() {
            self.first = node.as_ptr();
        } else {
            // SAFETY: `last` is a node of this list while it is not null.
            unsafe { (*self.last).next = node.as_ptr() };
        }
        self.last = node.as_ptr();
    }

    /// Takes the value at the front.
    #[inline]
    pub(super) fn pop_front(&mut self) -> Option<T> {
        let node = NonNull::new(self.first)?.as_ptr();
        // SAFETY: `first` is a node of this list while it is not null, and so is its `next`.
        unsafe {
            self.first = (*node).next;
            if self.first.is_null() {
                self.last = ptr::null_mut();
            } else {
                (*self.first).previous = ptr::null_mut();
            }
            (*node).next = self.free;
            self.free = node;
            (*node).value.take()
        }
    }

    #[inline]
    fn unused_node(&mut self) -> NonNull<Node<T>> {
        let Some(node) = NonNull::new(self.free) else {
            let none = ptr::null_mut();
            let node = Box::new(Node { next: none, previous: none, value: None });
            return NonNull::from(Box::leak(node));
        };
        // SAFETY: `free` is a node of this list while it is not null.
        self.free = unsafe { node.as_ref() }.next;
        node
    }
}

impl<T> Drop for List<T> {
    fn drop(&mut self) {
        for mut node in [self.first, self.free] {
            while !node.is_null() {
                // SAFETY: the node came from a box and is in one chain only.
                let owned = unsafe { Box::from_raw(node) };
                node = owned.next;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    /// Values from front to end along `next`, and along `previous` in reverse.
    fn forward_and_backward(list: &List<u32>) -> (Vec<u32>, Vec<u32>) {
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        let mut node = list.first;
        while !node.is_null() {
            // SAFETY: a node of the list.
            let here = unsafe { &*node };
            forward.extend(here.value);
            node = here.next;
        }
        node = list.last;
        while !node.is_null() {
            // SAFETY: a node of the list.
            let here = unsafe { &*node };
            backward.extend(here.value);
            node = here.previous;
        }
        backward.reverse();
        (forward, backward)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Compares with a plain queue as the model, links in both directions.
        #[test]
        fn behaves_like_a_queue(
            steps in prop::collection::vec(any::<bool>(), 0..if cfg!(miri) { 30 } else { 200 }),
        ) {
            let (mut list, mut model) = (List::new(), VecDeque::new());
            for (at, push) in steps.into_iter().enumerate() {
                if push {
                    list.push_back(at as u32);
                    model.push_back(at as u32);
                } else {
                    prop_assert_eq!(list.pop_front(), model.pop_front());
                }
                let (forward, backward) = forward_and_backward(&list);
                prop_assert!(forward.iter().eq(model.iter()));
                prop_assert_eq!(forward, backward);
            }
        }
    }

    #[test]
    fn drops_remaining_values() {
        let value = Rc::new(());
        let mut list = List::new();
        for _ in 0..3 {
            list.push_back(Rc::clone(&value));
        }
        drop(list.pop_front());
        assert_eq!(Rc::strong_count(&value), 3);
        drop(list);
        assert_eq!(Rc::strong_count(&value), 1);
    }
}
