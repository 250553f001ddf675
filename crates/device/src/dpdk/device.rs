//! Device driven by a DPDK poll-mode driver.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tidegate_memory::{Arena, FrameSize, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

use super::loss_counters::LossCounters;
use super::sys::{self, EthDev, OpenFailure, RxInterrupts};
use super::{DpdkConfig, DpdkError, DpdkLog, eal, memif};
use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState};

/// Maximum number of descriptors per ring. All rings together use at most a quarter of the
/// arena's frames, half of that to receive.
const MAX_RING_DESCRIPTORS: u16 = 1024;

/// Device backed by a DPDK ethdev.
pub struct DpdkDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
    loss_counters: LossCounters,
    /// Names of the device's extended statistics.
    statistic_names: Vec<Arc<str>>,
    name: String,
    waker: WakeSource,
    /// The last transmit left frames in the burst.
    has_unsent: bool,
    eth_dev: EthDev,
}

/// Serializes opening, so that DPDK's log lines belong to the device being opened.
static OPEN_LOCK: Mutex<()> = Mutex::new(());

/// Source of wakeups while the network core sleeps.
enum WakeSource {
    /// Receive interrupts of the device.
    Interrupts {
        /// Event descriptor of the interrupts.
        interrupts: RxInterrupts,
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
    pub fn open(config: &DpdkConfig, arena: &mut Arena) -> Result<Self, DpdkError> {
        if config.device.is_empty() {
            return Err(DpdkError::NoDevice);
        }
        eal::start(&config.arguments)?;
        memif::remove_stale_socket(&config.device);
        let _lock = OPEN_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // Discard log lines about other devices.
        sys::take_log();
        let mut eth_dev = EthDev::open(&config.device, arena)
            .map_err(|failed| open_error(&config.device, failed))?;
        match Self::start(config, &mut eth_dev, arena) {
            Ok(waker) => Ok(Self::from_started(config, eth_dev, waker)),
            Err(error) => {
                eth_dev.close(arena);
                Err(error)
            }
        }
    }

    fn start(
        config: &DpdkConfig,
        eth_dev: &mut EthDev,
        arena: &mut Arena,
    ) -> Result<WakeSource, DpdkError> {
        let max_mtu = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - 1 - LINK_HEADER_BYTES;
        if eth_dev.mtu() > max_mtu {
            return Err(DpdkError::Mtu {
                device: device_name(config),
                mtu: eth_dev.mtu(),
                max_mtu,
            });
        }
        if config.segmentation && arena.frame_bytes() < FrameSize::K64.bytes() {
            return Err(DpdkError::FramesTooSmall);
        }
        let (queues, max_queues) = (config.queues.get(), eth_dev.max_queues());
        if queues > max_queues {
            return Err(DpdkError::TooManyQueues {
                device: device_name(config),
                queues,
                max_queues,
            });
        }
        // Without arena frames the device uses DPDK's own buffers.
        let descriptors_per_queue = match eth_dev.uses_arena_frames() {
            true => arena.capacity() / (8 * usize::from(queues)),
            false => MAX_RING_DESCRIPTORS.into(),
        };
        let descriptors = descriptors_per_queue.clamp(1, MAX_RING_DESCRIPTORS.into()) as u16;
        eth_dev
            .start(arena, queues, descriptors, config.segmentation)
            .map_err(|failed| open_error(&config.device, failed))?;
        Ok(WakeSource::for_device(eth_dev)?)
    }

    fn from_started(config: &DpdkConfig, mut eth_dev: EthDev, waker: WakeSource) -> Self {
        eth_dev.memif_client = memif::MemifClient::for_device(&config.device);
        let capabilities = Capabilities {
            kind: "dpdk",
            detail: String::new(),
            medium: Medium::Ethernet,
            mac: eth_dev.mac(),
            mtu: eth_dev.mtu()
                - if counts_link_header_in_mtu(&eth_dev) { LINK_HEADER_BYTES } else { 0 },
            receive_checksum: eth_dev.receive_checksum(),
            transmit_checksum: eth_dev.transmit_checksum(),
            segmentation: eth_dev.has_tso(),
            queues: config.queues.get().into(),
        };
        let statistic_names: Vec<Arc<str>> =
            eth_dev.statistic_names().into_iter().map(Arc::from).collect();
        let statistics = eth_dev.statistics(statistic_names.len());
        let loss_counters = LossCounters::since(
            eth_dev.losses(),
            &statistic_names,
            &statistics.unwrap_or_default(),
        );
        let mut device = Self {
            capabilities,
            counters: DeviceCounters::default(),
            loss_counters,
            statistic_names,
            name: device_name(config),
            waker,
            has_unsent: false,
            eth_dev,
        };
        device.update_detail();
        device
    }

    /// Updates the description in the capabilities: link state, copy mode, wake source, offloads.
    fn update_detail(&mut self) {
        let link = if self.eth_dev.link_is_up() { "up" } else { "down" };
        let wake = match self.waker {
            WakeSource::Interrupts { .. } => "interrupts",
            WakeSource::Timer { .. } => "timed sleep",
        };
        let frames = if self.eth_dev.uses_arena_frames() { "no copy" } else { "copy" };
        let rss_note = if self.eth_dev.has_rss() { ", RSS" } else { "" };
        let (name, driver) = (&self.name, self.eth_dev.driver());
        let tso_note = if self.eth_dev.has_tso() { ", segmentation" } else { "" };
        self.capabilities.detail =
            format!("{name}, {driver}, link {link}, {frames}, {wake}{rss_note}{tso_note}");
    }

    /// Reconnects a memif client whose server went away, when a retry is due.
    fn reconnect(&mut self) {
        let Some(mut client) = self.eth_dev.memif_client.take() else { return };
        if client.is_retry_due(|| self.eth_dev.link_is_up()) {
            // The server may still be absent.
            client.on_restart(self.eth_dev.restart().is_ok());
        }
        self.eth_dev.memif_client = Some(client);
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
    fn for_device(device: &EthDev) -> io::Result<Self> {
        if let Some(interrupts) = device.interrupts() {
            return Ok(Self::Interrupts { interrupts, enabled: false });
        }
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self::Timer { timer, next_sleep: MIN_SLEEP })
    }

    /// Disables interrupts while the core polls the device.
    #[inline]
    fn on_poll(&mut self, device: &EthDev) -> io::Result<()> {
        match self {
            Self::Interrupts { enabled, .. } if *enabled => {
                *enabled = false;
                device.set_interrupts(false)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn on_frames(&mut self) {
        if let Self::Timer { next_sleep, .. } = self {
            *next_sleep = MIN_SLEEP;
        }
    }

    fn prepare_sleep(&mut self, device: &EthDev) -> io::Result<()> {
        match self {
            Self::Interrupts { interrupts, enabled } => {
                interrupts.drain();
                if !*enabled {
                    device.set_interrupts(true)?;
                    *enabled = true;
                }
                Ok(())
            }
            Self::Timer { timer, next_sleep } => {
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
        self.eth_dev.check(arena)?;
        self.waker.on_poll(&self.eth_dev)?;
        let drops = &mut self.counters.drops;
        let (taken, bytes) = self.eth_dev.receive(arena, burst, quota, drops);
        if taken > 0 {
            self.counters.received += taken as u64;
            self.counters.received_bytes += bytes;
            self.waker.on_frames();
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.eth_dev.check(arena)?;
        let before = burst.len();
        let drops = &mut self.counters.drops;
        let (sent, bytes) = self.eth_dev.transmit(arena, burst, drops);
        self.counters.transmitted += sent as u64;
        self.counters.transmitted_bytes += bytes;
        if sent == 0 && !burst.is_empty() && !self.eth_dev.link_is_up() {
            // The link is down, perhaps for long: drop the frames instead of holding them.
            drops.add(DropReason::TransmitFailed, burst.len() as u64);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        self.has_unsent = !burst.is_empty();
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        if self.has_unsent && matches!(self.waker, WakeSource::Interrupts { .. }) {
            // Free transmit descriptors raise no interrupt.
            return Ok(false);
        }
        self.reconnect();
        self.waker.prepare_sleep(&self.eth_dev)?;
        // Frames that arrived before the interrupts were enabled raise none.
        Ok(self.eth_dev.poll_rx() == 0)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(match &self.waker {
            WakeSource::Interrupts { interrupts, .. } => interrupts.as_fd(),
            WakeSource::Timer { timer, .. } => timer.as_fd(),
        })
    }

    fn counters(&mut self) -> DeviceCounters {
        self.update_detail();
        let statistics = self.eth_dev.statistics(self.statistic_names.len()).unwrap_or_default();
        self.loss_counters.update(self.eth_dev.losses(), &statistics);
        let mut counters = self.counters.clone();
        self.loss_counters.add_to(&mut counters.drops);
        let seen = self.statistic_names.iter().cloned().zip(statistics);
        counters.driver = seen.filter(|&(_, value)| value > 0).collect();
        counters
    }

    fn close_for_handover(self: Box<Self>, arena: &mut Arena, _: bool) -> Option<HandoverState> {
        self.eth_dev.close(arena);
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
