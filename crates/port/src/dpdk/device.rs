//! The port on a device.

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

use super::losses::Losses;
use super::sys::{self, Device, Failed, Interrupts};
use super::{DpdkConfig, DpdkError, Said, eal, memif};
use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Left, Port, PortCounters};

/// The most places of a ring. All rings together have at most a quarter of the
/// arena's frames, half of it to receive.
const DESCRIPTORS: u16 = 1024;

/// Frames of one device of DPDK's.
pub struct DpdkPort {
    capabilities: Capabilities,
    counters: PortCounters,
    losses: Losses,
    /// Everything that the device counts.
    statistic_names: Vec<Arc<str>>,
    name: String,
    waker: Waker,
    /// The device did not take all that it was to send.
    is_full: bool,
    device: Device,
}

/// Held while a port is opened: what DPDK says meanwhile is about that one.
static OPENING: Mutex<()> = Mutex::new(());

/// What wakes a sleeper.
enum Waker {
    /// The device.
    Interrupts {
        /// What it interrupts.
        interrupts: Interrupts,
        /// They are on.
        on: bool,
    },
    /// Time: the device cannot interrupt, so it is looked at from time to time.
    Timer {
        /// What runs out.
        timer: OwnedFd,
        /// How long the next sleep is.
        sleep: Duration,
    },
}

/// The first sleep after a frame, and the longest: each is twice as long as
/// the one before it.
const SLEEP_MIN: Duration = Duration::from_micros(50);
const SLEEP_MAX: Duration = Duration::from_millis(1);

impl DpdkPort {
    pub fn open(config: &DpdkConfig, arena: &mut Arena) -> Result<Self, DpdkError> {
        if config.device.is_empty() {
            return Err(DpdkError::NoDevice);
        }
        eal::start(&config.arguments)?;
        memif::remove_stale_socket(&config.device);
        let _alone = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        // What was said about another port.
        sys::take_log();
        let mut device = Device::find(&config.device, arena)
            .map_err(|failed| refused(&config.device, failed))?;
        match Self::start(config, &mut device, arena) {
            Ok(waker) => Ok(Self::of(config, device, waker)),
            Err(error) => {
                device.close(arena);
                Err(error)
            }
        }
    }

    fn start(
        config: &DpdkConfig,
        device: &mut Device,
        arena: &mut Arena,
    ) -> Result<Waker, DpdkError> {
        let room = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - 1 - LINK_HEADER_BYTES;
        if device.mtu() > room {
            return Err(DpdkError::Mtu { device: name(config), mtu: device.mtu(), room });
        }
        if config.segmentation && arena.frame_bytes() < FrameSize::K64.bytes() {
            return Err(DpdkError::SmallFrames);
        }
        let (queues, most) = (config.queues.get(), device.queues_max());
        if queues > most {
            return Err(DpdkError::Queues { device: name(config), queues, most });
        }
        // Buffers of DPDK's own are not the arena's.
        let share = match device.takes_frames() {
            true => arena.capacity() / (8 * usize::from(queues)),
            false => DESCRIPTORS.into(),
        };
        let descriptors = share.clamp(1, DESCRIPTORS.into()) as u16;
        device
            .run(arena, queues, descriptors, config.segmentation)
            .map_err(|failed| refused(&config.device, failed))?;
        Ok(Waker::of(device)?)
    }

    fn of(config: &DpdkConfig, mut device: Device, waker: Waker) -> Self {
        device.client = memif::Client::of(&config.device);
        let capabilities = Capabilities {
            kind: "dpdk",
            detail: String::new(),
            medium: Medium::Ethernet,
            mac: device.mac(),
            mtu: device.mtu() - if cuts_short(&device) { LINK_HEADER_BYTES } else { 0 },
            receive_checksum: device.receive_checksum(),
            transmit_checksum: device.transmit_checksum(),
            segmentation: device.cuts(),
            queues: config.queues.get().into(),
        };
        let statistic_names: Vec<Arc<str>> =
            device.statistic_names().into_iter().map(Arc::from).collect();
        let statistics = device.statistics(statistic_names.len());
        let losses =
            Losses::since(device.losses(), &statistic_names, &statistics.unwrap_or_default());
        let mut port = Self {
            capabilities,
            counters: PortCounters::default(),
            losses,
            statistic_names,
            name: name(config),
            waker,
            is_full: false,
            device,
        };
        port.describe();
        port
    }

