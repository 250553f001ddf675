//! Device of one core.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tidegate_memory::{Arena, Doorbell};

use super::dispatcher::Dispatcher;
use super::flow_steering::FlowSteering;
use super::queue_requests::QueueRequest;
use super::uplinks::Uplinks;
use crate::admission::EarlyDrop;
use crate::mem::MemDevice;
use crate::steering::SharedRules;
use crate::{Burst, Capabilities, Device, DeviceCounters, OpenDevice, ShardedDevice};

/// Device of one core: receives from a queue of its own, if it has one, and what other cores have
/// received for it.
///
/// The primary core always has a queue. A core without one sends through the primary core.
pub struct CoreDevice {
    core: usize,
    capabilities: Capabilities,
    /// Device of the core's own queue.
    queue: Option<Box<dyn Device>>,
    /// Opens the queue; `None` without a queue, or after the call.
    open_queue: Option<OpenDevice>,
    dispatcher: Dispatcher,
    /// Link to the primary core by which this core sends without a queue; `None` on the primary
    /// core.
    uplink: Option<MemDevice>,
    /// Links of the other cores, on the primary core.
    uplinks: Uplinks,
    /// Received frames; empty between calls.
    arrived: Burst,
    /// Passed-on frames have the larger half of the next quota.
    favours_passed: bool,
    /// Rung when another core passes frames on.
    doorbell: Arc<Doorbell>,
    /// Rung for anything else that the core has to do.
    bell: Arc<Doorbell>,
    wake_epoll: OwnedFd,
    flow_steering: Arc<FlowSteering>,
}

/// Links of one core to the others.
pub(super) struct CoreLinks {
    pub(super) dispatcher: Dispatcher,
    pub(super) uplink: Option<MemDevice>,
    pub(super) uplinks: Uplinks,
    /// Rung for all but passed-on frames.
    pub(super) bell: Arc<Doorbell>,
    /// Rung for passed-on frames.
    pub(super) doorbell: Arc<Doorbell>,
}

impl CoreDevice {
    pub(super) fn new(
        core: usize,
        capabilities: Capabilities,
        links: CoreLinks,
        open_queue: Option<OpenDevice>,
        flow_steering: Arc<FlowSteering>,
    ) -> io::Result<Self> {
        let CoreLinks { dispatcher, uplink, uplinks, bell, doorbell } = links;
        let wake_epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add_wake_source(&wake_epoll, Some(doorbell.as_fd()))?;
        add_wake_source(&wake_epoll, Some(bell.as_fd()))?;
        Ok(Self {
            core,
            capabilities,
            queue: None,
            open_queue,
            dispatcher,
            uplink,
            uplinks,
            arrived: Burst::new(),
            favours_passed: false,
            doorbell,
            bell,
            wake_epoll,
            flow_steering,
        })
    }

    /// Flow steering state that all cores share.
    pub fn flow_steering(&self) -> Arc<FlowSteering> {
        Arc::clone(&self.flow_steering)
    }

    /// True if the core receives from a queue of its own.
    pub fn has_queue(&self) -> bool {
        self.queue.is_some()
    }

