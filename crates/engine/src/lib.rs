//! One network core: the poll loop over port and stack.
