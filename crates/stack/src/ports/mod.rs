//! Local ports: the choice of a free one, ports that others use, ports shared with other stacks.

mod ephemeral;
mod groups;
mod reserved;

pub(crate) use ephemeral::choose as choose_port;
pub use groups::PortGroups;
pub(crate) use groups::PortGroupsHandle;
pub(crate) use reserved::ReservedPorts;
pub use reserved::Transport;
