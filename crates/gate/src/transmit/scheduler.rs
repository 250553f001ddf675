//! Order of the frames of all classes.

use super::chains::Chains;
use super::flows::{FLOWS, FlowQueues, Queued};
use super::pacer::Pacer;

/// Bytes of virtual time of a byte in a class of weight 1.
const VIRTUAL_SCALE: u64 = 1 << 16;

/// Flow of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowId {
    class: u8,
    flow: u16,
}

impl FlowId {
    /// The flow of a class that a keyed hash of the packet's addresses selects.
    pub fn new(class: u8, hash: u64) -> Self {
        Self { class, flow: (hash % FLOWS as u64) as u16 }
    }
}

/// Counters of a transmit class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounters {
    /// Frames that were handed to the device.
    pub sent: u64,
    /// Bytes of these frames.
    pub sent_bytes: u64,
    /// Frames that were dropped: their flow was above its share of the queue, or they waited too
    /// long.
    pub dropped: u64,
    /// Frames that wait.
    pub queued: u64,
}

impl ClassCounters {
    /// Adds the counters of the same class on another network core.
    pub fn add(&mut self, more: &Self) {
        self.sent += more.sent;
        self.sent_bytes += more.sent_bytes;
        self.dropped += more.dropped;
        self.queued += more.queued;
    }
}

/// Adds the counters of another network core, whose classes have the same names.
pub fn add_counters(all: &mut Vec<(String, ClassCounters)>, core: &[(String, ClassCounters)]) {
    if all.is_empty() {
        return all.extend_from_slice(core);
    }
    all.iter_mut().zip(core).for_each(|((_, all), (_, core))| all.add(core));
}

/// Terms of a class in the scheduler.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) rank: u8,
    pub(super) weight: u32,
    pub(super) ceiling_bps: Option<u64>,
}

struct ClassQueue {
    terms: Terms,
    pacer: Pacer,
    /// Bytes sent over the weight: among classes of one rank the smallest goes first.
    virtual_bytes: u64,
    flows: FlowQueues,
    counters: ClassCounters,
}

/// Frame that leaves the queues.
pub struct Released<T> {
    /// Flow of the frame.
    pub flow: FlowId,
    /// Value that stands for the frame.
    pub value: T,
    /// The frame has waited too long and is to be dropped.
    pub is_expired: bool,
}

/// Queues of all classes.
pub struct Scheduler<T> {
    link: Pacer,
    classes: Vec<ClassQueue>,
    frames: Chains<Queued<T>>,
    /// Connections that wait for space in their flow.
    waiting: Chains<u32>,
    queued: usize,
    max_frames: usize,
}

impl<T> Scheduler<T> {
    /// Creates empty queues for at most `max_frames` frames.
    pub(super) fn new(
        link_bps: Option<u64>,
        classes: impl IntoIterator<Item = Terms>,
        max_frames: usize,
    ) -> Self {
        let class = |terms: Terms| ClassQueue {
            terms,
            pacer: Pacer::new(terms.ceiling_bps),
            virtual_bytes: 0,
            flows: FlowQueues::new(),
            counters: ClassCounters::default(),
        };
        Self {
            link: Pacer::new(link_bps),
            classes: classes.into_iter().map(class).collect(),
            frames: Chains::new(),
            waiting: Chains::new(),
            queued: 0,
            max_frames,
        }
    }

    fn class(&mut self, flow: FlowId) -> &mut ClassQueue {
        &mut self.classes[usize::from(flow.class)]
    }

    /// Number of frames that wait.
    #[inline]
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Queues a frame, unless its flow or its class is above its share of the queue.
    ///
    /// # Errors
    /// The frame, which is counted as dropped.
    pub fn push(&mut self, flow: FlowId, queued: Queued<T>) -> Result<(), T> {
        let free = (self.max_frames - self.queued) as u64;
        let Self { classes, frames, .. } = self;
        let class = &mut classes[usize::from(flow.class)];
        // Thresholds that fall while the queues fill (Choudhury and Hahne 1998): there is always
        // space for a class and for a flow that have nothing here yet.
        let class_free = (2 * free).saturating_sub(class.counters.queued);
        if u64::from(class.flows.flow(flow.flow).frames) >= class_free {
            class.counters.dropped += 1;
            return Err(queued.value);
        }
        class.flows.push(frames, flow.flow, queued);
        class.counters.queued += 1;
        self.queued += 1;
        if class.counters.queued == 1 {
            self.begin(flow.class);
        }
        Ok(())
    }

