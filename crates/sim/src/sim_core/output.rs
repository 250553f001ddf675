//! Transmission: from the output queues to the NIC.

use super::SimCore;
use crate::load::Packet;
use crate::report::DropPoint;
use crate::service::Service;
use crate::timers::Timer;

impl SimCore {
    /// Puts a packet into the output queue of a router.
    pub(super) fn forward(&mut self, packet: Packet) {
        let Service::Router(router) = &mut self.service else { return };
        if router.push_output(packet) {
            self.start_output();
        } else {
            self.count_drop(DropPoint::OutputQueue);
        }
    }

    /// Passes packets to the NIC while transmit descriptors are free.
    pub(super) fn start_output(&mut self) {
        let now_ns = self.now_ns();
        while self.nic.has_transmit_space() {
            let packet = match &mut self.service {
                // The arrival time of the stack's own packets is never used.
                Service::Udp { udp, .. } => {
                    udp.next_output().then_some(Packet { arrived_ns: now_ns, flow: 0 })
                }
                Service::Router(router) => router.output.pop_front(),
            };
            let Some(packet) = packet else { return };
            if let Some(at_ns) = self.nic.transmit(now_ns, packet) {
                self.set_timer(Timer::Transmitted, at_ns);
            }
        }
    }
}
