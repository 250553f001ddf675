//! Loopback frames do not use the receive quota of the wire.

use std::net::{IpAddr, SocketAddr};

use tidegate_device::mem::{MemConfig, MemDevice, wire};
use tidegate_engine::{Engine, NetConfig, StepResult, open};
use tidegate_gate::{Config, Quota, Settings};
use tidegate_stack::{UdpId, UdpOptions};

const QUOTA_PACKETS: u32 = 4;

fn engine(port: MemDevice, address: &str) -> Engine {
    let gate = Config::default().receive_quota(Quota::Packets(QUOTA_PACKETS));
    let config = NetConfig::new(port).address(address.parse().unwrap()).seed([3; 16]);
    open(config.gate(Settings::new(gate).unwrap())).unwrap().0
}

fn bind(engine: &mut Engine, local: SocketAddr) -> UdpId {
    engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap()
}

fn send(engine: &mut Engine, from: UdpId, to: SocketAddr) {
    let (stack, arena, now_ns) = engine.parts();
    stack.udp_send(now_ns, arena, from, Some(to), None, b"x").unwrap();
}

#[test]
fn loopback_does_not_starve_the_wire() {
    for [own, peer] in [["10.0.0.1/24", "10.0.0.2/24"], ["fd00::1/64", "fd00::2/64"]] {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let (mut host, mut other) = (engine(near, own), engine(far, peer));
        let [own, peer]: [IpAddr; 2] =
            [own, peer].map(|cidr| cidr.split('/').next().unwrap().parse().unwrap());
        let wired = SocketAddr::new(own, 1);
        let (by_wire, by_itself) =
            (bind(&mut host, wired), bind(&mut host, SocketAddr::new(own, 2)));
        let sender = bind(&mut other, SocketAddr::new(peer, 1));
        // The first datagram resolves the neighbours.
        send(&mut other, sender, wired);
        for _ in 0..10_000 {
            other.poll().unwrap();
            host.poll().unwrap();
            if host.stack().udp_queue_len(by_wire) > 0 {
                break;
            }
        }
        assert_eq!(host.stack().udp_queue_len(by_wire), 1, "{own}");
        send(&mut other, sender, wired);
        other.flush().unwrap();
        for _ in 0..3 * QUOTA_PACKETS {
            send(&mut host, by_itself, SocketAddr::new(own, 2));
        }
        host.read_clock();
        host.gate().on_all_ready();
        // One turn of each ring.
        let mut received = 0;
        while received == 0 {
            match host.step().unwrap() {
                StepResult::Served(frames) => received = frames,
                other => panic!("no frame received: {other:?}"),
            }
        }
        assert_eq!(received, QUOTA_PACKETS as usize, "a full quota");
        assert_eq!(host.stack().udp_queue_len(by_itself), QUOTA_PACKETS as usize);
        assert_eq!(host.stack().udp_queue_len(by_wire), 2, "the wire was starved");
        assert!(host.has_loopback() && host.prepare_sleep().unwrap().is_none(), "must not sleep");
    }
}
