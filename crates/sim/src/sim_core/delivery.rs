//! Protocol work: from a received packet to the queue of an application.

use tidegate_gate::Ring;

use super::SimCore;
use crate::load::Packet;
use crate::report::DropPoint;
use crate::router::RouterQueues;
use crate::service::Service;

impl SimCore {
    /// Cost of the protocol work on a packet, transmission included if the packet is forwarded
    /// at once.
    #[inline]
    pub(super) fn protocol_ns(&self) -> u64 {
        match &self.service {
            Service::Router(RouterQueues { filter: None, .. }) => {
                self.costs.protocol_ns + self.costs.transmit_ns
            }
            _ => self.costs.protocol_ns,
        }
    }

    /// Delivers a packet to its service after the protocol work. The stack is the real one; the
    /// cost of its work is already accounted.
    pub(super) fn deliver(&mut self, packet: Packet) {
        let clock_ns = self.clock_ns();
        match &mut self.service {
            Service::Udp { udp, inline, .. } => {
                let inline = *inline;
                let reader = udp.handle_packet(clock_ns, packet);
                let (level, capacity) = udp.level(reader);
                self.gate.on_queue_level(clock_ns, reader as u64, level, capacity);
                match level {
                    0 => {}
                    _ if inline => self.gate.on_ready(Ring::Application(0)),
                    _ => self.wake_reader(reader),
                }
                self.set_stack_timer();
                self.start_output();
            }
            Service::Router(router) => match &mut router.filter {
                Some(queue) => {
                    if !queue.push(packet) {
                        self.count_drop(DropPoint::FilterQueue);
                        return;
                    }
                    let level = queue.waiting.len() as u32;
                    self.gate.on_queue_level(clock_ns, 0, level, queue.capacity);
                    self.wake_reader(0);
                }
                None => self.forward(packet),
            },
        }
    }
}
