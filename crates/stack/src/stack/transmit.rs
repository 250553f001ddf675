//! Transmit classes of a stack.

use tidegate_gate::transmit::{ClassCounters, Config, ConfigError, Program};
use tidegate_memory::{Arena, Frame};

use super::Stack;
use crate::Transport;
use crate::transmit::TransmitClasses;

impl Stack {
    /// Sorts the frames to send into classes from now on, and sends them in turn: call
    /// [`Stack::take_turns`] before [`Stack::transmit_queue`]. Frames that wait in other classes are
    /// sorted anew. Programs of ports have to be set again.
    ///
    /// # Errors
    /// [`ConfigError`] if the settings are invalid.
    pub fn set_transmit_classes(&mut self, config: &Config) -> Result<(), ConfigError> {
        config.check()?;
        let interface = &mut self.interface;
        let max_frames = (interface.limits.transmit_frames / 2).max(1);
        let key = interface.rng.hash_key();
        let mut classes = TransmitClasses::new(config, max_frames, key, interface.mtu);
        let max_tso_bytes = TransmitClasses::max_tso_bytes(config);
        interface.max_tso_bytes = interface.device_tso_bytes.min(max_tso_bytes);
        if let Some(old) = interface.transmit_classes.take() {
            let newer: Vec<Frame> = interface.transmit.drain(..).collect();
            interface.transmit.extend(classes.take_over(*old).into_iter().chain(newer));
        }
        interface.transmit_classes = Some(Box::new(classes));
        interface.sends_specially = true;
        Ok(())
    }

    /// True if frames are sent by classes.
    #[inline]
    pub fn has_transmit_classes(&self) -> bool {
        self.interface.transmit_classes.is_some()
    }

    /// Has [`Stack::sends_specially`] return true while frames are captured.
    pub fn set_captured(&mut self, is_captured: bool) {
        self.interface.sends_specially = is_captured || self.has_transmit_classes();
    }

    /// True if frames are sent by classes or captured.
    #[inline]
    pub fn sends_specially(&self) -> bool {
        self.interface.sends_specially
    }

    /// True if [`Stack::transmit_queue`] may have frames after [`Stack::take_turns`].
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.interface.transmit.is_empty() || self.has_transmit_classes()
    }

    /// Queues new frames by class, and puts the frames whose turn has come into
    /// [`Stack::transmit_queue`]. Does nothing without classes.
    pub fn take_turns(&mut self, now_ns: u64, arena: &mut Arena) {
        loop {
            self.interface.queue_by_class(now_ns, arena);
            self.interface.take_turns(now_ns, arena);
            let classes = self.interface.transmit_classes.as_deref();
            if !classes.is_some_and(TransmitClasses::has_unblocked) {
                return;
            }
            self.tcp_flush(now_ns, arena);
        }
    }

    /// Time in nanoseconds at which the next frame has its turn; `None` if none waits, or the device
    /// has to take others first.
    pub fn next_turn_ns(&self) -> Option<u64> {
        self.interface.transmit_classes.as_ref()?.next_turn_ns()
    }

    /// Names and counters of the transmit classes; none without classes.
    pub fn transmit_classes(&self) -> impl Iterator<Item = (&str, ClassCounters)> {
        let classes = self.interface.transmit_classes.as_deref().into_iter();
        classes.flat_map(TransmitClasses::counters)
    }

    /// Sets the program that has a local port: rules may name it. The port keeps its program until
    /// another one has it.
    pub fn set_port_program(&mut self, transport: Transport, port: u16, program: Program<'_>) {
        if let Some(classes) = &mut self.interface.transmit_classes {
            classes.set_port_program(transport, port, program);
        }
    }
}
