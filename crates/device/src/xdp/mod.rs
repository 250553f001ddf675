//! AF_XDP: frames straight from the driver, without the kernel's stack.
//!
//! A BPF program on the interface redirects the frames that match its rules ([`Steering`])
//! and passes the rest to the kernel. Redirected frames are written to the [`Arena`], whose
//! memory is registered with the kernel as a *umem*, and are announced on the RX ring of an
//! AF_XDP socket. There is one socket per receive queue.
//!
//! A BPF link that the process owns attaches the program. The kernel detaches the program as
//! soon as the process exits, for whatever reason.
//!
//! Each kernel object has its own file: [`umem`](self) memory, rings, sockets, the program,
//! its rules, busy polling. All raw system calls are in `sys`.

mod admission;
mod config;
mod core_queues;
mod error;
mod guard;
mod holder;
mod irq_deferral;
mod link;
mod mode_trials;
#[cfg_attr(not(feature = "packet"), allow(dead_code))]
mod napi;
mod open;
#[cfg(feature = "packet")]
mod path_switch;
#[cfg_attr(not(feature = "packet"), allow(dead_code))]
mod poll_ring;
mod program;
mod queue;
mod ring;
pub(crate) mod rules;
mod segment_sender;
mod socket;
mod softirq_mode;
mod steering;
#[cfg(feature = "packet")]
mod streams;
mod sys;
mod traffic;
mod umem;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

pub use self::config::{AttachMode, BusyPoll, CopyMode, RingSizes, UnknownAttachMode, XdpConfig};
use self::core_queues::CoreQueues;
pub use self::error::XdpError;
pub use self::guard::XdpGuard;
pub use self::link::XdpLink;
pub use self::napi::NapiPoller;
use self::open::QueueOffer;
#[cfg(feature = "packet")]
use self::path_switch::PathSwitch;
use self::program::SteeringProgram;
pub use self::steering::Steering;
pub use self::sys::URING_MARK;
use crate::admission::{ClassCounts, EarlyDrop, Limits, MAX_CLASSES};
use crate::steering::SharedRules;
pub use crate::steering::{SteeringRule, TransportProtocol};
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState, OpenDevice};

/// Frames of the interface by the decision of the steering program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteeringCounters {
    /// Redirected to the device.
    pub redirected: u64,
    /// Passed to the kernel: no rule matches.
    pub passed_not_steered: u64,
    /// Passed to the kernel: neither IP with UDP or TCP, nor ARP.
    pub passed_other_protocol: u64,
    /// Passed to the kernel: tagged for another VLAN, or with two tags.
    pub passed_other_vlan: u64,
    /// Passed to the kernel: a fragment to an address that is not Tidegate's own.
    pub passed_fragment: u64,
    /// Passed to the kernel: more IPv6 extension headers than the program parses.
    pub passed_extension: u64,
    /// Passed to the kernel: truncated or malformed.
    pub passed_malformed: u64,
    /// Passed to the kernel: a rule matches, but on a queue without a socket of the device.
    pub passed_no_socket: u64,
}

/// Device on AF_XDP sockets.
///
/// The arena that opened the device must be passed to every call, and serves no other
/// device. When the device is dropped, frames held by the kernel stay lent; use
/// [`XdpDevice::close`] to return those frames to the arena.
pub struct XdpDevice {
    // Dropped in this order: without sockets the program passes every frame to the kernel, so
    // no frame is lost between the two.
    queues: CoreQueues,
    program: SteeringProgram,
    /// Queues for the other network cores, until they are offered.
    offered: Vec<QueueOffer>,
    /// Changes between AF_XDP and AF_PACKET, where that pays.
    #[cfg(feature = "packet")]
    path_switch: Option<PathSwitch>,
}

/// Steering program loaded into the kernel, without a device.
pub struct LoadedProgram(Option<SteeringProgram>);

