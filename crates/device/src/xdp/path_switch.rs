//! Change between AF_XDP and AF_PACKET while the device is open.
//!
//! While the program is attached, AF_XDP has the frames of the own addresses, else a packet socket.
//! The socket receives before the program is detached, and until it is attached again: no frame is
//! lost. The kernel takes some tens of milliseconds for each step, which a thread of its own waits
//! for.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidegate_memory::Arena;

use super::config::TargetInterface;
use super::link::XdpLink;
use super::program::SteeringProgram;
use super::streams::{ReceivePath, StreamMonitor, TrafficTotals};
use super::{Steering, SteeringRule};
use crate::affinity::run_on_every_processor;
use crate::interface_settings::{block_signals, namespace_cookie};
use crate::netlink::NetdevSocket;
use crate::packet::{self, PacketConfig, PacketDevice, PacketReception};
use crate::{Burst, Device, DeviceCounters};

/// Received frames between two looks at the clock.
const FRAMES_PER_CHECK: usize = 64;
/// Time between two attempts to attach the program while another process has the interface.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Result of a change.
#[derive(Default)]
struct ChangedPath {
    /// Link of the attached program.
    link: Option<XdpLink>,
    /// NAPI instances of the interface, which the driver makes anew for a program.
    napis: Vec<u32>,
}

/// Changes the way of received frames by what the device moves.
pub(super) struct PathSwitch {
    interface: String,
    interface_index: u32,
    /// Network namespace of the interface, by its cookie.
    namespace: u64,
    /// Rules for which the packet socket receives.
    addresses: Vec<SteeringRule>,
    monitor: StreamMonitor,
    /// Admission limits are in force, which the program applies.
    is_limited: bool,
    unchecked_frames: usize,
    packets: PacketDevice,
    reception: Arc<PacketReception>,
    netdev: Arc<NetdevSocket>,
    /// Change under way.
    change: Option<JoinHandle<ChangedPath>>,
    /// The packet socket receives, or has frames that have arrived.
    has_packets: bool,
    /// Earliest time of the next attempt to attach the program.
    attach_at: Instant,
}

impl PathSwitch {
    /// Prepares changes; `None` where AF_XDP is to keep the frames: the device is no veth of one
    /// queue, its frames are not those of own addresses, or the kernel forwards them.
    pub(super) fn open(
        target: &TargetInterface,
        steering: &Steering,
        arena: &mut Arena,
    ) -> Option<Self> {
        let is_alone = target.queues.len() == 1 && target.active_queues == 1;
        if !target.is_veth || !is_alone || steering.vlan.is_some() || is_forwarding(&target.name) {
            return None;
        }
        let addresses: Option<Vec<IpAddr>> = steering.rules.iter().map(own_address).collect();
        let addresses = addresses.filter(|addresses| !addresses.is_empty())?;
        let config =
            PacketConfig::new(&target.name).steering(packet::Steering::Addresses(addresses));
        let packets = PacketDevice::open_stopped(&config, arena).ok()?;
        let now = Instant::now();
        Some(Self {
            interface: target.name.clone(),
            interface_index: target.index,
            namespace: namespace_cookie().ok()?,
            addresses: steering.rules.clone(),
            monitor: StreamMonitor::new(now),
            is_limited: false,
            unchecked_frames: 0,
            reception: Arc::new(packets.reception().ok()?),
            packets,
            netdev: Arc::new(NetdevSocket::open().ok()?),
            change: None,
            has_packets: false,
            attach_at: now,
        })
    }

    /// Sets whether admission limits are in force.
    pub(super) fn set_limited(&mut self, limited: bool) {
        self.is_limited = limited;
    }

    /// Counts received frames. Returns true from time to time: [`PathSwitch::check`] is due.
    #[inline]
    pub(super) fn is_due(&mut self, received: usize) -> bool {
        self.unchecked_frames += received;
        if self.unchecked_frames < FRAMES_PER_CHECK {
            return false;
        }
        self.unchecked_frames = 0;
        self.change.is_none() && self.monitor.is_due(Instant::now())
    }

