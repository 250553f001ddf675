//! Change of the attach mode while the device is open.
//!
//! The kernel attaches a program in one mode only, so between the two the interface has no program.
//! A packet socket receives the frames of this time. The kernel takes some tens of milliseconds for
//! all of it: a thread of its own waits for that.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use tidegate_memory::Arena;

use super::config::TargetInterface;
use super::link::XdpLink;
use super::program::SteeringProgram;
use super::streams::{Mode, StreamMonitor, TrafficTotals};
use super::{Steering, SteeringRule};
use crate::interface_settings::namespace_cookie;
use crate::netlink::NetdevSocket;
use crate::packet::{self, PacketConfig, PacketDevice, PacketReception};
use crate::{Burst, Device, DeviceCounters};

/// Received frames between two looks at the clock.
const FRAMES_PER_CHECK: usize = 64;
/// Time between two attempts to attach the program while another process has the interface.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Result of a change.
#[derive(Default)]
pub(super) struct ChangedMode {
    /// Link of the program; `None` if the kernel refuses every mode.
    link: Option<XdpLink>,
    /// NAPI instances of the interface, which change with the mode.
    pub(super) napis: Vec<u32>,
}

/// Changes the attach mode of the program by what the device moves.
pub(super) struct ModeSwitch {
    interface_index: u32,
    /// Network namespace of the interface, by its cookie.
    namespace: u64,
    /// Rules for which the interim device receives.
    addresses: Vec<SteeringRule>,
    monitor: StreamMonitor,
    unchecked_frames: usize,
    /// Receives while no program is attached.
    interim: PacketDevice,
    reception: Arc<PacketReception>,
    netdev: Arc<NetdevSocket>,
    /// Change under way.
    change: Option<JoinHandle<ChangedMode>>,
    /// The interim device may have frames.
    drains: bool,
    /// Time of the next attempt, after the kernel has refused every mode.
    retry_at: Option<Instant>,
}

