//! Options of a daemon, and the errors of its start.

use std::io;
use std::ops::RangeInclusive;

use tidegate_device::sharded::MAX_CORES;
use tidegate_engine::{IdleConfig, NetConfig, OpenError};
use tidegate_gate::Mode;

use super::attach::bound_socket::AttachConfig;
use super::log::Log;
use super::upgrade::handover::UpgradeMode;

/// Error when a daemon starts or takes over.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The stack could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The socket could not be bound, or no thread or file descriptor is left.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Sizes of the applications' shared memory out of range.
    #[error(
        "shared-memory sizes out of range: a stream holds a power of two of bytes from 4 KiB \
         to 64 MiB, and an application has 1 to 1,048,576 sockets"
    )]
    Geometry,
    /// Scheduling mode that needs interrupt threads.
    #[error(
        "mode {} needs interrupts, but a network core polls; choose mode polled or dedicated",
        .0.name()
    )]
    Mode(Mode),
    /// CPU share out of range, in percent.
    #[error("an application's share of a core must be 1 to 100 percent, not {0}")]
    CpuShare(u32),
    /// Number of network cores out of range.
    #[error(
        "the number of network cores must be 1 to {MAX_CORES}, not {}-{}",
        .0.start(),
        .0.end()
    )]
    CoreCount(RangeInclusive<usize>),
    /// A daemon with several cores shares no address with the kernel.
    #[error(
        "several network cores of a daemon need an address that the kernel does not have: give the \
         stack one of its own, or use one network core"
    )]
    SharedAddress,
}

/// Options of a daemon.
pub struct StartOptions<B, S> {
    /// Attach listener, and the resources of each application.
    pub attach: AttachConfig,
    /// Minimum and maximum number of network cores. Cores are used as needed; unused cores sleep.
    pub cores: RangeInclusive<usize>,
    /// Called first by the thread of each core, with the core's index: to pin the thread and set
    /// its priority.
    pub on_core_start: B,
    /// Called once the device is open: by each core's thread after `on_core_start`, and by the
    /// calling thread before applications are accepted. The attach listener's thread inherits the
    /// privileges that the calling thread keeps.
    pub drop_privileges: S,
    /// Ability to be replaced by another daemon.
    pub upgrade: UpgradeMode,
    /// Measure the rounds of the cores, at two system calls each: for experiments.
    pub measure_rounds: bool,
    /// Log sink for events of applications.
    pub log: Log,
}

/// Checks the options; returns the configuration with the idle policy of a network core.
pub(super) fn check_options<B, S>(
    net: NetConfig,
    options: &StartOptions<B, S>,
) -> Result<NetConfig, StartError> {
    let (min, max) = (*options.cores.start(), *options.cores.end());
    if !(1..=max).contains(&min) || max > MAX_CORES {
        return Err(StartError::CoreCount(options.cores.clone()));
    }
    if max > 1 && net.shares_kernel_addresses() {
        return Err(StartError::SharedAddress);
    }
    let share = options.attach.quota.cpu_share_percent;
    if !(1..=100).contains(&share) {
        return Err(StartError::CpuShare(share));
    }
    if !options.attach.geometry.is_valid() {
        return Err(StartError::Geometry);
    }
    if let Some(mode) = net.thread_mode() {
        return Err(StartError::Mode(mode));
    }
    // Applications may share this processor: a pause yields it to them.
    Ok(net.idle(IdleConfig::default().spin_ns(0)))
}