    /// Begins to change the way if the traffic asks for it. `totals` is that of the AF_XDP sockets,
    /// and of all that was sent.
    pub(super) fn check(&mut self, program: &mut SteeringProgram, totals: TrafficTotals) {
        let now = Instant::now();
        let path = match program.link() {
            Some(_) => ReceivePath::Xdp,
            None => ReceivePath::Packet,
        };
        let totals = self.with_packets(totals);
        let mut next = self.monitor.next_path(path, totals, now);
        if self.is_limited || !program.has_rules(&self.addresses) {
            next = ReceivePath::Xdp;
        }
        if next != path && (next == ReceivePath::Packet || now >= self.attach_at) {
            self.begin(program, next);
        }
    }

    /// Adds the frames of the packet socket.
    fn with_packets(&self, mut totals: TrafficTotals) -> TrafficTotals {
        let (frames, bytes) = self.packets.arrived();
        totals.arrived_frames += frames;
        totals.received_bytes += bytes;
        totals
    }

    fn begin(&mut self, program: &mut SteeringProgram, path: ReceivePath) {
        let detaches = path == ReceivePath::Packet;
        // In another namespace the number is that of another interface.
        let is_elsewhere = namespace_cookie().ok() != Some(self.namespace);
        if is_elsewhere || detaches && is_forwarding(&self.interface) {
            return self.monitor.keep_xdp();
        }
        let Ok(program_fd) = program.fd().and_then(|fd| fd.try_clone_to_owned()) else { return };
        let (reception, netdev) = (self.reception.clone(), self.netdev.clone());
        let index = self.interface_index;
        let (give_link, link) = mpsc::sync_channel(1);
        let change = move || {
            // Signals are for the program's own threads.
            block_signals();
            run_on_every_processor();
            let link = match path {
                ReceivePath::Packet => detach(&reception, link.recv().ok().flatten()),
                ReceivePath::Xdp => attach(&reception, &program_fd, index),
            };
            let napis = netdev.napis(index).unwrap_or_default();
            ChangedPath { link, napis: napis.into_iter().map(|napi| napi.id).collect() }
        };
        self.attach_at = Instant::now() + RETRY_INTERVAL;
        // Without a thread, the way stays as it is.
        if let Ok(thread) = thread::Builder::new().name("tg-xdp-path".into()).spawn(change) {
            (self.change, self.has_packets) = (Some(thread), true);
            let _ = give_link.send(program.take_link());
        }
    }

    /// True while the packet socket may have frames.
    #[inline]
    pub(super) fn may_have_frames(&self) -> bool {
        self.has_packets
    }

    /// Receives up to `quota` frames of the packet socket; returns their number.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn receive(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        program: &SteeringProgram,
    ) -> io::Result<usize> {
        let count = self.packets.receive(arena, burst, quota)?;
        // The program has no link while a change is under way.
        if count == 0 && quota > 0 && program.link().is_some() {
            self.has_packets = false;
        }
        Ok(count)
    }

    /// Ends a change whose thread has ended: the program has its link again if it is attached.
    /// Returns the NAPI instances of the interface.
    pub(super) fn poll_change(&mut self, program: &mut SteeringProgram) -> Option<Vec<u32>> {
        match &self.change {
            Some(change) if change.is_finished() => self.finish(program),
            _ => None,
        }
    }

    /// Waits for the end of the change under way, and ends it as [`PathSwitch::poll_change`].
    pub(super) fn finish(&mut self, program: &mut SteeringProgram) -> Option<Vec<u32>> {
        let ChangedPath { link, napis } = self.change.take()?.join().unwrap_or_default();
        if let Some(link) = link {
            program.set_link(link);
        }
        Some(napis)
    }

    /// Begins to measure the traffic anew, with this traffic of the AF_XDP sockets so far.
    pub(super) fn restart(&mut self, totals: TrafficTotals) {
        self.monitor.restart(self.with_packets(totals), Instant::now());
    }

    /// As [`Device::prepare_sleep`], for the packet socket.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn prepare_sleep(&mut self) -> io::Result<bool> {
        Ok(!self.has_packets || self.packets.prepare_sleep()?)
    }

    /// Descriptor that is readable while the packet socket has frames.
    pub(super) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.packets.wake_fd()
    }

    /// Traffic of the packet socket so far.
    pub(super) fn counters(&mut self) -> DeviceCounters {
        self.packets.counters()
    }
}

