//! The daemon: a stack on network cores, and applications that attach to it.
//!
//! [`daemon`] runs an engine and serves applications; [`attachment`] is what an
//! application has of it; `contract` is what both agree on. An application and
//! the daemon share memory and trust each other with nothing: see
//! [`tidegate_memory::shared`].
#![forbid(unsafe_code)]

pub mod attachment;
mod contract;
pub mod daemon;

pub use contract::command::Handle;
pub use contract::greeting::Part;
pub use contract::layout::Geometry;
pub use contract::status::Phase;
pub use contract::together::Together;