    /// Gives a class that had no frames the virtual time of its rank: idle time earns nothing.
    fn begin(&mut self, index: u8) {
        let rank = self.classes[usize::from(index)].terms.rank;
        let others = self
            .classes
            .iter()
            .enumerate()
            .filter(|(other, class)| *other != usize::from(index) && class.terms.rank == rank);
        let is_active = |class: &ClassQueue| class.counters.queued > 0;
        // Without an active class in the rank, the last one that was served has the largest time.
        let active = others.clone().filter(|(_, class)| is_active(class));
        let rank_time = active
            .map(|(_, class)| class.virtual_bytes)
            .min()
            .or_else(|| others.map(|(_, class)| class.virtual_bytes).max());
        let class = &mut self.classes[usize::from(index)];
        class.virtual_bytes = class.virtual_bytes.max(rank_time.unwrap_or(0));
    }

    /// Removes the next frame that may leave at `now_ns`. `None` if none may.
    pub fn pop(&mut self, now_ns: u64) -> Option<Released<T>> {
        if self.queued == 0 || !self.link.is_due(now_ns) {
            return None;
        }
        let Self { classes, frames, .. } = self;
        let (index, class) = classes
            .iter_mut()
            .enumerate()
            .filter(|(_, class)| class.counters.queued > 0 && class.pacer.is_due(now_ns))
            .min_by_key(|(_, class)| (class.terms.rank, class.virtual_bytes))?;
        let (flow, queued) = class.flows.pop(frames)?;
        class.counters.queued -= 1;
        self.queued -= 1;
        let is_expired = queued.expires_ns <= now_ns;
        if is_expired {
            class.counters.dropped += 1;
        } else {
            class.counters.sent += 1;
            class.counters.sent_bytes += u64::from(queued.bytes);
            class.pacer.on_sent(now_ns, queued.bytes);
            class.virtual_bytes +=
                u64::from(queued.bytes) * VIRTUAL_SCALE / u64::from(class.terms.weight);
            self.link.on_sent(now_ns, queued.bytes);
        }
        let flow = FlowId { class: index as u8, flow };
        Some(Released { flow, value: queued.value, is_expired })
    }

    /// Time at which the next frame may leave; `None` if none waits.
    pub fn next_due_ns(&self) -> Option<u64> {
        let waiting = self.classes.iter().filter(|class| class.counters.queued > 0);
        let due_ns = waiting.map(|class| class.pacer.due_ns()).min()?;
        Some(due_ns.max(self.link.due_ns()))
    }

    /// Bytes that wait in a flow.
    #[inline]
    pub fn flow_bytes(&mut self, flow: FlowId) -> usize {
        self.class(flow).flows.flow(flow.flow).bytes as usize
    }

    /// Queues a connection that waits for space in a flow.
    pub fn wait(&mut self, flow: FlowId, connection: u32) {
        let Self { classes, waiting, .. } = self;
        let flow = classes[usize::from(flow.class)].flows.flow(flow.flow);
        waiting.push(&mut flow.waiting, connection);
    }

    /// Removes a connection that waits for space in a flow.
    pub fn take_waiting(&mut self, flow: FlowId) -> Option<u32> {
        let Self { classes, waiting, .. } = self;
        waiting.pop(&mut classes[usize::from(flow.class)].flows.flow(flow.flow).waiting)
    }

    /// Counters of all classes.
    pub fn counters(&self) -> impl Iterator<Item = ClassCounters> {
        self.classes.iter().map(|class| class.counters)
    }

    /// Has a class count on from the counters of another one.
    pub fn continue_counters(&mut self, class: usize, from: ClassCounters) {
        if let Some(class) = self.classes.get_mut(class) {
            class.counters.add(&ClassCounters { queued: 0, ..from });
        }
    }

    /// Ends the queues. Returns the frames, those of a flow in their order, and the connections that
    /// wait for space in their flow.
    pub fn into_parts(self) -> (Vec<T>, Vec<u32>) {
        let Self { mut classes, mut frames, mut waiting, .. } = self;
        let mut in_order = Vec::new();
        for class in &mut classes {
            while let Some((_, queued)) = class.flows.pop(&mut frames) {
                in_order.push(queued.value);
            }
        }
        (in_order, waiting.drain().collect())
    }

    /// Removes all frames, in no particular order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.frames.drain().map(|queued| queued.value)
    }

    /// Number of frames that memory was allocated for.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.frames.capacity()
    }
}
