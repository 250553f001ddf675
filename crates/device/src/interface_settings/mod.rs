//! Settings of an interface that outlast the process that changed them, and their restoration.
//!
//! Two groups of settings change while a device is open: interrupt deferral (`napi_defer_hard_irqs`
//! and `gro_flush_timeout`, by AF_XDP devices that busy-poll) and the sizes of coalesced frames
//! (`gro_max_size`, by AF_PACKET devices with segmentation). The kernel ends everything else that
//! a device sets up with the process: XDP programs on links, memberships of sockets, TAP devices.
//!
//! However the process ends, the interface is as it was:
//!
//! * A process that ends in order restores the settings itself.
//! * A *restorer* is a process of its own, in a session of its own, started before the first change.
//!   It restores the settings when the changing process dies (pidfd_open(2)) or is stopped
//!   (`SIGSTOP`). A process that continues applies its settings again.
//! * A restorer has a standby, which takes its place, and starts a new standby, when the restorer
//!   dies. Likewise the restorer replaces its standby.
//! * A process that has dropped its privileges sends its restorer requests for other values of the
//!   settings that the process has changed before. It looks for the answers between other work.
//! * A record in a file outlasts them all, should they be killed at the same moment. The next
//!   process that changes the interface, and [`restore_left_behind`], restore from the record.
//!
//! A library starts no processes: restorers exist only if [`set_restorer`] named a program. Without
//! one, a killed process leaves its changes, and the record.
#![cfg_attr(not(all(feature = "packet", feature = "xdp")), allow(dead_code))]

mod access;
mod change;
mod channel;
mod guard;
mod left_behind;
mod record;
mod requests;
mod restorer;
mod sys;

pub(crate) use self::access::{InterfaceId, Settings, SettingsAccess, is_sysfs_of};
pub use self::channel::{RestorerRole, UnknownRestorerRole};
#[cfg(feature = "xdp")]
pub(crate) use self::guard::Progress;
pub(crate) use self::guard::SettingsGuard;
pub use self::guard::set_restorer;
pub use self::left_behind::{LeftBehind, restore_left_behind};
pub use self::restorer::run_restorer;
#[cfg(all(feature = "packet", feature = "xdp"))]
pub(crate) use self::sys::{block_signals, namespace_cookie};
