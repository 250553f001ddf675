//! Captures at an embedded stack.

mod two_hosts;

use std::sync::Arc;

use tidegate::capture::{
    CaptureDirection, CaptureLayout, CaptureReader, CaptureRequest, MAX_CAPTURES, MIN_RING_BYTES,
};
use tidegate::{DropReason, Net, UdpSocket};
use tidegate_memory::shared::Region;
use two_hosts::FAMILIES;

/// Rounds after which a packet has arrived.
const ROUNDS: usize = 1000;

fn request(number: u64) -> CaptureRequest {
    let layout = CaptureLayout::new(1, MIN_RING_BYTES).unwrap();
    let memory = Arc::new(Region::reserve(layout.words()).unwrap());
    CaptureRequest { number, filter: None, snap_bytes: 64, notifications: true, memory, layout }
}

fn run(nets: &[Net; 2]) {
    for _ in 0..ROUNDS {
        nets.iter().for_each(|net| _ = net.run_once().unwrap());
    }
}

#[test]
fn capture_has_what_became_of_packets() {
    let nets = two_hosts::open(256, |config| config);
    let [server, client] = &nets;
    for [own, peer] in FAMILIES {
        let address = |ip: &str, port| std::net::SocketAddr::new(ip.parse().unwrap(), port);
        let receiver = UdpSocket::bind(server, address(own, 7)).unwrap();
        let sender = UdpSocket::bind(client, address(peer, 7)).unwrap();
        let request = request(1);
        server.start_capture(&request, 0).unwrap();
        let mut reader = CaptureReader::new(request.layout, &request.memory, 0).unwrap();
        for port in [9, 7] {
            sender.send_to(&[0; 200], address(own, port)).unwrap();
            run(&nets);
        }
        let mut seen = Vec::new();
        while let Some(record) = reader.read().unwrap() {
            assert!(record.data.len() <= 64 && record.done_ns >= record.time_ns);
            if record.original_bytes > 200 || record.direction == CaptureDirection::Notified {
                seen.push((record.direction, record.drop_reason));
            }
        }
        let no_socket = Some(DropReason::UdpNoSocket as u16);
        let received = CaptureDirection::Received;
        // The ICMP error quotes the packet.
        seen.retain(|record| record.0 != CaptureDirection::Transmitted);
        let expected =
            [(received, no_socket), (received, None), (CaptureDirection::Notified, None)];
        assert_eq!(seen, expected);

        server.end_capture(1);
        sender.send_to(&[0; 200], address(own, 7)).unwrap();
        run(&nets);
        assert!(reader.read().unwrap().is_none(), "the capture has ended");
        assert_eq!(receiver.recv_from(&mut [0; 300]).unwrap().0, 200);
        assert_eq!(receiver.recv_from(&mut [0; 300]).unwrap().0, 200);
    }
}

#[test]
fn number_of_captures_is_limited() {
    let [server, _client] = two_hosts::open(64, |config| config);
    for number in 0..MAX_CAPTURES as u64 {
        server.start_capture(&request(number), 0).unwrap();
    }
    assert!(server.start_capture(&request(9), 0).is_err());
    server.end_capture(9);
    server.end_capture(1);
    server.start_capture(&request(9), 0).unwrap();
}
