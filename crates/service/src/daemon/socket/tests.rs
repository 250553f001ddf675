//! Polls of a socket: their limits, and the failures that they report.

use tidegate_device::mem::{MemConfig, MemDevice, wire};
use tidegate_engine::{NetConfig, open_sharded};
use tidegate_memory::shared::Region;
use tidegate_stack::{TcpOptions, UdpOptions};

use super::*;
use crate::ipc::datagram::{DatagramHeader, record_bytes};
use crate::ipc::layout::Geometry;

const FAMILIES: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const GEOMETRY: Geometry = Geometry { sockets: 1, tcp_bytes: 1 << 20, udp_bytes: 1 << 20 };
const HANDLE: Handle = Handle { slot: 0, generation: 1 };

struct Testbed {
    engine: Engine,
    memory: SharedMemory,
    _other_end: MemDevice,
}

impl Testbed {
    fn new() -> Self {
        let (device, other_end) = wire(&MemConfig::default()).unwrap();
        let net = FAMILIES.iter().fold(NetConfig::new(device), |net, address| {
            net.address(format!("{address}/24").parse().unwrap())
        });
        let (engine, _) = open_sharded(net, 1).unwrap().stacks.remove(0);
        let region = |words| Region::reserve(words).unwrap();
        let (control, data) = (region(GEOMETRY.control_words()), region(GEOMETRY.data_words()));
        let memory = SharedMemory::new(GEOMETRY, control, data).unwrap();
        Self { engine, memory, _other_end: other_end }
    }

    /// Application's end of the stream to the daemon.
    fn writer(&self, kind: StreamKind) -> StreamOut {
        self.memory.slot(HANDLE.slot).unwrap().application_streams(kind).unwrap().1
    }
}

fn write_datagrams(writer: &mut StreamOut, to: SocketAddr, count: usize, len: usize) {
    for _ in 0..count {
        let header = DatagramHeader::to_send(len, Some(to), None);
        let mut record = header.to_bytes().to_vec();
        record.resize(record_bytes(len), 7);
        writer.write(&record).unwrap();
    }
    writer.publish();
}

#[test]
fn one_poll_takes_a_limited_number_of_datagrams() {
    let limit = 64_usize << 10;
    for len in [8, 1400, 3000] {
        let first = limit.div_ceil(len.max(MIN_DATAGRAM_COST_BYTES));
        for family in FAMILIES {
            let mut testbed = Testbed::new();
            let own = SocketAddr::new(family.parse().unwrap(), 1000);
            let stack = testbed.engine.parts().0;
            let id = stack.udp_bind(own, UdpOptions::default()).unwrap();
            let mut socket = AppSocket::udp(&testbed.memory, HANDLE, id).unwrap();
            let mut writer = testbed.writer(StreamKind::Datagrams);
            write_datagrams(&mut writer, own, 200, len);
            let polled = socket.poll(&mut testbed.engine, limit).unwrap();
            assert!(polled.has_more && !polled.device_full, "{polled:?}");
            assert_eq!(socket.payload_bytes().from_app, (first * len) as u64);
            while testbed.engine.poll().unwrap() > 0 {}
            let mut polled = polled;
            while polled.has_more {
                polled = socket.poll(&mut testbed.engine, limit).unwrap();
                while testbed.engine.poll().unwrap() > 0 {}
            }
            assert_eq!(socket.payload_bytes().from_app, (200 * len) as u64);
        }
    }
}

#[test]
fn one_poll_takes_a_limited_number_of_bytes() {
    const LIMIT: usize = 64 << 10;
    for family in FAMILIES {
        let mut testbed = Testbed::new();
        let own = SocketAddr::new(family.parse().unwrap(), 80);
        let stack = testbed.engine.parts().0;
        let listener = stack.tcp_listen(own, 1, TcpOptions::default()).unwrap();
        let (stack, arena, now_ns) = testbed.engine.parts();
        let id = stack.tcp_connect(now_ns, arena, None, own, TcpOptions::default()).unwrap();
        while testbed.engine.stack().tcp_acceptable(listener) == 0 {
            testbed.engine.poll().unwrap();
        }
        let mut socket = AppSocket::stream(&testbed.memory, HANDLE, id).unwrap();
        let mut writer = testbed.writer(StreamKind::Bytes);
        writer.write(&vec![7; 2 * LIMIT + 1]).unwrap();
        writer.publish();
        for taken in [LIMIT, 2 * LIMIT, 2 * LIMIT + 1] {
            let polled = socket.poll(&mut testbed.engine, LIMIT).unwrap();
            assert_eq!(socket.payload_bytes().from_app, taken as u64);
            assert_eq!(polled.has_more, taken <= 2 * LIMIT);
        }
    }
}

#[test]
fn failure_reaches_an_application_whose_bytes_are_unsent() {
    for family in FAMILIES {
        let mut testbed = Testbed::new();
        let own = SocketAddr::new(family.parse().unwrap(), 80);
        let stack = testbed.engine.parts().0;
        let small = TcpOptions::default().receive_buffer_bytes(4096).send_buffer_bytes(4096);
        let listener = stack.tcp_listen(own, 1, small).unwrap();
        let (stack, arena, now_ns) = testbed.engine.parts();
        let id = stack.tcp_connect(now_ns, arena, None, own, small).unwrap();
        while testbed.engine.stack().tcp_acceptable(listener) == 0 {
            testbed.engine.poll().unwrap();
        }
        let peer = testbed.engine.parts().0.tcp_accept(listener).unwrap();
        let mut socket = AppSocket::stream(&testbed.memory, HANDLE, id).unwrap();
        let mut writer = testbed.writer(StreamKind::Bytes);
        writer.write(&vec![7; 1 << 20]).unwrap();
        writer.publish();
        socket.poll(&mut testbed.engine, 1 << 20).unwrap();
        assert!(writer.unread().unwrap() > 0, "the connection has taken everything");
        let (stack, arena, now_ns) = testbed.engine.parts();
        stack.tcp_abort(now_ns, arena, peer);
        while testbed.engine.stack().tcp_state(id) != Some(tidegate_stack::TcpState::Closed) {
            testbed.engine.poll().unwrap();
        }
        socket.poll(&mut testbed.engine, 1 << 20).unwrap();
        let Status { state, error, read_closed, .. } = socket.status;
        assert_eq!(error, Some(io::ErrorKind::ConnectionReset));
        // The peer did not end its data.
        assert_eq!((state, read_closed), (SocketState::Over, false));
    }
}