impl LoadedProgram {
    /// Link that keeps the program on the interface after [`Device::close_for_handover`] with `keep`.
    pub fn link(&self) -> Option<&XdpLink> {
        self.0.as_ref()?.link()
    }

    /// Prepares the program to replace the program that another process has on the interface.
    /// [`Device::take_over`] performs the replacement.
    pub fn inherit(&mut self, link: XdpLink) {
        if let Some(program) = &mut self.0 {
            program.inherit(link);
        }
    }
}

impl XdpDevice {
    /// Opens a device: registers the arena's memory, attaches the program, binds a socket to each
    /// queue and starts to redirect the frames that match the rules.
    ///
    /// The sockets belong to the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`XdpError`] names the cause and the remedy. Nothing is left attached or changed.
    pub fn open(config: XdpConfig, arena: &mut Arena) -> Result<Self, XdpError> {
        open::open(config, &mut None, arena)
    }

    /// Performs the slowest part of [`XdpDevice::open`], which needs no interface: loading the
    /// program takes some tenths of a second, since the kernel verifies the program.
    ///
    /// # Errors
    /// [`XdpError`] if the kernel refuses the program.
    pub fn load() -> Result<LoadedProgram, XdpError> {
        Ok(LoadedProgram(Some(open::load()?)))
    }

    /// Opens a device like [`XdpDevice::open`], with a program loaded before. On failure `loaded`
    /// is unchanged and the call may be repeated. On success `loaded` is empty, and a later call
    /// loads a new program.
    ///
    /// # Errors
    /// As [`XdpDevice::open`].
    pub fn open_loaded(
        config: XdpConfig,
        loaded: &mut LoadedProgram,
        arena: &mut Arena,
    ) -> Result<Self, XdpError> {
        open::open(config, &mut loaded.0, arena)
    }

    /// Closes the device and returns the frames held by the kernel to the arena.
    pub fn close(self, arena: &mut Arena) {
        drop(self);
        arena.reclaim_all();
    }

    /// Adds a user of a steering rule, effective immediately. Other rules stay.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if a map has no space for another rule.
    pub fn steer(&mut self, rule: SteeringRule) -> Result<(), XdpError> {
        Ok(self.program.steer(&rule)?)
    }

    /// Removes a user of a steering rule. With its last user the rule ends, effective immediately:
    /// its frames pass to the kernel again. Does nothing if the rule was not set.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if the kernel refuses.
    pub fn unsteer(&mut self, rule: &SteeringRule) -> Result<(), XdpError> {
        Ok(self.program.unsteer(rule)?)
    }

    /// Current steering rules.
    pub fn steering(&self) -> Steering {
        self.program.steering()
    }

    /// Counters of the steering program since it was loaded.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if the kernel refuses to read the map.
    pub fn steering_counters(&self) -> Result<SteeringCounters, XdpError> {
        Ok(self.program.counters()?)
    }
}

#[cfg(feature = "packet")]
impl XdpDevice {
    /// Receives up to `quota` frames by AF_PACKET, while frames come that way; returns their number.
    /// Changes the way if the traffic asks for it, after a burst of `received` frames by AF_XDP.
    #[inline]
    fn follow_traffic(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        received: usize,
    ) -> io::Result<usize> {
        let Some(switch) = &mut self.path_switch else { return Ok(0) };
        let mut count = 0;
        if switch.may_have_frames() {
            if let Some(napis) = switch.poll_change(&mut self.program) {
                self.queues.on_attachment(self.program.link().is_some(), napis)?;
                switch.restart(self.queues.traffic_totals());
            }
            count = switch.receive(arena, burst, quota, &self.program)?;
        }
        if switch.is_due(received + count) {
            switch.check(&mut self.program, self.queues.traffic_totals());
        }
        Ok(count)
    }
}

