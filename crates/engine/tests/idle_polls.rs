//! A round for a thread with other work: the device does not poll for long, and what waits to be
//! sent goes first.

use std::io;
use std::sync::{Arc, Mutex};

use tidegate_device::mem::{MemConfig, wire};
use tidegate_device::{Burst, Capabilities, Device, DeviceCounters};
use tidegate_engine::{CpuContention, Engine, NetConfig, open};
use tidegate_memory::Arena;
use tidegate_stack::UdpOptions;

/// Call of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Receive {
        may_poll: bool,
    },
    /// Transmission of some frames.
    Transmit,
}

/// Device that records the calls of its engine.
struct RecordingDevice {
    device: Box<dyn Device>,
    may_poll: bool,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Device for RecordingDevice {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.calls.lock().unwrap().push(Call::Receive { may_poll: self.may_poll });
        self.device.receive(arena, burst, quota)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.may_poll = allowed;
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        if !burst.is_empty() {
            self.calls.lock().unwrap().push(Call::Transmit);
        }
        self.device.transmit(arena, burst)
    }

    fn counters(&mut self) -> DeviceCounters {
        self.device.counters()
    }
}

/// Engine with this address, and the calls that its device gets.
fn open_recorded(address: &str) -> (Engine, Arc<Mutex<Vec<Call>>>) {
    let (device, _) = wire(&MemConfig::default()).unwrap();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&calls);
    let config =
        NetConfig::new(device).address(address.parse().unwrap()).wrap(Box::new(move |device| {
            Ok(Box::new(RecordingDevice { device, may_poll: true, calls: recorded }))
        }));
    let (mut engine, _) = open(config).unwrap();
    // Announcements of the address.
    engine.poll().unwrap();
    engine.flush().unwrap();
    calls.lock().unwrap().clear();
    (engine, calls)
}

const ADDRESSES: [&str; 2] = ["192.0.2.1/24", "2001:db8::1/64"];

#[test]
fn brief_round_allows_no_idle_polls() {
    for address in ADDRESSES {
        let (mut engine, calls) = open_recorded(address);
        engine.poll_briefly().unwrap();
        engine.poll().unwrap();
        let mut receives = calls.lock().unwrap().clone();
        receives.retain(|call| *call != Call::Transmit);
        assert_eq!(receives, [false, true].map(|may_poll| Call::Receive { may_poll }));
    }
}

#[test]
fn no_idle_polls_beside_a_cpu_bound_thread() {
    for address in ADDRESSES {
        let (mut engine, calls) = open_recorded(address);
        engine.on_cpu_contention(CpuContention { is_cpu_bound: true });
        engine.poll().unwrap();
        let calls = calls.lock().unwrap();
        assert!(calls.contains(&Call::Receive { may_poll: false }), "{calls:?}");
        assert!(!calls.contains(&Call::Receive { may_poll: true }), "{calls:?}");
    }
}

#[test]
fn frames_leave_before_the_device_may_poll() {
    for (address, remote) in ADDRESSES.into_iter().zip(["192.0.2.2:9", "[2001:db8::2]:9"]) {
        let (mut engine, calls) = open_recorded(address);
        let (stack, arena, now_ns) = engine.parts();
        let local = address.split('/').next().unwrap();
        let local = std::net::SocketAddr::new(local.parse().unwrap(), 7);
        let socket = stack.udp_bind(local, UdpOptions::default()).unwrap();
        // The neighbour is unknown: a request for its link-layer address waits to be sent.
        let to = Some(remote.parse().unwrap());
        stack.udp_send(now_ns, arena, socket, to, None, b"x").unwrap();
        engine.poll().unwrap();
        let calls = calls.lock().unwrap();
        assert_eq!(calls.first(), Some(&Call::Transmit), "{calls:?}");
        assert!(calls.contains(&Call::Receive { may_poll: true }), "{calls:?}");
    }
}
