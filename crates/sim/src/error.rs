//! Errors in the setup of a machine.

use tidegate_gate::Mode;

use crate::limits::{MAX_CORES, MAX_COST_NS, MAX_QUEUE_ENTRIES, MAX_READERS};

/// Error in the setup or control of a simulated machine.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The number of cores is zero or too large.
    #[error("{0} cores: give 1 to {MAX_CORES}")]
    CoreCount(u32),
    /// The share of flows that change cores is not a share.
    #[error("{0} of the flows pass from core to core: give a share from 0 to 1")]
    CrossingShare(f64),
    /// The size of a ring or queue is zero or too large.
    #[error("{name} has {entries} entries: give 1 to {MAX_QUEUE_ENTRIES}")]
    Entries {
        /// Name of the setting.
        name: &'static str,
        /// Rejected number of entries.
        entries: u32,
    },
    /// A cost or period is zero where time must pass, or is too long.
    #[error("{name} is {ns} ns: give {min} to {MAX_COST_NS} ns, so that time passes")]
    Cost {
        /// Name of the setting.
        name: &'static str,
        /// Rejected time, in nanoseconds.
        ns: u64,
        /// Minimum valid time, in nanoseconds.
        min: u64,
    },
    /// An inline service requires a mode with a polling loop.
    #[error(
        "mode {} has no polling loop for the service to run in: place it in a process", .0.name()
    )]
    InlineNeedsPolling(Mode),
    /// Mode `dedicated` leaves no CPU time for processes below the polling loop.
    #[error(
        "mode dedicated busy-polls, so no process below it would ever run: place the \
         service inline, without background tasks"
    )]
    DedicatedHasNoPrograms,
    /// The offered load exceeds the link rate.
    #[error(
        "a load of {pps} packets/s exceeds the link, which carries {link_pps}: \
         lower the load or give a faster link"
    )]
    Link {
        /// Offered load, in packets per second.
        pps: u64,
        /// Link rate, in 64-byte packets per second.
        link_pps: u64,
    },
    /// The number of readers is zero or too large.
    #[error(
        "{0} readers: give 1 to {MAX_READERS}; only a UDP service placed in processes can have more than 1"
    )]
    ReaderCount(u32),
    /// No reader with this number runs as a process.
    #[error("no reader {0} runs as a process: give the number of a reader of the setup")]
    NoSuchReader(u32),
    /// The number of flows is zero or too large.
    #[error("{0} flows: give 1 to 65536")]
    FlowCount(u32),
    /// The burst size is zero or too large.
    #[error("a burst of {0} packets: give 1 to 65536")]
    BurstSize(u32),
    /// Invalid admission settings.
    #[error(transparent)]
    Admission(#[from] tidegate_gate::admission::ConfigError),
    /// No memory for frames.
    #[error(transparent)]
    Memory(#[from] tidegate_memory::ArenaError),
    /// Invalid stack configuration.
    #[error(transparent)]
    Stack(#[from] tidegate_stack::ConfigError),
    /// The stack cannot bind the socket.
    #[error(transparent)]
    Socket(#[from] tidegate_stack::SocketError),
}
