//! Why the port could not be opened or told to take something.

use std::io;

use aya::EbpfError;
use aya::maps::MapError;

use crate::netlink::NetlinkError;

/// Why an AF_XDP port could not be opened or steered. Nothing is left attached
/// after an error.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// There is no interface of this name in the thread's network namespace, or
    /// the kernel does not tell.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The interface went away while the port was opened.
    #[error("the interface `{0}` is gone: `ip link` lists those of this network namespace")]
    Gone(String),
    /// The interface is down.
    #[error("the interface `{0}` is down: `ip link set dev {0} up`")]
    Down(String),
    /// The interface does not carry Ethernet frames.
    #[error("`{0}` is not an Ethernet interface: AF_XDP needs one, a network card or a veth")]
    NotEthernet(String),
    /// The process may not do this.
    #[error(
        "not permitted to {0}: run as root, or with CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF \
         (`setcap cap_net_admin,cap_net_raw,cap_bpf+ep PROGRAM`)"
    )]
    NotPermitted(&'static str),
    /// Frames of the interface's MTU do not fit in a frame of the arena.
    #[error(
        "the MTU of `{interface}` is {mtu}, but a frame of the arena holds {largest} at most: \
         use larger frames or `ip link set dev {interface} mtu {largest}`"
    )]
    MtuTooLarge {
        /// The interface.
        interface: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// The largest that would do.
        largest: u32,
    },
    /// Another XDP program is attached.
    #[error(
        "another XDP program is attached to `{0}`: end the program that put it there, or take \
         it off by `ip link set dev {0} xdp off`"
    )]
    AlreadyAttached(String),
    /// The program could not be attached.
    #[error("cannot attach an XDP program to `{interface}`, {tried}: {source}{hint}")]
    Attach {
        /// The interface.
        interface: String,
        /// The modes that were tried.
        tried: &'static str,
        /// What the kernel said last.
        source: io::Error,
        /// What to do, when it is known.
        hint: &'static str,
    },
    /// The kernel did not take the program.
    #[error("the kernel did not load the steering program: {0}; it needs Linux 5.11 or newer")]
    Load(#[source] Box<EbpfError>),
    /// A ring size is not a power of two between 64 and 32768.
    #[error("a ring of {0} entries cannot be: use a power of two between 64 and 32768")]
    RingSize(u32),
    /// The queues to serve make no sense.
    #[error("`{interface}` has no receive queue {queue}: it has {active}, counted from 0")]
    NoQueue {
        /// The interface.
        interface: String,
        /// The queue that was asked for.
        queue: u32,
        /// How many queues are in use.
        active: u32,
    },
    /// No queues, or one of them twice.
    #[error("name at least one receive queue of `{interface}`, and each only once")]
    Queues {
        /// The interface.
        interface: String,
    },
    /// Another socket serves the queue.
    #[error(
        "queue {queue} of `{interface}` is served by another AF_XDP socket: end the other \
         program, or choose other queues"
    )]
    QueueBusy {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
    },
    /// The kernel would not pin the arena.
    #[error(
        "the kernel did not take {bytes} bytes of packet buffers: {source}; ask for fewer \
         frames or raise the limit of locked memory (`ulimit -l`)"
    )]
    Memory {
        /// The size of the arena.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A socket could not be made or bound.
    #[error("cannot open an AF_XDP socket on queue {queue} of `{interface}`: {source}")]
    Socket {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// Busy polling was asked for and cannot be had.
    #[error(
        "cannot turn on busy polling: {0}; it needs CAP_NET_ADMIN and Linux 5.11, or open the \
         port without it"
    )]
    BusyPoll(#[source] io::Error),
    /// The rules do not fit or the maps are out of reach.
    #[error("cannot change what is taken: {0}; at most 1024 addresses and 8192 ports are")]
    Steering(#[from] MapError),
    /// Asking about the interface failed.
    #[error("cannot ask about `{interface}`: {source}")]
    Interface {
        /// The interface.
        interface: String,
        /// What the kernel said.
        source: io::Error,
    },
}
