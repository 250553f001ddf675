//! Device driven by a DPDK poll-mode driver.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tidegate_memory::{Arena, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

use super::loss_counters::LossCounters;
use super::sys::{self, EthDev, EthQueues, OpenFailure, RxInterrupts};
use super::{DpdkConfig, DpdkError, DpdkLog, eal, memif};
use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState, OpenDevice};

/// Device of one network core: queues of a DPDK ethdev.
pub struct DpdkDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
    /// Statistics of the ethdev, which the first core reports.
    statistics: Option<Statistics>,
    name: String,
    waker: WakeSource,
    /// The last transmit left frames in the burst.
    has_unsent: bool,
    /// Other cores have yet to open their queues; the ethdev starts with the last.
    is_waiting: bool,
    /// First core of the ethdev.
    is_first: bool,
    offered: Vec<OpenDevice>,
    queues: EthQueues,
}

/// Counters of an ethdev itself.
struct Statistics {
    losses: LossCounters,
    /// Names of the extended statistics.
    names: Vec<Arc<str>>,
}

/// Serializes opening, so that DPDK's log lines belong to the device being opened.
static OPEN_LOCK: Mutex<()> = Mutex::new(());

/// Source of wakeups while the network core sleeps.
struct WakeSource {
    /// Receive interrupts, or the timer.
    wake: RxInterrupts,
    mode: WakeMode,
}

enum WakeMode {
    /// The ethdev has not started: nothing wakes.
    None,
    /// Receive interrupts of the queues.
    Interrupts {
        /// The interrupts are enabled.
        enabled: bool,
    },
    /// Timer: the device has no interrupts, so it is polled periodically.
    Timer {
        /// One-shot `timerfd`.
        timer: OwnedFd,
        /// Duration of the next sleep.
        next_sleep: Duration,
    },
}

/// Minimum and maximum timed sleep. The first sleep after a frame is the shortest; each
/// following sleep is twice as long.
const MIN_SLEEP: Duration = Duration::from_micros(50);
const MAX_SLEEP: Duration = Duration::from_millis(1);

impl DpdkDevice {
    /// Opens an ethdev, and the queues of the first core.
    pub fn open(config: &DpdkConfig, arena: &mut Arena) -> Result<Self, DpdkError> {
        if config.device.is_empty() {
            return Err(DpdkError::NoDevice);
        }
        eal::start(&config.arguments)?;
        memif::remove_stale_socket(&config.device);
        let _lock = OPEN_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // Discard log lines about other devices.
        sys::take_log();
        let failed = |failed| open_error(&config.device, failed);
        let mut eth_dev = EthDev::open(&config.device, arena.frame_bytes()).map_err(failed)?;
        let (queues, users) = plan_queues(config, &eth_dev, arena)?;
        eth_dev.plan(queues, users, config.segmentation).map_err(failed)?;
        let eth_dev = Arc::new(eth_dev);
        let first = EthQueues::open(&eth_dev, arena).map_err(failed)?;
        let mut device = Self::new(config, first, true)?;
        eth_dev.set_memif_client(memif::MemifClient::for_device(&config.device));
        device.offered = (1..users).map(|_| offer_queues(config, &eth_dev)).collect();
        Ok(device)
    }

    fn new(config: &DpdkConfig, queues: EthQueues, is_first: bool) -> io::Result<Self> {
        let eth_dev = queues.eth_dev();
        let capabilities = Capabilities {
            kind: "dpdk",
            detail: String::new(),
            medium: Medium::Ethernet,
            mac: eth_dev.mac(),
            mtu: eth_dev.mtu()
                - if counts_link_header_in_mtu(eth_dev) { LINK_HEADER_BYTES } else { 0 },
            receive_checksum: eth_dev.receive_checksum(),
            transmit_checksum: eth_dev.transmit_checksum(),
            segmentation: eth_dev.has_tso(),
            queues: queues.count(),
        };
        let mut device = Self {
            capabilities,
            counters: DeviceCounters::default(),
            statistics: None,
            name: device_name(config),
            waker: WakeSource { wake: RxInterrupts::new()?, mode: WakeMode::None },
            has_unsent: false,
            is_waiting: true,
            is_first,
            offered: Vec::new(),
            queues,
        };
        device.begin()?;
        Ok(device)
    }

    /// Prepares what depends on the started ethdev, once it has started.
    #[cold]
    fn begin(&mut self) -> io::Result<()> {
        let eth_dev = self.queues.eth_dev();
        self.is_waiting = eth_dev.is_incomplete();
        if !self.is_waiting {
            self.statistics = self.is_first.then(|| Statistics::since_now(eth_dev));
            self.waker.begin(&self.queues)?;
        }
        self.update_detail();
        Ok(())
    }

