//! UDP sockets in the style of std::net on the Tidegate stack.
