//! The AF_XDP device against the kernel, over veth pairs in network namespaces.

mod early_drop;
mod errors;
#[path = "../frames/mod.rs"]
mod frames;
mod lifetime;
#[path = "../netns/mod.rs"]
mod netns;
mod steering;
mod traffic;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use netns::{
    FREE_ADDRESSES, LEFT_ADDRESSES, Namespace, RIGHT_ADDRESSES, VethPair, can_create_namespaces,
    run,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tidegate_device::admission::{self, ClassLimit, Classifier, Limits, MAX_CLASSES, RateLimit};
use tidegate_device::packet::{PacketConfig, PacketDevice};
use tidegate_device::xdp::{
    AttachMode, BusyPoll, CopyMode, LoadedProgram, RingSizes, Steering, SteeringRule,
    TransportProtocol, XdpConfig, XdpDevice, XdpError, XdpLink,
};
use tidegate_device::{Burst, Device, HandoverState};
use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_wire::DropReason;

/// Time after which a waiting test fails.
const TIMEOUT: Duration = Duration::from_secs(20);
const ECHO_PORT: u16 = 7777;

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn udp(port: u16) -> SteeringRule {
    SteeringRule::Port { protocol: TransportProtocol::Udp, address: None, port }
}

fn rules(rules: impl Into<Vec<SteeringRule>>) -> Steering {
    Steering::new(rules)
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

fn try_open(
    namespace: &Namespace,
    config: XdpConfig,
    arena: &mut Arena,
) -> Result<XdpDevice, XdpError> {
    namespace.run(|| XdpDevice::open(config, arena))
}

fn open(namespace: &Namespace, steering: Steering, arena: &mut Arena) -> XdpDevice {
    let config = XdpConfig::new(namespace.interface).steering(steering);
    try_open(namespace, config, arena).unwrap()
}

/// Calls `step` until it returns `Some`.
fn wait_until<R>(what: &str, mut step: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        if let Some(result) = step() {
            return result;
        }
        assert!(start.elapsed() < TIMEOUT, "timed out: {what}");
        std::thread::yield_now();
    }
}

/// Receives until a frame matches `wanted`; frees the others.
fn receive_frame(
    device: &mut XdpDevice,
    arena: &mut Arena,
    what: &str,
    wanted: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    let mut burst = Burst::new();
    wait_until(what, || {
        device.receive(arena, &mut burst, 1).unwrap();
        let frame = burst.pop_front()?;
        let bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        wanted(&bytes).then_some(bytes)
    })
}

fn send_frame(device: &mut XdpDevice, arena: &mut Arena, bytes: &[u8]) {
    let mut burst = Burst::from([arena.alloc_from(bytes).unwrap()]);
    wait_until("space in the transmit ring", || {
        device.transmit(arena, &mut burst).unwrap();
        burst.is_empty().then_some(())
    });
}

/// Reflects one datagram sent to [`ECHO`].
fn echo_one(device: &mut XdpDevice, arena: &mut Arena) {
    let mut frame = receive_frame(device, arena, "a datagram", |_| true);
    frames::reflect(&mut frame);
    send_frame(device, arena, &frame);
}

/// Sends datagrams from the kernel of the right side and checks the echoes of the device.
fn check_echo(pair: &VethPair, device: &mut XdpDevice, arena: &mut Arena) {
    for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        for round in 0..5_u8 {
            socket.send_to(&[round; 100], at(remote, ECHO_PORT)).unwrap();
            echo_one(device, arena);
            let mut answer = [0; 200];
            let (len, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!((&answer[..len], from), (&[round; 100][..], at(remote, ECHO_PORT)));
        }
    }
}

/// Checks that the kernels of both sides exchange TCP data, in both families.
fn check_kernel_tcp(pair: &VethPair) {
    for remote in LEFT_ADDRESSES {
        let listener = pair.left.run(|| TcpListener::bind(at(remote, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let mut client = pair.right.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        client.write_all(b"still here").unwrap();
        let mut received = [0; 10];
        server.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"still here");
    }
}

fn is_attached(namespace: &Namespace) -> bool {
    let interface = namespace.interface;
    let output = run(namespace.command("ip").args(["-d", "link", "show", "dev", interface]));
    output.contains("xdp")
}

/// Waits until no XDP program is attached: a child process that another test is starting may hold
/// this process's descriptors for a moment.
fn wait_until_detached(namespace: &Namespace, what: &str) {
    wait_until(what, || (!is_attached(namespace)).then_some(()));
}

fn setting(namespace: &Namespace, name: &str) -> u64 {
    let path = format!("/sys/class/net/{}/{name}", namespace.interface);
    run(namespace.command("cat").arg(path)).trim().parse().unwrap()
}