    /// How the port works right now.
    fn describe(&mut self) {
        let link = if self.device.link_is_up() { "up" } else { "down" };
        let waits = match self.waker {
            Waker::Interrupts { .. } => "interrupts",
            Waker::Timer { .. } => "timed sleep",
        };
        let frames = if self.device.takes_frames() { "no copy" } else { "copy" };
        let rss = if self.device.has_rss() { ", RSS" } else { "" };
        let (name, driver) = (&self.name, self.device.driver());
        let cuts = if self.device.cuts() { ", segmentation" } else { "" };
        self.capabilities.detail =
            format!("{name}, {driver}, link {link}, {frames}, {waits}{rss}{cuts}");
    }

    /// Tries to find the server of a memif again.
    fn reconnect(&mut self) {
        let Some(mut client) = self.device.client.take() else { return };
        if client.is_due(|| self.device.link_is_up()) {
            // It may still not be there.
            client.on_restart(self.device.restart().is_ok());
        }
        self.device.client = Some(client);
    }
}

/// Whether the device takes the link's header for a part of the packet when it cuts:
/// segments that fill the MTU would be refused for ever.
fn cuts_short(device: &Device) -> bool {
    device.cuts() && device.driver() == "net_tap"
}

/// The name of the device alone: its arguments may be long.
fn name(config: &DpdkConfig) -> String {
    config.device.split(',').next().unwrap_or_default().to_owned()
}

/// The step of the shim's that fails when a card needs memory that stays where
/// it is.
const MOVING: &str = "reach the packet buffers in ordinary memory";

/// What a failure means.
fn refused(device: &str, failed: Failed) -> DpdkError {
    let (device, mut said) = (device.to_owned(), sys::take_log());
    let Failed { step, source } = failed;
    if said.is_empty() {
        said = source.to_string();
    }
    let busy = matches!(source.raw_os_error(), Some(libc::EBUSY | libc::EEXIST))
        || said.contains("Address already in use");
    let no_server = said.contains("memif_connect_client");
    let said = Said(said);
    match step {
        Some(MOVING) => DpdkError::Hugepages { device },
        _ if busy => DpdkError::Busy { device, said },
        _ if no_server => DpdkError::NoServer { device, said },
        None => DpdkError::Probe { advice: advice(&device, eal::has_hugepages()), device, said },
        Some(step) => DpdkError::Setup { step, device, said },
    }
}

/// What to do about a device that has no driver.
fn advice(device: &str, has_hugepages: bool) -> String {
    let name = device.split(',').next().unwrap_or_default();
    if !name.contains(':') {
        return "a virtual device begins with the name of its driver, as net_memif0 or \
                net_tap0,iface=NAME"
            .into();
    }
    let bind = format!("bind it with `dpdk-devbind.py --bind=vfio-pci {name}`");
    if has_hugepages {
        return bind;
    }
    format!("{bind}, and get hugepages with `echo 512 | sudo tee /proc/sys/vm/nr_hugepages`")
}

