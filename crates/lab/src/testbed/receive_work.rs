//! Places for the receive work of a server's device, the kernel's ways among them.

use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::netns::VethEnd;
use crate::testbed::sysctl::SysctlOverride;

/// Interval at which a timer polls the idle device, in nanoseconds: stands for the interrupt
/// coalescing of a NIC.
pub(crate) const POLL_INTERVAL_NS: u64 = 20_000;
/// Time after which a timer polls the device of a server that busy-polls, in nanoseconds: more than
/// the server needs between two polls.
const BUSY_POLL_TIMEOUT_NS: u64 = 1_000_000;
/// The same of a server that busy-polls until it is idle, and then sleeps: the time that a packet
/// waits for at most if it comes too late for the last poll. That of the kernel's documentation.
const SUSPENDED_FLUSH_NS: u64 = 20_000;
/// Time for which a device has no interrupts while its server finds packets. That of the kernel's
/// documentation.
const SUSPEND_TIMEOUT_NS: u64 = 20_000_000;
/// Idle polls before the device enables its interrupt again. The interrupt would run on the
/// sender's core, so the number is the maximum.
pub(crate) const MAX_IDLE_POLLS: u32 = i32::MAX as u32;
/// The same of a server that sleeps: the interrupt has to wake it.
const SUSPENDED_IDLE_POLLS: u32 = 100;

/// Time that a wait of an unmodified program polls the device for, in microseconds.
const PROGRAM_BUSY_POLL_US: &str = "200";

/// Context that does the receive work of the server's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveWork {
    /// The server polls the device itself, by AF_XDP.
    Server,
    /// Each arrival wakes a thread with priority over everything but the interrupt handler: a
    /// NIC without coalescing.
    Interrupt,
    /// A timer polls the device in softirqs, like a NIC with interrupt coalescing that nobody has
    /// tuned.
    Timer,
    /// Softirqs where Linux puts them: on a veth pair the sender's core, all of it.
    Softirq,
    /// The sender's core does the receive work, up to the point at which receive packet
    /// steering (RPS) hands a packet to the server's core.
    Steered,
    /// Each arrival wakes a thread of ordinary priority on the server's core (threaded NAPI).
    Thread,
    /// The server polls the device in calls of its sockets, always. A timer polls when it does not
    /// for some time.
    BusyPoll,
    /// The server polls the device in calls of its sockets until it is idle, and the device has no
    /// interrupts meanwhile (`irq-suspend-timeout`).
    Suspended,
}

impl ReceiveWork {
    /// The ways of the kernel that are candidates for its best; [`ReceiveWork::Timer`] stands apart.
    pub(crate) const KERNEL: [Self; 5] =
        [Self::Softirq, Self::Steered, Self::Thread, Self::BusyPoll, Self::Suspended];

    /// The same for programs that nobody changes.
    pub(crate) const PROGRAMS: [Self; 4] =
        [Self::Softirq, Self::Steered, Self::Thread, Self::BusyPoll];

    /// Name of a server on kernel sockets whose receive work is done so.
    pub(crate) fn kernel_name(self) -> &'static str {
        match self {
            Self::Server => "kernel",
            Self::Interrupt => "kernel-interrupt",
            Self::Timer => "kernel-timer",
            Self::Softirq => "kernel-softirq",
            Self::Steered => "kernel-rps",
            Self::Thread => "kernel-thread",
            Self::BusyPoll => "kernel-busy-poll",
            Self::Suspended => "kernel-irq-suspension",
        }
    }

    /// Flags of `tidegate serve --io kernel`.
    pub(crate) fn serve_flags(self) -> &'static [&'static str] {
        match self {
            Self::BusyPoll => &["--kernel-busy-poll"],
            Self::Suspended => &["--kernel-busy-poll=until-idle"],
            _ => &[],
        }
    }

    /// Settings of the machine for unmodified programs that start while they are in force: with
    /// [`ReceiveWork::BusyPoll`] their calls poll the device.
    pub(crate) fn program_settings(self) -> Result<Vec<SysctlOverride>, LabError> {
        let names: &[&str] = match self {
            Self::BusyPoll => &["net/core/busy_poll", "net/core/busy_read"],
            _ => &[],
        };
        names.iter().map(|name| SysctlOverride::set(name, PROGRAM_BUSY_POLL_US)).collect()
    }

    /// True if it needs a NAPI context, which GRO gives to a veth.
    pub(crate) fn needs_napi(self) -> bool {
        !matches!(self, Self::Server | Self::Softirq | Self::Steered)
    }

    /// Gives the device of `end` back what Linux sets.
    pub(crate) fn reset(end: &VethEnd) -> Result<(), LabError> {
        // The kernel keeps threaded NAPI across NAPI contexts, so a new context may still have
        // the thread of the previous one. The calls fail without a NAPI context.
        let _ = end.set_softirq_napi();
        let _ = end.set_irq_suspend_timeout(0);
        end.set_deferral(0, 0)?;
        end.set_rps(&[])
    }

    /// Makes `core` do the receive work of `end`. [`ReceiveWork::Timer`] needs packets as well: see
    /// `FloodTestbed::flood_frames`.
    pub(crate) fn place(self, end: &VethEnd, core: usize) -> Result<(), LabError> {
        match self {
            Self::Server | Self::Softirq => Ok(()),
            Self::Timer => end.set_deferral(MAX_IDLE_POLLS, POLL_INTERVAL_NS),
            // The server takes the device over with its first poll.
            Self::BusyPoll => end.set_deferral(MAX_IDLE_POLLS, BUSY_POLL_TIMEOUT_NS),
            Self::Suspended => {
                end.set_deferral(SUSPENDED_IDLE_POLLS, SUSPENDED_FLUSH_NS)?;
                end.set_irq_suspend_timeout(SUSPEND_TIMEOUT_NS)
            }
            Self::Interrupt => {
                let threads = end.set_threaded_napi(core)?;
                threads.into_iter().try_for_each(cpu::run_as_interrupt)
            }
            Self::Thread => end.set_threaded_napi(core).map(drop),
            Self::Steered => end.set_rps(&[core]),
        }
    }
}