impl Device for XdpDevice {
    fn capabilities(&self) -> &Capabilities {
        self.queues.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let received = self.queues.receive(arena, burst, quota)?;
        #[cfg(feature = "packet")]
        let received = received + self.follow_traffic(arena, burst, quota - received, received)?;
        Ok(received)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.queues.set_idle_polls(allowed);
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.queues.transmit(arena, burst)
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        self.queues.pause_receive(wait_ns)
    }

    fn needs_retry(&mut self) -> bool {
        self.queues.needs_retry()
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        #[cfg(feature = "packet")]
        if let Some(switch) = &mut self.path_switch
            && !switch.prepare_sleep()?
        {
            return Ok(false);
        }
        self.queues.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queues.wake_fd()
    }

    fn shared_rules(&self) -> Option<Arc<dyn SharedRules>> {
        Some(self.program.shared_rules())
    }

    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        let open = |offer: QueueOffer| -> OpenDevice {
            Box::new(move |arena| {
                let queues = offer.open(arena).map_err(io::Error::other)?;
                Ok(Box::new(queues))
            })
        };
        self.offered.drain(..).map(open).collect()
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        Some(self)
    }

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = self.queues.counters();
        #[cfg(feature = "packet")]
        if let Some(switch) = &mut self.path_switch {
            counters.add(&switch.counters());
        }
        // An error of the kernel cannot be handled here; the drops stay uncounted.
        for class in self.counts().unwrap_or_default() {
            let drops = &mut counters.drops;
            drops.add(DropReason::AdmissionClassClosed, class.refused_closed);
            drops.add(DropReason::AdmissionRate, class.refused_rate);
            drops.add(DropReason::AdmissionSourceShare, class.refused_source_share);
        }
        counters
    }

    fn close_for_handover(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<HandoverState> {
        let Self {
            queues,
            mut program,
            #[cfg(feature = "packet")]
            path_switch,
            ..
        } = *self;
        #[cfg(feature = "packet")]
        if let Some(mut switch) = path_switch {
            switch.finish(&mut program);
        }
        if !(keep && program.start_dropping().is_ok()) {
            program.detach();
        }
        drop(queues);
        arena.reclaim_all();
        Some(HandoverState::Xdp(Box::new(LoadedProgram(Some(program)))))
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.program.take_over()
    }
}

/// Sums of admitted and of refused frames over all classes.
fn admitted_and_refused(counts: &[ClassCounts]) -> (u64, u64) {
    let sum = |field: fn(&ClassCounts) -> u64| counts.iter().map(field).sum();
    (sum(|class| class.admitted), sum(ClassCounts::refused))
}

/// The BPF program on the interface drops frames that are not admitted, before they are
/// copied. Admission applies only to frames that match a steering rule.
impl EarlyDrop for XdpDevice {
    fn set_classifier(&mut self, program: &crate::admission::Classifier) -> io::Result<()> {
        self.program.admission().set_classifier(program)
    }

    fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()> {
        self.program.admission().set_known_sources(words)
    }

    fn set_limits(&mut self, limits: Option<&Limits>) -> io::Result<()> {
        self.program.set_limits(limits)?;
        #[cfg(feature = "packet")]
        if let Some(switch) = &mut self.path_switch {
            switch.set_limited(limits.is_some());
        }
        // Frames that are only counted are polled for as without limits.
        let has_total = limits.is_some_and(Limits::has_total);
        if self.queues.has_total_limit() != has_total {
            let counts = self.program.admission().counts()?;
            self.queues.set_total_limit(has_total, admitted_and_refused(&counts))?;
        }
        Ok(())
    }

    fn counts(&mut self) -> io::Result<[ClassCounts; MAX_CLASSES]> {
        let counts = self.program.admission().counts()?;
        self.queues.on_admission_counts(admitted_and_refused(&counts))?;
        Ok(counts)
    }

    fn times_emptied(&self) -> Option<u64> {
        self.queues.times_emptied()
    }

    fn rx_missed(&mut self) -> io::Result<u64> {
        self.queues.rx_missed()
    }
}
