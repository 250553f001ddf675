//! Segmentation by a DPDK device, opened in the process of the test.
//!
//! The only test of its file: drivers of DPDK change the environment while it starts, under programs
//! that other tests would start at that moment.

#![cfg(feature = "dpdk")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::Command;
use std::time::Duration;

use support::{SERVER_V4, SERVER_V6};
use tidegate::device::dpdk::DpdkConfig;
use tidegate::{FrameSize, Net, NetConfig, TcpListener};
use tidegate_lab::testbed::netns::Namespace;
/// A stream to the kernel, on one connection of each family. The `net_tap` driver segments
/// IPv4 only; segments that it does not cut reach the kernel as one packet.
#[test]
fn device_segments_tcp_streams() {
    if !support::is_root("dpdk_segmentation") {
        return;
    }
    Namespace::new("cut").unwrap().enter(check_tso_streams).unwrap();
}

fn check_tso_streams() {
    let device: DpdkConfig = "net_tap_stream,iface=tgstream".parse().unwrap();
    let config = NetConfig::new(device.segmentation(true))
        .address("10.9.0.2/24".parse().unwrap())
        .address("fd00:9::2/64".parse().unwrap())
        .frames(512, FrameSize::K64)
        .hugepages(false);
    let net = Net::open(config).unwrap();
    assert!(net.capabilities().segmentation, "{}", net.capabilities().detail);
    for address in [&["10.9.0.1/24"][..], &["fd00:9::1/64", "nodad"]] {
        let mut ip = Command::new("ip");
        ip.args(["address", "add", "dev", "tgstream"]).args(address);
        assert!(ip.status().unwrap().success());
    }
    let data: Vec<u8> = (0..4_000_000_u32).map(|at| (at % 251) as u8).collect();
    let packets = || {
        let path = "/sys/class/net/tgstream/statistics/rx_packets";
        std::fs::read_to_string(path).unwrap().trim().parse::<usize>().unwrap()
    };
    let (v4, v6) = (SERVER_V4, SERVER_V6);
    // The kernel advertises the MSS, full-sized at first; below 256 bytes no TSO is used.
    for (ip, segment_bytes) in [(v4, 1448), (v6, 1448), (v4, 520), (v6, 520), (v4, 248)] {
        if segment_bytes < 1448 {
            let largest = (segment_bytes + 12).to_string();
            let route = ["route", "replace", ip, "dev", "tgstream", "advmss", &largest];
            assert!(Command::new("ip").args(route).status().unwrap().success());
        }
        let address = SocketAddr::new(ip.parse().unwrap(), 7);
        let listener = TcpListener::bind(&net, address).unwrap();
        let transmitted_frames = || net.counters().device.transmitted as usize;
        let before = (transmitted_frames(), packets());
        let received = std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                let mut received = Vec::new();
                stream.read_to_end(&mut received).unwrap();
                received
            });
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(&data).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            // The blocking read runs the stack until the kernel has received everything.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            reader.join().unwrap()
        });
        assert!(received == data, "{} bytes received", received.len());
        let (frames, received_packets) = (transmitted_frames() - before.0, packets() - before.1);
        let segments = data.len() / segment_bytes;
        assert!(
            received_packets >= segments || address.is_ipv6(),
            "{received_packets} packets for {segments} segments"
        );
        let is_segmented_by_device = frames * 2 < segments;
        assert_eq!(
            is_segmented_by_device,
            segment_bytes >= 256,
            "{frames} frames for {segments} segments"
        );
    }
}
