//! Cost of a segment of a TCP bulk transfer: two stacks in one process exchange their frames in
//! bursts.
//!
//! Count instructions as the difference of two runs:
//! `valgrind --tool=callgrind target/release/examples/tcp_bulk 10000`, and with
//! 30000. The count includes both sides, and the acknowledgements.

use std::net::SocketAddr;

use tidegate_memory::{Arena, ArenaConfig, Fifo, FrameSize};
use tidegate_stack::{Config, Stack, TcpError, TcpOptions};
use tidegate_wire::MacAddr;

const WRITE_BYTES: usize = 64 << 10;
const SEGMENT_BYTES: u64 = 1448;

fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, n])
}

fn host(n: u8) -> Stack {
    let mut config = Config::ethernet(mac(n), [n; 16]);
    config.addresses = vec![format!("10.0.0.{n}/8").parse().expect("an address")];
    Stack::new(config, 0).expect("a valid configuration")
}

fn main() {
    let text = std::env::args().nth(1);
    let segments: u64 = text.map_or(10_000, |text| text.parse().expect("a count"));
    let arena = ArenaConfig { frames: 1024, frame_size: FrameSize::K2, hugepages: false };
    let mut arena = Arena::new(arena).expect("memory");
    let (mut client, mut server) = (host(1), host(2));
    client.set_neighbour(0, [10, 0, 0, 2].into(), Some(mac(2)), &mut arena);
    server.set_neighbour(0, [10, 0, 0, 1].into(), Some(mac(1)), &mut arena);
    let server_addr = SocketAddr::from(([10, 0, 0, 2], 80));
    let listener = server.tcp_listen(server_addr, 1, TcpOptions::default()).expect("a free port");
    let connection = client
        .tcp_connect(0, &mut arena, None, server_addr, TcpOptions::default())
        .expect("space for a connection");
    let mut burst = Fifo::with_capacity(256);
    let (data, mut buf) = (vec![7; WRITE_BYTES], vec![0; WRITE_BYTES]);
    let (mut now_ns, mut received, mut accepted) = (0, 0, None);
    while received < segments * SEGMENT_BYTES {
        now_ns += 10_000;
        loop {
            match client.tcp_send_unflushed(connection, &data) {
                Ok(len) if len == data.len() => {}
                Ok(_) | Err(TcpError::WouldBlock | TcpError::NotConnected) => break,
                Err(error) => panic!("{error}"),
            }
        }
        client.handle_timeout(now_ns, &mut arena);
        client.tcp_flush(now_ns, &mut arena);
        burst.extend(client.transmit_queue().drain(..));
        server.handle_timeout(now_ns, &mut arena);
        server.handle_burst(now_ns, &mut burst, &mut arena);
        accepted = accepted.or_else(|| server.tcp_accept(listener).ok());
        while let Some(id) = accepted
            && let Ok(len) = server.tcp_recv_unflushed(now_ns, id, &mut buf)
        {
            received += len as u64;
        }
        server.tcp_flush(now_ns, &mut arena);
        burst.extend(server.transmit_queue().drain(..));
        client.handle_burst(now_ns, &mut burst, &mut arena);
        while client.poll_event().is_some() || server.poll_event().is_some() {}
    }
    println!("{received} bytes");
}