/// Address of a rule that has one of its own.
fn own_address(rule: &SteeringRule) -> Option<IpAddr> {
    match rule {
        SteeringRule::Address(address) => Some(*address),
        _ => None,
    }
}

/// True if the kernel forwards what arrives on an interface and is not for its own addresses.
fn is_forwarding(interface: &str) -> bool {
    ["ipv4", "ipv6"].into_iter().any(|family| {
        let path = format!("/proc/sys/net/{family}/conf/{interface}/forwarding");
        fs::read_to_string(path).is_ok_and(|value| value.trim() != "0")
    })
}

/// Starts to receive by the packet socket, and detaches the program. Returns the link if that is not
/// possible.
fn detach(reception: &PacketReception, link: Option<XdpLink>) -> Option<XdpLink> {
    if reception.start().is_err() {
        return link;
    }
    // On failure the link ends with its descriptor, unless another process has a copy.
    let _ = link?.detach();
    None
}

/// Attaches the program. Then the packet socket ends to receive.
fn attach(reception: &PacketReception, program: &OwnedFd, interface_index: u32) -> Option<XdpLink> {
    let link = XdpLink::create(program.as_fd(), interface_index, true).ok()?;
    // On failure the socket receives nothing all the same: the program takes its frames.
    let _ = reception.stop();
    Some(link)
}

