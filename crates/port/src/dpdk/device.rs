//! The port on a device.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tidegate_memory::{Arena, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

use super::sys::{self, Device, Failed, Interrupts};
use super::{DpdkConfig, DpdkError, Said, eal, memif};
use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Port, PortCounters};

/// Buffers of a device: its two rings, what waits on either side of them, and
/// what other devices have of it.
const BUFFERS: u32 = 8192;

/// Drivers expect buffers that hold so much at least, and no frame is longer
/// than so much: nine kilobytes of a large Ethernet frame, and more.
const DATA_BYTES: Range<usize> = 2 << 10..16 << 10;

/// Frames of one device of DPDK's.
pub struct DpdkPort {
    capabilities: Capabilities,
    counters: PortCounters,
    /// What the device counted before it was opened.
    losses_before: [u64; 4],
    name: String,
    waker: Waker,
    /// Set if connecting is up to us.
    client: Option<memif::Client>,
    device: Device,
}

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
    pub fn open(config: &DpdkConfig, arena: &Arena) -> Result<Self, DpdkError> {
        if config.device.is_empty() {
            return Err(DpdkError::NoDevice);
        }
        eal::start(&config.arguments)?;
        memif::remove_stale_socket(&config.device);
        // What was said about another port.
        sys::take_log();
        let room = arena.frame_bytes() - usize::from(HEADROOM_BYTES) - 1;
        let data_bytes = room.clamp(DATA_BYTES.start, DATA_BYTES.end);
        let device = Device::open(&config.device, BUFFERS, data_bytes as u16)
            .map_err(|failed| refused(&config.device, failed))?;
        // The name alone: arguments may be long.
        let name = config.device.split(',').next().unwrap_or_default().to_owned();
        let mtu_room = room.min(data_bytes) - LINK_HEADER_BYTES;
        if device.mtu() > mtu_room {
            return Err(DpdkError::Mtu { device: name, mtu: device.mtu(), room: mtu_room });
        }
        let waker = Waker::of(&device)?;
        let capabilities = Capabilities {
            kind: "dpdk",
            detail: String::new(),
            medium: Medium::Ethernet,
            mac: device.mac(),
            mtu: device.mtu(),
            receive_checksum: device.receive_checksum(),
            transmit_checksum: device.transmit_checksum(),
            segmentation: false,
            queues: 1,
        };
        let losses_before = device.losses();
        let counters = PortCounters::default();
        let client = memif::Client::of(&config.device);
        let mut port = Self { capabilities, counters, losses_before, name, waker, client, device };
        port.describe();
        Ok(port)
    }

    /// How the port works right now.
    fn describe(&mut self) {
        let link = if self.device.link_is_up() { "up" } else { "down" };
        let waits = match self.waker {
            Waker::Interrupts { .. } => "interrupts",
            Waker::Timer { .. } => "timed sleep",
        };
        let driver = self.device.driver();
        self.capabilities.detail = format!("{}, {driver}, link {link}, {waits}", self.name);
    }

    /// Tries to find the server of a memif again.
    fn reconnect(&mut self) {
        let Self { client, device, .. } = self;
        if client.as_mut().is_some_and(|client| client.is_due(|| device.link_is_up())) {
            // It may still not be there.
            let _ = device.restart();
        }
    }

    /// Hands frames to the device; returns whether it took all of them.
    fn send_unsent(&mut self) -> bool {
        let (sent, bytes) = self.device.send();
        self.counters.transmitted += sent as u64;
        self.counters.transmitted_bytes += bytes;
        if self.device.has_unsent() && sent == 0 && !self.device.link_is_up() {
            // Nobody is there to take them, maybe for long.
            let lost = self.device.forget_unsent();
            self.counters.drops.add(DropReason::TransmitFailed, lost as u64);
        }
        !self.device.has_unsent()
    }
}

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
        self.waker.on_look(&self.device)?;
        let Self { device, counters, .. } = self;
        let mut taken = 0;
        // A frame without a buffer stays with the device, as on any card.
        let quota = quota.min(arena.available());
        while taken < quota {
            let mut take = arena.take();
            let seen = device.receive(quota - taken, |packet| {
                let frame = packet.and_then(|(bytes, checksum)| {
                    let mut frame = take.alloc_from(bytes)?;
                    frame.set_checksum(checksum);
                    Some(frame)
                });
                match frame {
                    Some(frame) => {
                        counters.received_bytes += frame.len() as u64;
                        burst.push_back(frame);
                        taken += 1;
                    }
                    None => counters.drops.count(DropReason::FrameTooLong),
                }
            });
            if seen == 0 {
                break;
            }
        }
        if taken > 0 {
            counters.received += taken as u64;
            self.waker.on_frames();
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let before = burst.len();
        while !self.device.has_unsent() || self.send_unsent() {
            let buffers = match burst.len() {
                0 => 0,
                frames => self.device.allocate(frames),
            };
            if buffers == 0 {
                // All of them are with the device.
                break;
            }
            let mut back = arena.give_back();
            let mut filled = 0;
            for frame in burst.drain(..buffers) {
                let checksum = frame.checksum();
                let fits = back.consume(frame, |bytes| self.device.fill(filled, bytes, checksum));
                if fits {
                    filled += 1;
                } else {
                    self.counters.drops.count(DropReason::FrameTooLong);
                }
            }
            drop(back);
            let refused = self.device.prepare(filled);
            self.counters.drops.add(DropReason::TransmitFailed, refused as u64);
        }
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        let waits = self.device.has_unsent() && !self.send_unsent();
        if waits && matches!(self.waker, Waker::Interrupts { .. }) {
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
        let mut counters = self.counters.clone();
        let reasons = [
            DropReason::PortRingFull,
            DropReason::NoBuffer,
            DropReason::PortInvalidDescriptor,
            DropReason::TransmitFailed,
        ];
        let losses = self.device.losses().into_iter().zip(self.losses_before);
        for ((now, before), reason) in losses.zip(reasons) {
            counters.drops.add(reason, now.saturating_sub(before));
        }
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_is_for_the_kind_of_device() {
        let card = advice("0000:01:00.0,arg=1", false);
        assert!(card.contains("--bind=vfio-pci 0000:01:00.0`") && card.contains("nr_hugepages"));
        assert!(!advice("0000:01:00.0", true).contains("nr_hugepages"));
        assert!(advice("net_foo0,path=a:b", true).contains("net_memif0"));
    }
}
