//! Why a machine cannot be built.

use tidegate_gate::Mode;

use crate::limits::{CORES_MAX, COST_MAX_NS, QUEUE_MAX, READERS_MAX};

/// Why a machine cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// No processors, or too many.
    #[error("{0} cores: give 1 to {CORES_MAX}")]
    Cores(u32),
    /// A ring or queue has no entries, or too many.
    #[error("{name} has {entries} entries: give 1 to {QUEUE_MAX}")]
    Entries {
        /// The name of the setting.
        name: &'static str,
        /// What was given.
        entries: u32,
    },
    /// A step that must take time takes none, or one takes too long.
    #[error("{name} is {ns} ns: give {least} to {COST_MAX_NS} ns, so that time passes")]
    Cost {
        /// The name of the setting.
        name: &'static str,
        /// What was given.
        ns: u64,
        /// The least that makes sense.
        least: u64,
    },
    /// The service is to run in a polling loop that there is none of.
    #[error(
        "mode {} has no polling loop for the service to run in: place it as a program", .0.name()
    )]
    InlineNeedsPolling(Mode),
    /// A program is to run below a loop that never ends.
    #[error(
        "mode dedicated polls without end, so no program below it would ever run: place the \
         service inline, and nothing beside it"
    )]
    DedicatedHasNoPrograms,
    /// The load is more than the link carries.
    #[error(
        "a load of {pps} packets/s does not fit on the link, which carries {link_pps}: \
         lower the load or give a faster link"
    )]
    Link {
        /// The load.
        pps: u64,
        /// What the link carries.
        link_pps: u64,
    },
    /// The service has no readers, or too many for its ports.
    #[error("{0} readers: give 1 to {READERS_MAX}; only a UDP service of programs has more than 1")]
    Readers(u32),
    /// There is no program to stop.
    #[error("there is no reader {0} that is a program: give one that the setup has")]
    Reader(u32),
    /// The load has no flows, or too many.
    #[error("{0} flows: give 1 to 65536")]
    Flows(u32),
    /// A burst has no packets, or too many.
    #[error("a burst of {0} packets: give 1 to 65536")]
    Burst(u32),
    /// Admission refuses its configuration.
    #[error(transparent)]
    Admission(#[from] tidegate_gate::admission::ConfigError),
    /// There is no memory for frames.
    #[error(transparent)]
    Memory(#[from] tidegate_memory::ArenaError),
    /// The stack refuses its configuration.
    #[error(transparent)]
    Stack(#[from] tidegate_stack::ConfigError),
    /// The stack refuses the socket.
    #[error(transparent)]
    Socket(#[from] tidegate_stack::SocketError),
}