    /// Opens the core's own queue, with the arena of its frames. Does nothing if it has none, or if
    /// it is open.
    ///
    /// # Errors
    /// If the queue cannot be opened; the frames that arrive there are lost.
    pub fn open_queue(&mut self, arena: &mut Arena) -> io::Result<()> {
        match self.open_queue.take() {
            Some(open) => self.set_queue(Some(open(arena)?)).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Sets the device of the core's queue, and returns the one before.
    pub(super) fn set_queue(
        &mut self,
        queue: Option<Box<dyn Device>>,
    ) -> io::Result<Option<Box<dyn Device>>> {
        if let Some(fd) = self.queue.as_ref().and_then(Device::wake_fd) {
            epoll::delete(&self.wake_epoll, fd)?;
        }
        if let Some(queue) = &queue {
            add_wake_source(&self.wake_epoll, queue.wake_fd())?;
        }
        self.flow_steering.set_has_queue(self.core, queue.is_some());
        Ok(std::mem::replace(&mut self.queue, queue))
    }

    /// Closes or opens the queue, as the primary core has asked.
    #[cold]
    fn serve_queue_request(&mut self, arena: &mut Arena) -> io::Result<()> {
        let flow_steering = Arc::clone(&self.flow_steering);
        let Some(request) = flow_steering.queue_requests().take(self.core) else { return Ok(()) };
        let result = match request {
            QueueRequest::Close => self.set_queue(None).map(|queue| {
                if let Some(queue) = queue {
                    queue.close_for_handover(arena, false);
                }
            }),
            QueueRequest::Open(open) => open(arena).and_then(|queue| {
                self.set_queue(Some(queue))?;
                Ok(())
            }),
        };
        flow_steering.queue_requests().answer(self.core, result);
        Ok(())
    }

    /// Serves a request of the primary core, and finds out if that core has stopped.
    #[inline]
    fn check_primary(&mut self, arena: &mut Arena) -> io::Result<()> {
        if self.uplink.as_ref().is_some_and(MemDevice::is_closed) {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the primary core has stopped"));
        }
        if self.flow_steering.queue_requests().is_pending(self.core) {
            self.serve_queue_request(arena)?;
        }
        Ok(())
    }

    /// Receives up to `quota` frames, half of them from other cores if there are as many, and
    /// dispatches those of the queue.
    fn receive_round(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        filter: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize> {
        let Self { queue: Some(queue), dispatcher, uplinks, flow_steering, .. } = self else {
            return Ok(0);
        };
        dispatcher.deliver_parked(flow_steering, arena, burst);
        dispatcher.expire_fragments(arena);
        let passed_quota = (quota + usize::from(self.favours_passed)) / 2;
        self.favours_passed = !self.favours_passed;
        let mut received = dispatcher.receive_passed(arena, burst, passed_quota)?;
        received += queue.receive(arena, &mut self.arrived, quota - received)?;
        filter(arena, &mut self.arrived);
        let view = flow_steering.view(self.core);
        for frame in self.arrived.drain(..) {
            dispatcher.dispatch(&view, arena, frame, burst);
        }
        if received < quota {
            received += dispatcher.receive_passed(arena, burst, quota - received)?;
        }
        let forwarded = uplinks.forward(&mut **queue, flow_steering, arena, quota)?;
        if !uplinks.loopback().is_empty() {
            let view = flow_steering.view(self.core);
            for frame in uplinks.loopback().drain(..) {
                dispatcher.dispatch(&view, arena, frame, burst);
            }
        }
        dispatcher.flush(arena)?;
        Ok(received.max(forwarded.min(quota)))
    }
}

/// Adds a descriptor that wakes a thread sleeping on `wake_epoll`.
fn add_wake_source(wake_epoll: &OwnedFd, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let data = epoll::EventData::new_u64(0);
    fd.map_or(Ok(()), |fd| Ok(epoll::add(wake_epoll, fd, data, epoll::EventFlags::IN)?))
}

impl ShardedDevice for CoreDevice {
    /// Replaces the device of the primary core's queue. The other cores close their queues before,
    /// and open those that the new device offers.
    fn replace_inner(&mut self, mut device: Box<dyn Device>) -> io::Result<Box<dyn Device>> {
        self.flow_steering.close_queues()?;
        self.flow_steering.set_rules(device.shared_rules());
        let offered = device.offer_queues();
        let before = self.set_queue(Some(device))?;
        self.flow_steering.open_queues(offered)?;
        before.ok_or_else(|| io::Error::other("the core has no device"))
    }

    fn queue_cores(&self) -> usize {
        if self.dispatcher.has_peers() { self.flow_steering.cores() } else { 1 }
    }

    fn receive_filtered(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        filter: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize> {
        self.check_primary(arena)?;
        if self.queue.is_none() {
            return self.dispatcher.receive_passed(arena, burst, quota);
        }
        self.flow_steering.begin_round(self.core);
        let received = self.receive_round(arena, burst, quota, filter);
        self.flow_steering.end_round(self.core);
        received
    }
}

impl Device for CoreDevice {
    fn capabilities(&self) -> &Capabilities {
        self.queue.as_ref().map_or(&self.capabilities, |queue| queue.capabilities())
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.receive_filtered(arena, burst, quota, &mut |_, _| ())
    }

    /// Dispatches loopback frames like received ones. A core without a queue sends them to the
    /// primary core, which keeps them in order.
    fn loop_back(
        &mut self,
        arena: &mut Arena,
        loopback: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        if self.queue.is_none() {
            self.transmit(arena, loopback)?;
            return Ok(0);
        }
        let before = burst.len();
        self.flow_steering.begin_round(self.core);
        let view = self.flow_steering.view(self.core);
        for _ in 0..quota {
            let Some(frame) = loopback.pop_front() else { break };
            self.dispatcher.dispatch(&view, arena, frame, burst);
        }
        let flushed = self.dispatcher.flush(arena);
        self.flow_steering.end_round(self.core);
        flushed?;
        Ok(burst.len() - before)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        match (&mut self.queue, &mut self.uplink) {
            (Some(queue), _) => queue.transmit(arena, burst),
            (None, Some(uplink)) => {
                let before = uplink.transmitted();
                let taken = uplink.transmit(arena, burst)?;
                self.flow_steering.on_sent(self.core, uplink.transmitted() - before);
                Ok(taken)
            }
            (None, None) => Ok(0),
        }
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        if let Some(queue) = &mut self.queue {
            queue.set_idle_polls(allowed);
        }
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        self.bell.disarm();
        self.bell.arm();
        // Frames that another core has sent before must not wait for the end of the pause.
        if self.uplinks.can_forward() || self.flow_steering.queue_requests().is_pending(self.core) {
            self.bell.ring();
        }
        self.queue.as_mut().map_or(Ok(()), |queue| queue.pause_receive(wait_ns))
    }

    fn pause_wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }

    fn forward(&mut self, arena: &mut Arena) -> io::Result<()> {
        self.check_primary(arena)?;
        match &mut self.queue {
            Some(queue) => self.uplinks.forward_paused(&mut **queue, &self.flow_steering, arena),
            None => Ok(()),
        }
    }

    fn has_passed_frames(&mut self) -> bool {
        self.dispatcher.has_passed()
    }

    fn needs_retry(&mut self) -> bool {
        self.queue.as_mut().is_some_and(Device::needs_retry)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        let bells = [&self.doorbell, &self.bell];
        bells.iter().for_each(|bell| {
            bell.disarm();
            bell.arm();
        });
        let has_work = self.dispatcher.has_passed()
            || self.dispatcher.may_deliver_parked(&self.flow_steering)
            || !self.uplinks.is_empty()
            || self.flow_steering.queue_requests().is_pending(self.core);
        let idle = !has_work && self.queue.as_mut().map_or(Ok(true), Device::prepare_sleep)?;
        if !idle {
            bells.iter().for_each(|bell| bell.disarm());
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_epoll.as_fd())
    }

    fn shared_rules(&self) -> Option<Arc<dyn SharedRules>> {
        self.flow_steering.rules()
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        self.queue.as_mut().and_then(|queue| queue.early_drop())
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.queue.as_mut().map_or(Ok(()), Device::take_over)
    }

    fn as_sharded(&mut self) -> Option<&mut dyn ShardedDevice> {
        self.uplink.is_none().then_some(self as &mut dyn ShardedDevice)
    }

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = match (&mut self.queue, &mut self.uplink) {
            (Some(queue), _) => queue.counters(),
            (None, Some(uplink)) => {
                let sent = uplink.counters();
                let received = self.dispatcher.passed();
                DeviceCounters { received: received.frames, received_bytes: received.bytes, ..sent }
            }
            (None, None) => DeviceCounters::default(),
        };
        counters.passed_on = self.dispatcher.passed_on();
        self.dispatcher.add_drops(&mut counters.drops);
        counters
    }
}