    /// Updates the description in the capabilities: link state, copy mode, wake source, offloads.
    fn update_detail(&mut self) {
        let eth_dev = self.queues.eth_dev();
        let link = if eth_dev.link_is_up() { "up" } else { "down" };
        let wake = match self.waker.mode {
            WakeMode::Interrupts { .. } => "interrupts",
            WakeMode::Timer { .. } => "timed sleep",
            WakeMode::None => "not started",
        };
        let frames = if eth_dev.uses_arena_frames() { "no copy" } else { "copy" };
        let rss_note = if eth_dev.has_rss() { ", RSS" } else { "" };
        let (name, driver) = (&self.name, eth_dev.driver());
        let tso_note = if eth_dev.has_tso() { ", segmentation" } else { "" };
        self.capabilities.detail =
            format!("{name}, {driver}, link {link}, {frames}, {wake}{rss_note}{tso_note}");
    }
}

/// Number of queues in each direction, and of cores that have some of them.
fn plan_queues(
    config: &DpdkConfig,
    eth_dev: &EthDev,
    arena: &Arena,
) -> Result<(u16, u16), DpdkError> {
    let max_mtu = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - 1 - LINK_HEADER_BYTES;
    if eth_dev.mtu() > max_mtu {
        return Err(DpdkError::Mtu { device: device_name(config), mtu: eth_dev.mtu(), max_mtu });
    }
    if config.segmentation && arena.frame_bytes() < FrameSize::K64.bytes() {
        return Err(DpdkError::FramesTooSmall);
    }
    let (queues, max_queues) = (config.queues.get(), eth_dev.max_queues());
    if queues > max_queues {
        return Err(DpdkError::TooManyQueues { device: device_name(config), queues, max_queues });
    }
    let cores = u16::try_from(config.cores).unwrap_or(u16::MAX).max(1);
    // Both ends of a memif must have the same number of queues.
    let queues = match memif::is_memif(&config.device) {
        true => queues,
        false => queues.max(cores.min(max_queues)),
    };
    Ok((queues, cores.min(queues)))
}

/// The queues of the next core.
fn offer_queues(config: &DpdkConfig, eth_dev: &Arc<EthDev>) -> OpenDevice {
    let (config, eth_dev) = (config.clone(), Arc::clone(eth_dev));
    Box::new(move |arena| {
        let _lock = OPEN_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        sys::take_log();
        let queues = EthQueues::open(&eth_dev, arena)
            .map_err(|failed| io::Error::other(open_error(&config.device, failed)))?;
        Ok(Box::new(DpdkDevice::new(&config, queues, false)?) as Box<dyn Device>)
    })
}

impl Statistics {
    /// Begins to count.
    fn since_now(eth_dev: &EthDev) -> Self {
        let names: Vec<Arc<str>> = eth_dev.statistic_names().into_iter().map(Arc::from).collect();
        let statistics = eth_dev.statistics(names.len()).unwrap_or_default();
        Self { losses: LossCounters::since(eth_dev.losses(), &names, &statistics), names }
    }

    fn add_to(&mut self, eth_dev: &EthDev, counters: &mut DeviceCounters) {
        let statistics = eth_dev.statistics(self.names.len()).unwrap_or_default();
        self.losses.update(eth_dev.losses(), &statistics);
        self.losses.add_to(&mut counters.drops);
        let seen = self.names.iter().cloned().zip(statistics);
        counters.driver = seen.filter(|&(_, value)| value > 0).collect();
    }
}

/// True if the driver counts the link header in the segment size of TSO: it would
/// reject segments that fill the MTU every time.
fn counts_link_header_in_mtu(device: &EthDev) -> bool {
    device.has_tso() && device.driver() == "net_tap"
}

/// Device name without its arguments, which may be long.
fn device_name(config: &DpdkConfig) -> String {
    config.device.split(',').next().unwrap_or_default().to_owned()
}

/// Step of the C shim that fails when a NIC needs memory with fixed physical addresses.
const HUGEPAGES_STEP: &str = "reach the packet buffers in ordinary memory";

/// Maps a failed step and DPDK's log to an error.
fn open_error(device: &str, failed: OpenFailure) -> DpdkError {
    let (device, mut log) = (device.to_owned(), sys::take_log());
    let OpenFailure { step, source } = failed;
    if log.is_empty() {
        log = source.to_string();
    }
    let busy = matches!(source.raw_os_error(), Some(libc::EBUSY | libc::EEXIST))
        || log.contains("Address already in use");
    let no_server = log.contains("memif_connect_client");
    let log = DpdkLog(log);
    match step {
        Some(HUGEPAGES_STEP) => DpdkError::NeedsHugepages { device },
        _ if busy => DpdkError::Busy { device, log },
        _ if no_server => DpdkError::NoServer { device, log },
        None => DpdkError::Probe { advice: advice(&device, eal::has_hugepages()), device, log },
        Some(step) => DpdkError::Setup { step, device, log },
    }
}

/// Advice for a device that no driver accepts.
fn advice(device: &str, has_hugepages: bool) -> String {
    let name = device.split(',').next().unwrap_or_default();
    if !name.contains(':') {
        return "a virtual device begins with the name of its driver, such as net_memif0 or \
                net_tap0,iface=NAME"
            .into();
    }
    let bind = format!("bind it with `dpdk-devbind.py --bind=vfio-pci {name}`");
    if has_hugepages {
        return bind;
    }
    format!("{bind}, and allocate hugepages with `echo 512 | sudo tee /proc/sys/vm/nr_hugepages`")
}