impl Waker {
    fn of(device: &Device) -> io::Result<Self> {
        if let Some(interrupts) = device.interrupts() {
            return Ok(Self::Interrupts { interrupts, on: false });
        }
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self::Timer { timer, sleep: SLEEP_MIN })
    }

    /// The port is awake and looks itself.
    #[inline]
    fn on_look(&mut self, device: &Device) -> io::Result<()> {
        match self {
            Self::Interrupts { on, .. } if *on => {
                *on = false;
                device.set_interrupts(false)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn on_frames(&mut self) {
        if let Self::Timer { sleep, .. } = self {
            *sleep = SLEEP_MIN;
        }
    }

    fn prepare_sleep(&mut self, device: &Device) -> io::Result<()> {
        match self {
            Self::Interrupts { interrupts, on } => {
                interrupts.take();
                if !*on {
                    device.set_interrupts(true)?;
                    *on = true;
                }
                Ok(())
            }
            Self::Timer { timer, sleep } => {
                let once = Itimerspec {
                    it_interval: Timespec::default(),
                    it_value: Timespec { tv_sec: 0, tv_nsec: i64::from(sleep.subsec_nanos()) },
                };
                *sleep = (*sleep * 2).min(SLEEP_MAX);
                timerfd_settime(&*timer, TimerfdTimerFlags::empty(), &once)?;
                Ok(())
            }
        }
    }
}

impl Port for DpdkPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.device.check(arena)?;
        self.waker.on_look(&self.device)?;
        let drops = &mut self.counters.drops;
        let (taken, bytes) = self.device.receive(arena, burst, quota, drops);
        if taken > 0 {
            self.counters.received += taken as u64;
            self.counters.received_bytes += bytes;
            self.waker.on_frames();
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.device.check(arena)?;
        let before = burst.len();
        let drops = &mut self.counters.drops;
        let (sent, bytes) = self.device.transmit(arena, burst, drops);
        self.counters.transmitted += sent as u64;
        self.counters.transmitted_bytes += bytes;
        if sent == 0 && !burst.is_empty() && !self.device.link_is_up() {
            // Nobody is there to take them, maybe for long.
            drops.add(DropReason::TransmitFailed, burst.len() as u64);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        self.is_full = !burst.is_empty();
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        if self.is_full && matches!(self.waker, Waker::Interrupts { .. }) {
            // Room to send is no reason to interrupt.
            return Ok(false);
        }
        self.reconnect();
        self.waker.prepare_sleep(&self.device)?;
        // What came before the interrupts were on makes none.
        Ok(self.device.arrived() == 0)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(match &self.waker {
            Waker::Interrupts { interrupts, .. } => interrupts.as_fd(),
            Waker::Timer { timer, .. } => timer.as_fd(),
        })
    }

    fn counters(&mut self) -> PortCounters {
        self.describe();
        let statistics = self.device.statistics(self.statistic_names.len()).unwrap_or_default();
        self.losses.update(self.device.losses(), &statistics);
        let mut counters = self.counters.clone();
        self.losses.add_to(&mut counters.drops);
        let seen = self.statistic_names.iter().cloned().zip(statistics);
        counters.device = seen.filter(|&(_, value)| value > 0).collect();
        counters
    }

    fn close_for_now(self: Box<Self>, arena: &mut Arena, _: bool) -> Option<Left> {
        self.device.close(arena);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_needs_hugepages_is_told_from_other_failures() {
        let source = || io::Error::from_raw_os_error(libc::EFAULT);
        let moving = refused("0000:01:00.0", Failed { step: Some(MOVING), source: source() });
        assert!(moving.to_string().contains("nr_hugepages"), "{moving}");
        let other = refused("0000:01:00.0", Failed { step: Some("start it"), source: source() });
        assert!(matches!(other, DpdkError::Setup { step: "start it", .. }), "{other}");
    }

    #[test]
    fn the_advice_is_for_the_kind_of_device() {
        let card = advice("0000:01:00.0,arg=1", false);
        assert!(card.contains("--bind=vfio-pci 0000:01:00.0`") && card.contains("nr_hugepages"));
        assert!(!advice("0000:01:00.0", true).contains("nr_hugepages"));
        assert!(advice("net_foo0,path=a:b", true).contains("net_memif0"));
    }
}