impl ModeSwitch {
    /// Prepares changes; `None` where the mode is not to change: the device is no veth, its frames
    /// are not those of own addresses, or the kernel forwards packets to other hosts' addresses.
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
        let interim = PacketDevice::open_stopped(&config, arena).ok()?;
        Some(Self {
            interface_index: target.index,
            namespace: namespace_cookie().ok()?,
            addresses: steering.rules.clone(),
            monitor: StreamMonitor::new(Instant::now()),
            unchecked_frames: 0,
            reception: Arc::new(interim.reception().ok()?),
            interim,
            netdev: Arc::new(NetdevSocket::open().ok()?),
            change: None,
            drains: false,
            retry_at: None,
        })
    }

    /// Counts received frames. Returns true from time to time: [`ModeSwitch::check`] is due.
    #[inline]
    pub(super) fn is_due(&mut self, received: usize) -> bool {
        self.unchecked_frames += received;
        if self.unchecked_frames < FRAMES_PER_CHECK && self.retry_at.is_none() {
            return false;
        }
        self.unchecked_frames = 0;
        self.change.is_none() && self.monitor.is_due(Instant::now())
    }

    /// Begins to change the mode if the traffic so far, or `must_be_native`, asks for the other mode.
    pub(super) fn check(
        &mut self,
        program: &mut SteeringProgram,
        totals: TrafficTotals,
        must_be_native: bool,
    ) {
        let now = Instant::now();
        let Some(native) = program.link().map(XdpLink::native) else {
            if self.retry_at.is_some_and(|at| now >= at) {
                self.begin(program, Mode::Native);
            }
            return;
        };
        let mode = if native { Mode::Native } else { Mode::Generic };
        let mut next = self.monitor.next_mode(mode, totals, now);
        if must_be_native || program.steering().rules != self.addresses {
            next = Mode::Native;
        }
        if next != mode {
            self.begin(program, next);
        }
    }

    fn begin(&mut self, program: &mut SteeringProgram, mode: Mode) {
        // In another namespace the number is that of another interface.
        if namespace_cookie().ok() != Some(self.namespace) {
            return self.monitor.keep_native();
        }
        let Ok(program_fd) = program.fd().and_then(|fd| fd.try_clone_to_owned()) else { return };
        let (reception, netdev) = (self.reception.clone(), self.netdev.clone());
        let (index, link) = (self.interface_index, program.take_link());
        let change = move || {
            let link = change_mode(&reception, link, &program_fd, index, mode);
            let napis = netdev.napis(index).unwrap_or_default();
            ChangedMode { link, napis: napis.into_iter().map(|napi| napi.id).collect() }
        };
        // Without a thread, the interface is tried again later.
        let thread = thread::Builder::new().name("tg-xdp-mode".into()).spawn(change);
        self.retry_at = thread.is_err().then(|| Instant::now() + RETRY_INTERVAL);
        (self.change, self.drains) = (thread.ok(), true);
    }

    /// True while the interim device may have frames.
    #[inline]
    pub(super) fn is_changing(&self) -> bool {
        self.drains
    }

    /// Receives the frames of the time without a program. Returns the number of frames.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn receive(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        self.interim.receive(arena, burst, quota)
    }

    /// Result of the change if it has ended: the program has its link again.
    pub(super) fn poll_change(&mut self, program: &mut SteeringProgram) -> Option<ChangedMode> {
        match &self.change {
            Some(change) if change.is_finished() => self.finish(program),
            _ => None,
        }
    }

    /// Begins to measure the traffic anew, with this traffic so far.
    pub(super) fn restart(&mut self, totals: TrafficTotals) {
        self.monitor.restart(totals, Instant::now());
    }

    /// Waits for the end of the change under way.
    pub(super) fn finish(&mut self, program: &mut SteeringProgram) -> Option<ChangedMode> {
        let mut changed = self.change.take()?.join().unwrap_or_default();
        match changed.link.take() {
            Some(link) => program.set_link(link),
            None => self.retry_at = Some(Instant::now() + RETRY_INTERVAL),
        }
        Some(changed)
    }

    /// Records that the interim device has no frames left.
    pub(super) fn on_drained(&mut self) {
        self.drains = self.change.is_some() || self.retry_at.is_some();
    }

    /// Descriptor that is readable while the interim device has frames.
    pub(super) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.interim.wake_fd()
    }

    /// Traffic of the interim device so far.
    pub(super) fn counters(&mut self) -> DeviceCounters {
        self.interim.counters()
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

/// Detaches the program and attaches it in another mode, or in the former if the kernel refuses.
fn change_mode(
    reception: &PacketReception,
    link: Option<XdpLink>,
    program: &OwnedFd,
    interface_index: u32,
    mode: Mode,
) -> Option<XdpLink> {
    leave_network_core();
    if reception.start().is_err() {
        return link;
    }
    if link.is_some_and(|link| link.detach().is_err()) {
        return None;
    }
    let attach = |native| XdpLink::create(program.as_fd(), interface_index, native).ok();
    let native = mode == Mode::Native;
    let link = attach(native).or_else(|| attach(!native))?;
    // On failure the socket goes on to receive nothing: the program takes its frames.
    let _ = reception.stop();
    Some(link)
}

/// Lets the calling thread run on every processor, like an ordinary program's. Errors are ignored.
fn leave_network_core() {
    let mut every_processor = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| every_processor.set(cpu));
    let _ = rustix::thread::sched_setaffinity(None, &every_processor);
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
            assert!(device.mode_switch.is_some());
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

        fn switch(&mut self) -> &mut ModeSwitch {
            self.device.mode_switch.as_mut().unwrap()
        }

        fn begin(&mut self, mode: Mode) {
            let XdpDevice { mode_switch, program, .. } = &mut self.device;
            self.pair.left.run(|| mode_switch.as_mut().unwrap().begin(program, mode));
        }

        fn check(&mut self, totals: TrafficTotals) {
            let XdpDevice { mode_switch, program, .. } = &mut self.device;
            self.pair.left.run(|| mode_switch.as_mut().unwrap().check(program, totals, false));
        }

        fn is_native(&self) -> Option<bool> {
            self.device.program.link().map(XdpLink::native)
        }

        /// Sends a datagram to each address until one of them arrives.
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
    }

    #[test]
    fn frames_arrive_in_both_modes_and_during_a_change() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        let start = Instant::now();
        while fixture.switch().counters().received == 0 {
            assert!(start.elapsed() < TIMEOUT, "the interim device receives no frame");
            for mode in [Mode::Generic, Mode::Native] {
                fixture.exchange();
                fixture.begin(mode);
                while fixture.switch().is_changing() {
                    fixture.exchange();
                }
                assert_eq!(fixture.is_native(), Some(mode == Mode::Native));
            }
        }
        let Fixture { device, mut arena, .. } = fixture;
        device.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
    }

    #[test]
    fn device_receives_while_another_program_has_the_interface() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        drop(fixture.device.program.take_link());
        let other = super::super::open::load().unwrap();
        let index = fixture.switch().interface_index;
        let attach = || XdpLink::create(other.fd().unwrap(), index, true).unwrap();
        let link = fixture.pair.left.run(attach);
        fixture.begin(Mode::Native);
        while fixture.switch().change.is_some() {
            fixture.exchange();
        }
        assert_eq!(fixture.is_native(), None);
        fixture.exchange();
        drop(link);
        let start = Instant::now();
        while fixture.switch().is_changing() {
            assert!(start.elapsed() < TIMEOUT, "the program is not attached again");
            fixture.exchange();
            let totals = fixture.device.queues.traffic_totals();
            fixture.check(totals);
        }
        assert!(fixture.is_native().is_some());
    }

    #[test]
    fn rules_of_ports_keep_the_mode() {
        if !can_create_namespaces() {
            return;
        }
        let mut fixture = Fixture::new();
        let rule = SteeringRule::Port {
            protocol: crate::xdp::TransportProtocol::Udp,
            address: None,
            port: PORT + 1,
        };
        fixture.device.steer(rule).unwrap();
        let mut totals = TrafficTotals::default();
        for _ in 0..10 {
            totals.arrived_frames += 1_000_000;
            totals.received_bytes += 1_500_000_000;
            fixture.check(totals);
        }
        assert!(!fixture.switch().is_changing());
    }

    /// A kernel that forwards would send frames for own addresses back into the network.
    #[test]
    fn forwarding_interface_keeps_its_mode() {
        if !can_create_namespaces() {
            return;
        }
        let pair = VethPair::new(1);
        let is_forwarding = || pair.left.run(|| is_forwarding(pair.left.interface));
        assert!(!is_forwarding());
        let path = format!("net.ipv6.conf.{}.forwarding=1", pair.left.interface);
        assert!(pair.left.command("sysctl").args(["-q", &path]).status().unwrap().success());
        assert!(is_forwarding());
    }
}
