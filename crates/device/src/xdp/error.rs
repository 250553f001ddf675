//! Errors of opening and steering an AF_XDP device.

use std::io;

use aya::EbpfError;
use aya::maps::MapError;

use crate::capabilities::MissingCapabilities;
use crate::netlink::NetlinkError;
use crate::process::ProcessInfo;

/// Error of opening or steering an AF_XDP device. After an error of opening, nothing is left
/// attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XdpError {
    /// No interface of this name exists in the thread's network namespace, or the kernel's
    /// netlink query failed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The interface was removed while the device was opened.
    #[error(
        "the interface `{0}` was removed: `ip link` lists the interfaces of this network namespace"
    )]
    InterfaceGone(String),
    /// The interface is down.
    #[error("the interface `{0}` is down: bring it up with `ip link set dev {0} up`")]
    InterfaceDown(String),
    /// The interface does not carry Ethernet frames.
    #[error("`{0}` is not an Ethernet interface: AF_XDP needs a NIC or a veth")]
    NotEthernet(String),
    /// The kernel does not permit a step.
    #[error("not permitted to {step}: {why}")]
    NotPermitted {
        /// The step.
        step: &'static str,
        /// Missing capabilities, if any.
        why: MissingCapabilities,
    },
    /// Frames of the interface's MTU exceed the frame size of the arena.
    #[error(
        "the MTU of `{interface}` is {mtu}, but the arena's frames hold at most {max_mtu}: \
         use larger frames, or lower the MTU with `ip link set dev {interface} mtu {max_mtu}`"
    )]
    MtuTooLarge {
        /// Interface name.
        interface: String,
        /// MTU of the interface, in bytes.
        mtu: u32,
        /// Maximum MTU for the arena's frame size, in bytes.
        max_mtu: u32,
    },
    /// Another XDP program is attached to the interface.
    #[error("another XDP program is attached to `{interface}`, {}", advice(interface, holder.as_ref()))]
    AlreadyAttached {
        /// Interface name.
        interface: String,
        /// Process that attached the program, if known.
        holder: Option<ProcessInfo>,
    },
    /// The kernel refused to attach the XDP program.
    #[error("cannot attach an XDP program to `{interface}`, {tried}: {source}{hint}")]
    Attach {
        /// Interface name.
        interface: String,
        /// Attach modes that were tried.
        tried: &'static str,
        /// Error of the last attempt.
        source: io::Error,
        /// Remedy, if known; empty otherwise.
        hint: &'static str,
    },
    /// The kernel refused to load the XDP program.
    #[error(
        "the kernel refused to load the steering program: {0}; Linux 5.11 or newer is required"
    )]
    Load(#[source] Box<EbpfError>),
    /// A ring size is not a power of two between 64 and 32768.
    #[error("invalid ring size of {0} entries: use a power of two between 64 and 32768")]
    InvalidRingSize(u32),
    /// A configured receive queue does not exist.
    #[error("`{interface}` has no receive queue {queue}: it has {active}, counted from 0")]
    NoQueue {
        /// Interface name.
        interface: String,
        /// Configured queue number.
        queue: u32,
        /// Number of active queues.
        active: u32,
    },
    /// The list of receive queues is empty or names a queue twice.
    #[error(
        "invalid list of receive queues of `{interface}`: name at least one, and each only once"
    )]
    InvalidQueues {
        /// Interface name.
        interface: String,
    },
    /// Another AF_XDP socket is bound to the queue.
    #[error(
        "queue {queue} of `{interface}` is bound to another AF_XDP socket: stop the other \
         process, or choose other queues"
    )]
    QueueBusy {
        /// Interface name.
        interface: String,
        /// Queue number.
        queue: u32,
    },
    /// The kernel refused to pin the arena's memory.
    #[error(
        "the kernel refused to pin {bytes} bytes of packet buffers: {source}; configure fewer \
         frames, raise the limit of locked memory (`ulimit -l`), or add CAP_IPC_LOCK"
    )]
    Memory {
        /// Arena size, in bytes.
        bytes: usize,
        /// Error of the kernel.
        source: io::Error,
    },
    /// An AF_XDP socket could not be created or bound.
    #[error("cannot open an AF_XDP socket on queue {queue} of `{interface}`: {source}")]
    Socket {
        /// Interface name.
        interface: String,
        /// Queue number.
        queue: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel refused the requested busy polling.
    #[error(
        "cannot enable busy polling: {0}; it requires Linux 5.11: open the device without it \
         (`--busy-poll 0`)"
    )]
    BusyPoll(#[source] io::Error),
    /// A BPF map of the steering rules is full or cannot be accessed.
    #[error("cannot change the steering rules: {0}; the maximum is 1024 addresses and 8192 ports")]
    Steering(#[from] MapError),
    /// A query of the interface's properties failed.
    #[error("cannot query the interface `{interface}`: {source}")]
    Interface {
        /// Interface name.
        interface: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Advice about an interface that has a program.
fn advice(interface: &str, holder: Option<&ProcessInfo>) -> String {
    match holder {
        Some(holder) => format!(
            "by {holder}: let one `tidegate daemon` serve `{interface}` and attach both programs to \
             it (`tidegate run`), use AF_PACKET beside that process (`--io packet` or `--io auto`), \
             or stop it"
        ),
        None => format!(
            "by a process that this one cannot see, or by none: stop that process, or detach the \
             program with `ip link set dev {interface} xdp off`"
        ),
    }
}

impl XdpError {
    /// True if another process holds the interface or a queue, which it may be about to release.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::AlreadyAttached { .. } | Self::QueueBusy { .. })
    }
}