#[cfg(test)]
#[allow(dead_code)]
#[path = "../../tests/netns/mod.rs"]
mod netns;

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, UdpSocket};

    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::netns::{FREE_ADDRESSES, RIGHT_ADDRESSES, VethPair, can_create_namespaces};
    use super::*;
    use crate::xdp::{XdpConfig, XdpDevice};

    const TIMEOUT: Duration = Duration::from_secs(20);
    const PORT: u16 = 7;

    /// Device on own addresses, and a socket of its peer for each.
    struct Fixture {
        pair: VethPair,
        arena: Arena,
        device: XdpDevice,
        clients: Vec<UdpSocket>,
        next_number: u64,
    }

    impl Fixture {
        fn new() -> Self {
            let pair = VethPair::new(1);
            let config = ArenaConfig { frames: 4096, frame_size: FrameSize::K2, hugepages: false };
            let mut arena = Arena::new(config).unwrap();
            let addresses = FREE_ADDRESSES.map(|address| address.parse::<IpAddr>().unwrap());
            let rules = addresses.map(SteeringRule::Address);
            let config = XdpConfig::new(pair.left.interface).steering(Steering::new(rules));
            let device = pair.left.run(|| XdpDevice::open(config, &mut arena)).unwrap();
            let mac = device.capabilities().mac.map(|byte| format!("{byte:02x}")).join(":");
            let clients = addresses.iter().zip(RIGHT_ADDRESSES).map(|(address, local)| {
                let local: IpAddr = local.parse().unwrap();
                pair.right.ip(&format!("neigh add {address} lladdr {mac} dev right"));
                pair.right.run(|| {
                    let socket = UdpSocket::bind(SocketAddr::new(local, 0)).unwrap();
                    socket.connect(SocketAddr::new(*address, PORT)).unwrap();
                    socket
                })
            });
            let clients = clients.collect();
            Self { pair, arena, device, clients, next_number: 0 }
        }

        fn switch(&mut self) -> &mut PathSwitch {
            self.device.path_switch.as_mut().unwrap()
        }

        /// Runs `work` with the switch on a thread of the interface's namespace.
        fn run(&mut self, work: impl FnOnce(&mut PathSwitch, &mut SteeringProgram) + Send) {
            let XdpDevice { path_switch, program, .. } = &mut self.device;
            let switch = path_switch.as_mut().unwrap();
            self.pair.left.run(|| work(switch, program));
        }

        fn check(&mut self, totals: TrafficTotals) {
            self.run(|switch, program| switch.check(program, totals));
        }

        /// Sends a datagram to each address, again and again until one of them arrives.
        fn exchange(&mut self) {
            let start = Instant::now();
            for client in &self.clients {
                self.next_number += 1;
                let number = self.next_number.to_be_bytes();
                'sent: loop {
                    assert!(start.elapsed() < TIMEOUT, "no datagram arrives");
                    client.send(&number).unwrap();
                    let mut burst = Burst::new();
                    for _ in 0..1_000 {
                        self.device.receive(&mut self.arena, &mut burst, 64).unwrap();
                        let mut arrives = false;
                        for frame in burst.drain(..) {
                            arrives |= self.arena.bytes(&frame).ends_with(&number);
                            self.arena.free(frame);
                        }
                        if arrives {
                            break 'sent;
                        }
                    }
                }
            }
        }

        /// Changes the way while datagrams are sent.
        fn change(&mut self, path: ReceivePath) {
            self.run(|switch, program| switch.begin(program, path));
            while self.switch().change.is_some() {
                self.exchange();
            }
            assert_eq!(self.device.program.link().is_some(), path == ReceivePath::Xdp);
        }
    }

    #[test]
    fn frames_arrive_on_both_ways_and_during_a_change() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        fixture.exchange();
        assert_eq!(fixture.switch().counters().received, 0);
        for _ in 0..2 {
            fixture.change(ReceivePath::Packet);
            let before = fixture.switch().counters().received;
            fixture.exchange();
            assert!(fixture.switch().counters().received > before);
            fixture.change(ReceivePath::Xdp);
            while fixture.switch().may_have_frames() {
                fixture.exchange();
            }
            let before = fixture.switch().counters().received;
            fixture.exchange();
            assert_eq!(fixture.switch().counters().received, before);
        }
        let Fixture { device, mut arena, .. } = fixture;
        device.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
    }

    #[test]
    fn packets_arrive_while_another_program_has_the_interface() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        fixture.change(ReceivePath::Packet);
        let other = super::super::open::load().unwrap();
        let index = fixture.switch().interface_index;
        let attach = || XdpLink::create(other.fd().unwrap(), index, true).unwrap();
        let link = fixture.pair.left.run(attach);
        fixture.run(|switch, program| switch.begin(program, ReceivePath::Xdp));
        while fixture.switch().change.is_some() {
            fixture.exchange();
        }
        assert!(fixture.device.program.link().is_none());
        fixture.exchange();
        link.detach().unwrap();
        fixture.switch().set_limited(true);
        let start = Instant::now();
        while fixture.device.program.link().is_none() {
            assert!(start.elapsed() < TIMEOUT, "the program is not attached again");
            fixture.exchange();
            if fixture.switch().change.is_none() {
                let totals = fixture.device.queues.traffic_totals();
                fixture.check(totals);
            }
        }
        fixture.exchange();
    }

    #[test]
    fn streams_change_the_way_unless_ports_are_steered() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        let (protocol, port) = (crate::xdp::TransportProtocol::Udp, PORT + 1);
        let rule = SteeringRule::Port { protocol, address: None, port };
        let mut totals = TrafficTotals::default();
        let mut offer_stream = |fixture: &mut Fixture| {
            for _ in 0..2 {
                totals.arrived_frames += 1_000_000_000;
                totals.received_bytes += 1_500_000_000_000;
                totals.unfilled_frames = totals.arrived_frames;
                fixture.check(totals);
            }
            fixture.switch().change.is_some()
        };
        fixture.device.steer(rule).unwrap();
        assert!(!offer_stream(&mut fixture));
        fixture.device.unsteer(&rule).unwrap();
        assert!(offer_stream(&mut fixture));
    }

    #[test]
    fn forwarding_interface_keeps_its_program() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        let path = format!("net.ipv6.conf.{}.forwarding=1", fixture.pair.left.interface);
        let mut sysctl = fixture.pair.left.command("sysctl");
        assert!(sysctl.args(["-q", &path]).status().unwrap().success());
        fixture.run(|switch, program| switch.begin(program, ReceivePath::Packet));
        assert!(fixture.switch().change.is_none());
    }
}
