//! Cost of a TCP request and its echo: two stacks in one process exchange their frames in
//! bursts. Both sides do the same work, so one side is half of the cost.
//!
//! Count instructions as the difference of two runs:
//! `valgrind --tool=callgrind target/release/examples/tcp_echo 10000`, and with
//! 30000. The second argument is the number of connections (32).

use std::net::SocketAddr;

use tidegate_memory::{Arena, ArenaConfig, Fifo, FrameSize};
use tidegate_stack::{Config, Event, Stack, TcpId, TcpOptions};
use tidegate_wire::MacAddr;

const PAYLOAD_BYTES: usize = 64;
/// Number of clients that send at once.
const BURST_CLIENTS: usize = 32;

fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, n])
}

struct Hosts {
    arena: Arena,
    client: Stack,
    server: Stack,
    now_ns: u64,
    burst: Fifo<tidegate_memory::Frame>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let requests: u64 = args.next().map_or(10_000, |text| text.parse().expect("a count"));
    let connections: usize =
        args.next().map_or(BURST_CLIENTS, |text| text.parse().expect("a count"));
    let mut hosts = Hosts::new(connections);
    let clients = hosts.connect(connections);
    let mut done = 0;
    while done < requests {
        for ids in clients.chunks(BURST_CLIENTS) {
            hosts.echo_burst(ids);
            done += ids.len() as u64;
        }
    }
    println!("{done} requests and echoes");
}

impl Hosts {
    fn new(connections: usize) -> Self {
        let arena = ArenaConfig { frames: 1024, frame_size: FrameSize::K2, hugepages: false };
        let host = |n: u8| {
            let mut config = Config::ethernet(mac(n), [n; 16]);
            config.addresses = vec![format!("10.0.0.{n}/8").parse().expect("an address")];
            config.limits.tcp_connections = connections + 1;
            Stack::new(config, 0).expect("a valid configuration")
        };
        let mut arena = Arena::new(arena).expect("memory");
        let (mut client, mut server) = (host(1), host(2));
        client.set_neighbour(0, [10, 0, 0, 2].into(), Some(mac(2)), &mut arena);
        server.set_neighbour(0, [10, 0, 0, 1].into(), Some(mac(1)), &mut arena);
        Self { arena, client, server, now_ns: 0, burst: Fifo::with_capacity(256) }
    }

    fn connect(&mut self, count: usize) -> Vec<TcpId> {
        let options = TcpOptions::default().no_delay(true);
        let mut clients = Vec::new();
        let mut listener = None;
        for n in 0..count {
            // Each server port can be reached from 32,768 client ports.
            let server_addr = SocketAddr::from(([10, 0, 0, 2], 1000 + (n / 20_000) as u16));
            if n % 20_000 == 0 {
                listener =
                    Some(self.server.tcp_listen(server_addr, 64, options).expect("a free port"));
            }
            let id =
                self.client.tcp_connect(self.now_ns, &mut self.arena, None, server_addr, options);
            clients.push(id.expect("space for a connection"));
            for _ in 0..3 {
                self.exchange_frames();
            }
            self.server.tcp_accept(listener.expect("a listener")).expect("established");
            while self.client.poll_event().is_some() || self.server.poll_event().is_some() {}
        }
        clients
    }

    fn exchange_frames(&mut self) {
        let Self { arena, client, server, now_ns, burst } = self;
        *now_ns += 10_000;
        burst.extend(client.transmit_queue().drain(..));
        server.handle_timeout(*now_ns, arena);
        server.handle_burst(*now_ns, burst, arena);
        burst.extend(server.transmit_queue().drain(..));
        client.handle_timeout(*now_ns, arena);
        client.handle_burst(*now_ns, burst, arena);
    }

    fn echo_burst(&mut self, ids: &[TcpId]) {
        let request = [7; PAYLOAD_BYTES];
        for &id in ids {
            self.client
                .tcp_send_unflushed(self.now_ns, id, &request)
                .expect("space in the send buffer");
        }
        self.client.tcp_flush(self.now_ns, &mut self.arena);
        self.exchange_frames();
        while let Some(event) = self.server.poll_event() {
            if let Event::TcpReadable(id) = event {
                echo(&mut self.server, self.now_ns, id);
            }
        }
        self.server.tcp_flush(self.now_ns, &mut self.arena);
        self.exchange_frames();
        let mut answers = 0;
        while let Some(event) = self.client.poll_event() {
            if let Event::TcpReadable(id) = event {
                let mut buf = [0; 2 * PAYLOAD_BYTES];
                let len =
                    self.client.tcp_recv_unflushed(self.now_ns, id, &mut buf).expect("an answer");
                assert_eq!(&buf[..len], &request);
                answers += 1;
            }
        }
        assert_eq!(answers, ids.len());
    }
}

fn echo(server: &mut Stack, now_ns: u64, id: TcpId) {
    let mut buf = [0; 2 * PAYLOAD_BYTES];
    let len = server.tcp_recv_unflushed(now_ns, id, &mut buf).expect("a request");
    assert_eq!(server.tcp_send_unflushed(now_ns, id, &buf[..len]), Ok(len));
}