impl WakeSource {
    fn begin(&mut self, queues: &EthQueues) -> io::Result<()> {
        if queues.watch(&self.wake) {
            self.mode = WakeMode::Interrupts { enabled: false };
            return Ok(());
        }
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&self.wake, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        self.mode = WakeMode::Timer { timer, next_sleep: MIN_SLEEP };
        Ok(())
    }

    /// Disables interrupts while the core polls the device.
    #[inline]
    fn on_poll(&mut self, queues: &EthQueues) -> io::Result<()> {
        match &mut self.mode {
            WakeMode::Interrupts { enabled } if *enabled => {
                *enabled = false;
                queues.set_interrupts(false)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn on_frames(&mut self) {
        if let WakeMode::Timer { next_sleep, .. } = &mut self.mode {
            *next_sleep = MIN_SLEEP;
        }
    }

    fn prepare_sleep(&mut self, queues: &EthQueues) -> io::Result<()> {
        match &mut self.mode {
            WakeMode::None => Ok(()),
            WakeMode::Interrupts { enabled } => {
                self.wake.drain();
                if !*enabled {
                    queues.set_interrupts(true)?;
                    *enabled = true;
                }
                Ok(())
            }
            WakeMode::Timer { timer, next_sleep } => {
                let once = Itimerspec {
                    it_interval: Timespec::default(),
                    it_value: Timespec { tv_sec: 0, tv_nsec: i64::from(next_sleep.subsec_nanos()) },
                };
                *next_sleep = (*next_sleep * 2).min(MAX_SLEEP);
                timerfd_settime(&*timer, TimerfdTimerFlags::empty(), &once)?;
                Ok(())
            }
        }
    }
}

impl Device for DpdkDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.queues.check(arena)?;
        if self.is_waiting {
            self.begin()?;
        }
        self.waker.on_poll(&self.queues)?;
        let drops = &mut self.counters.drops;
        let (taken, bytes) = self.queues.receive(arena, burst, quota, drops);
        if taken > 0 {
            self.counters.received += taken as u64;
            self.counters.received_bytes += bytes;
            self.waker.on_frames();
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.queues.check(arena)?;
        let before = burst.len();
        let drops = &mut self.counters.drops;
        let (sent, bytes) = self.queues.transmit(arena, burst, drops);
        self.counters.transmitted += sent as u64;
        self.counters.transmitted_bytes += bytes;
        let is_stuck = sent == 0 && !burst.is_empty() && !self.is_waiting;
        if is_stuck && !self.queues.eth_dev().link_is_up() {
            // The link is down, perhaps for long: drop the frames instead of holding them.
            drops.add(DropReason::TransmitFailed, burst.len() as u64);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        self.has_unsent = !burst.is_empty();
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        if self.is_waiting {
            self.begin()?;
        }
        let wakes_on_receive_only = matches!(self.waker.mode, WakeMode::Interrupts { .. });
        if self.is_waiting || self.has_unsent && wakes_on_receive_only {
            // Neither the start nor free transmit descriptors raise an interrupt.
            return Ok(false);
        }
        if self.is_first {
            self.queues.eth_dev().reconnect_if_due();
        }
        self.waker.prepare_sleep(&self.queues)?;
        // Frames that arrived before the interrupts were enabled raise none.
        Ok(self.queues.poll_rx() == 0)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.waker.wake.as_fd())
    }

    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        std::mem::take(&mut self.offered)
    }

    fn counters(&mut self) -> DeviceCounters {
        self.update_detail();
        let mut counters = self.counters.clone();
        if let Some(statistics) = &mut self.statistics {
            statistics.add_to(self.queues.eth_dev(), &mut counters);
        }
        counters
    }

    fn close_for_handover(self: Box<Self>, arena: &mut Arena, _: bool) -> Option<HandoverState> {
        self.queues.close(arena);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_hugepages_are_reported_apart_from_other_failures() {
        let source = || io::Error::from_raw_os_error(libc::EFAULT);
        let hugepages = open_error(
            "0000:01:00.0",
            OpenFailure { step: Some(HUGEPAGES_STEP), source: source() },
        );
        assert!(hugepages.to_string().contains("nr_hugepages"), "{hugepages}");
        let other =
            open_error("0000:01:00.0", OpenFailure { step: Some("start it"), source: source() });
        assert!(matches!(other, DpdkError::Setup { step: "start it", .. }), "{other}");
    }

    #[test]
    fn advice_fits_the_kind_of_device() {
        let nic = advice("0000:01:00.0,arg=1", false);
        assert!(nic.contains("--bind=vfio-pci 0000:01:00.0`") && nic.contains("nr_hugepages"));
        assert!(!advice("0000:01:00.0", true).contains("nr_hugepages"));
        assert!(advice("net_foo0,path=a:b", true).contains("net_memif0"));
    }
}
