//! TCP through its API: two stacks on a lossless link, driven step by step.

use std::net::SocketAddr;

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{
    Config, Event, Shutdown, TcpError, TcpId, TcpListenerId, TcpOptions, TcpState,
};

use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};

const PORT: u16 = 80;

/// Host 1, the client, and host 2, which listens.
struct ClientServerPair {
    a: TestHost,
    b: TestHost,
    listener: TcpListenerId,
    to: SocketAddr,
}

impl ClientServerPair {
    fn new(family: Family, configs: [Config; 2]) -> Self {
        let [mut a, mut b] = configs.map(TestHost::quiet);
        for (host, other) in [(&mut a, 2), (&mut b, 1)] {
            let TestHost { stack, arena, now_ns } = host;
            stack.set_neighbour(*now_ns, family.host(other), Some(mac(other)), arena);
        }
        let to = SocketAddr::new(family.host(2), PORT);
        let listener = b.stack.tcp_listen(to, 16, TcpOptions::default()).unwrap();
        Self { a, b, listener, to }
    }

    /// Establishes a connection; returns the client's and the server's handle.
    fn connect(&mut self) -> (TcpId, TcpId) {
        let TestHost { stack, arena, now_ns } = &mut self.a;
        let client = stack.tcp_connect(*now_ns, arena, None, self.to, TcpOptions::default());
        self.deliver_frames();
        (client.unwrap(), self.b.stack.tcp_accept(self.listener).unwrap())
    }

    /// Delivers transmitted frames in both directions until neither host sends more.
    fn deliver_frames(&mut self) {
        loop {
            let (from_a, from_b) = (self.a.sent(), self.b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            from_a.iter().for_each(|bytes| self.b.feed(bytes));
            from_b.iter().for_each(|bytes| self.a.feed(bytes));
        }
    }

    /// Advances both clocks by `ns`, timer by timer, and delivers the frames sent.
    fn advance(&mut self, ns: u64) {
        let end_ns = self.a.now_ns + ns;
        loop {
            self.deliver_frames();
            let timers = [self.a.stack.next_timeout(), self.b.stack.next_timeout()];
            let due_ns = timers.into_iter().flatten().min().filter(|&due_ns| due_ns <= end_ns);
            for host in [&mut self.a, &mut self.b] {
                host.now_ns = host.now_ns.max(due_ns.unwrap_or(end_ns));
                host.stack.handle_timeout(host.now_ns, &mut host.arena);
            }
            if due_ns.is_none() {
                return;
            }
        }
    }
}

fn send(host: &mut TestHost, id: TcpId, data: &[u8]) -> Result<usize, TcpError> {
    host.stack.tcp_send(host.now_ns, &mut host.arena, id, data)
}

fn receive(host: &mut TestHost, id: TcpId) -> Result<Vec<u8>, TcpError> {
    let mut buf = vec![0; 1 << 20];
    let len = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf)?;
    buf.truncate(len);
    Ok(buf)
}

#[test]
fn info_counts_the_traffic_of_a_connection() {
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let (client, server) = pair.connect();
        assert_eq!(send(&mut pair.a, client, b"request"), Ok(7));
        assert_eq!(pair.a.sent().len(), 1, "lost on the way");
        let info = pair.a.stack.tcp_info(client).unwrap();
        assert_eq!((info.unacknowledged_bytes, info.unsent_bytes), (7, 0));
        pair.advance(SECOND_NS);
        assert_eq!(receive(&mut pair.b, server), Ok(b"request".to_vec()));
        let info = pair.a.stack.tcp_info(client).unwrap();
        let traffic = info.traffic;
        assert_eq!((traffic.acknowledged_bytes, traffic.received_bytes), (7, 0));
        // SYN, acknowledgement, data twice; SYN-ACK, acknowledgement.
        assert_eq!((traffic.sent_segments, traffic.received_segments), (4, 2));
        assert_eq!((traffic.retransmitted_segments, info.retries, info.lost_bytes), (1, 0, 0));
        let traffic = pair.b.stack.tcp_info(server).unwrap().traffic;
        assert_eq!((traffic.acknowledged_bytes, traffic.received_bytes), (0, 7));
        assert_eq!(traffic.retransmitted_segments, 0);
    });
}

/// Segments waiting in the transmit queue are not lost: no time-out counts them.
#[test]
fn full_transmit_queue_aborts_no_connection() {
    for_each_family(|family| {
        let mut small = config(1);
        small.limits.transmit_frames = 4;
        let mut pair = ClientServerPair::new(family, [small, config(2)]);
        let connections = [pair.connect(), pair.connect(), pair.connect()];
        for (client, _) in connections {
            assert_eq!(send(&mut pair.a, client, b"request"), Ok(7));
        }
        // The device accepts no frame for a minute.
        let end_ns = pair.a.now_ns + 60 * SECOND_NS;
        while let Some(due_ns) = pair.a.stack.next_timeout().filter(|&due_ns| due_ns < end_ns) {
            pair.a.now_ns = pair.a.now_ns.max(due_ns);
            pair.a.stack.handle_timeout(pair.a.now_ns, &mut pair.a.arena);
        }
        pair.b.now_ns = pair.a.now_ns;
        pair.advance(SECOND_NS);
        for (client, server) in connections {
            assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::Established));
            assert_eq!(receive(&mut pair.b, server), Ok(b"request".to_vec()));
        }
    });
}

/// Frames that arrive meanwhile do not wait for the output of many connections.
#[test]
fn one_flush_sends_a_limited_number_of_segments() {
    const CONNECTIONS: usize = 40;
    /// Initial window (RFC 6928).
    const SEGMENTS: usize = 10;
    const MAX_SEGMENTS: usize = 160;
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let large = ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false };
        pair.a.arena = Arena::new(large).unwrap();
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| pair.connect().0).collect();
        for client in clients {
            let data = vec![1; SEGMENTS * 1400];
            let sent = pair.a.stack.tcp_send_unflushed(client, &data);
            assert_eq!(sent, Ok(data.len()));
        }
        pair.a.stack.tcp_flush(pair.a.now_ns, &mut pair.a.arena);
        let mut total = 0;
        loop {
            let sent = pair.a.sent().len();
            assert!((1..=MAX_SEGMENTS).contains(&sent), "{sent} segments");
            total += sent;
            if total >= CONNECTIONS * SEGMENTS {
                break;
            }
            // The rest follows at once.
            pair.a.now_ns += 1;
            assert!(pair.a.stack.next_timeout().unwrap() <= pair.a.now_ns);
            pair.a.stack.handle_timeout(pair.a.now_ns, &mut pair.a.arena);
        }
        assert_eq!(total, CONNECTIONS * SEGMENTS);
    });
}

/// Long messages of many connections do not delay a short one by more than a flush.
#[test]
fn short_message_leaves_before_the_rest_of_long_ones() {
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let large = ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false };
        pair.a.arena = Arena::new(large).unwrap();
        let clients: Vec<_> = (0..17).map(|_| pair.connect().0).collect();
        let (short, long) = clients.split_last().unwrap();
        let mut send = |client: TcpId, bytes: usize| {
            let sent = pair.a.stack.tcp_send_unflushed(client, &vec![1; bytes]);
            assert_eq!(sent, Ok(bytes));
        };
        // Initial windows (RFC 6928).
        long.iter().for_each(|&client| send(client, 10 * 1400));
        send(*short, 100);
        pair.a.stack.tcp_flush(pair.a.now_ns, &mut pair.a.arena);
        let sent = pair.a.sent();
        assert!(sent.iter().any(|frame| frame.len() < 300), "{} frames before it", sent.len());
        assert!(sent.len() < 16 * 10);
    });
}

/// A byte far ahead of the window's start takes memory for itself only. Connections with
/// unread data leave memory to the others.
#[test]
fn idle_readers_leave_memory_to_other_connections() {
    for_each_family(|family| {
        let mut small = config(2);
        small.limits.tcp_buffer_bytes = 1 << 20;
        let mut pair = ClientServerPair::new(family, [config(1), small]);
        let stuck = [pair.connect(), pair.connect()];
        for (client, _) in stuck {
            assert_eq!(send(&mut pair.a, client, &[1; 1 << 20]), Ok(1 << 20));
        }
        pair.advance(20 * SECOND_NS);
        let used_bytes = pair.b.stack.tcp_memory_used();
        assert!((3 << 18..7 << 17).contains(&used_bytes), "{used_bytes} bytes");
        let (client, server) = pair.connect();
        for _ in 0..20 {
            assert_eq!(send(&mut pair.a, client, &[2; 10_000]), Ok(10_000));
            pair.advance(SECOND_NS);
            assert_eq!(receive(&mut pair.b, server), Ok(vec![2; 10_000]));
            assert_eq!(send(&mut pair.b, server, &[3; 10_000]), Ok(10_000));
            pair.advance(SECOND_NS);
            assert_eq!(receive(&mut pair.a, client), Ok(vec![3; 10_000]));
        }
        // Once the idle readers read, all their data is there.
        for (_, server) in stuck {
            let mut total = 0;
            while total < 1 << 20 {
                match receive(&mut pair.b, server) {
                    Ok(data) => {
                        assert!(data.iter().all(|&byte| byte == 1));
                        total += data.len();
                    }
                    Err(error) => assert_eq!(error, TcpError::WouldBlock),
                }
                pair.advance(SECOND_NS);
            }
        }
    });
}

/// A writer without buffer memory gets an event when memory is available.
#[test]
fn notifies_writer_when_memory_is_available() {
    for_each_family(|family| {
        let mut small = config(1);
        small.limits.tcp_buffer_bytes = 4 * 2048;
        let mut pair = ClientServerPair::new(family, [small, config(2)]);
        let (first, reader) = pair.connect();
        let (second, _) = pair.connect();
        let mut written = 0;
        while let Ok(len) = send(&mut pair.a, first, &[1; 2048]) {
            written += len;
        }
        assert_eq!(written, 4 * 2048);
        while pair.a.stack.poll_event().is_some() {}
        assert!(!pair.a.stack.tcp_readiness(second).writable);
        assert_eq!(send(&mut pair.a, second, b"x"), Err(TcpError::WouldBlock));
        pair.advance(SECOND_NS);
        assert_eq!(receive(&mut pair.b, reader).map(|data| data.len()), Ok(4 * 2048));
        assert!(pair.a.events().contains(&Event::TcpWritable(second)));
        assert_eq!(send(&mut pair.a, second, b"x"), Ok(1));
    });
}

/// Holds for a half-open entry and for a SYN cookie.
#[test]
fn only_finished_handshake_confirms_peer() {
    for half_open in [16, 0] {
        for_each_family(|family| {
            let mut server = config(2);
            server.limits.tcp_half_open = half_open;
            let mut pair = ClientServerPair::new(family, [config(1), server]);
            let confirmed = |host: &mut TestHost| {
                let is_confirmation = |event: &Event| matches!(event, Event::PeerConfirmed(_));
                host.events().into_iter().filter(is_confirmation).collect::<Vec<_>>()
            };
            pair.connect();
            assert_eq!(confirmed(&mut pair.b), [], "reporting is off");
            pair.b.stack.report_confirmed_peers();
            let TestHost { stack, arena, now_ns } = &mut pair.a;
            stack.tcp_connect(*now_ns, arena, None, pair.to, TcpOptions::default()).unwrap();
            // Only the SYN arrives.
            pair.a.sent().iter().for_each(|bytes| pair.b.feed(bytes));
            assert_eq!(confirmed(&mut pair.b), []);
            pair.deliver_frames();
            assert_eq!(confirmed(&mut pair.b), [Event::PeerConfirmed(family.host(1))]);
            pair.advance(SECOND_NS);
            assert_eq!(confirmed(&mut pair.b), [], "reported once");
        });
    }
}

#[test]
fn reuse_port_listeners_share_port() {
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let to = SocketAddr::new(family.host(2), 81);
        let shared = TcpOptions::default().reuse_port(true);
        let exclusive = TcpOptions::default();
        let first = pair.b.stack.tcp_listen(to, 30, shared).unwrap();
        let foreign = shared.owner(1);
        assert_eq!(pair.b.stack.tcp_listen(to, 30, foreign), Err(TcpError::AddressInUse(to)));
        assert_eq!(pair.b.stack.tcp_listen(to, 30, exclusive), Err(TcpError::AddressInUse(to)));
        assert_eq!(
            pair.b.stack.tcp_listen(pair.to, 30, shared),
            Err(TcpError::AddressInUse(pair.to))
        );
        let second = pair.b.stack.tcp_listen(to, 30, shared).unwrap();
        pair.to = to;
        let dial = |pair: &mut ClientServerPair, count| {
            for _ in 0..count {
                let TestHost { stack, arena, now_ns } = &mut pair.a;
                stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap();
                pair.deliver_frames();
            }
            [first, second].map(|listener| pair.b.stack.tcp_acceptable(listener))
        };
        let [at_first, at_second] = dial(&mut pair, 40);
        assert_eq!(at_first + at_second, 40);
        assert!(at_first >= 10 && at_second >= 10, "{at_first} and {at_second}");
        // A listener with a full backlog passes connections on to the other one.
        assert_eq!(dial(&mut pair, 20), [30, 30]);
        let TestHost { stack, arena, now_ns } = &mut pair.b;
        stack.tcp_close_listener(*now_ns, arena, first);
        for _ in 0..5 {
            stack.tcp_accept(second).unwrap();
        }
        pair.deliver_frames();
        assert_eq!(dial(&mut pair, 5), [0, 30]);
    });
}

/// RFC 6191 section 2, on the connecting side.
#[test]
fn new_connection_replaces_time_wait() {
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let local = SocketAddr::new(family.host(1), 4000);
        let dial = |pair: &mut ClientServerPair| {
            let TestHost { stack, arena, now_ns } = &mut pair.a;
            let options = TcpOptions::default();
            let client = stack.tcp_connect(*now_ns, arena, Some(local), pair.to, options)?;
            pair.deliver_frames();
            Ok((client, pair.b.stack.tcp_accept(pair.listener).unwrap()))
        };
        let (client, server) = dial(&mut pair).unwrap();
        for (host, id) in [(&mut pair.a, client), (&mut pair.b, server)] {
            host.stack.tcp_shutdown(host.now_ns, &mut host.arena, id, Shutdown::Write).unwrap();
        }
        let TestHost { stack, arena, now_ns } = &mut pair.b;
        stack.tcp_close(*now_ns, arena, server);
        pair.deliver_frames();
        assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::TimeWait));
        assert_eq!(dial(&mut pair), Err(TcpError::AddressInUse(local)));
        pair.advance(SECOND_NS);
        let (again, server) = dial(&mut pair).unwrap();
        assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::Closed));
        assert_eq!(send(&mut pair.a, again, b"again"), Ok(5));
        pair.deliver_frames();
        assert_eq!(receive(&mut pair.b, server), Ok(b"again".to_vec()));
    });
}

#[test]
fn end_of_a_closed_connection_is_reported_once() {
    for_each_family(|family| {
        let mut pair = ClientServerPair::new(family, [config(1), config(2)]);
        let connections: Vec<_> = (0..3).map(|_| pair.connect()).collect();
        let is_end = |event: &Event| matches!(event, Event::TcpEnded(_));
        let ended =
            |host: &mut TestHost| host.events().into_iter().filter(is_end).collect::<Vec<_>>();
        for (client, _) in &connections {
            let TestHost { stack, arena, now_ns } = &mut pair.a;
            stack.tcp_close(*now_ns, arena, *client);
        }
        let [(first, first_server), (second, second_server), (third, third_server)] =
            connections[..]
        else {
            unreachable!()
        };
        assert!(pair.a.stack.tcp_report_end(first) && pair.a.stack.tcp_report_end(second));
        pair.deliver_frames();
        assert_eq!(ended(&mut pair.a), [], "the peer has not closed yet");
        // The peer resets one connection, and closes the others.
        let TestHost { stack, arena, now_ns } = &mut pair.b;
        stack.tcp_abort(*now_ns, arena, first_server);
        stack.tcp_close(*now_ns, arena, second_server);
        stack.tcp_close(*now_ns, arena, third_server);
        pair.deliver_frames();
        assert_eq!(ended(&mut pair.a), [Event::TcpEnded(first)]);
        pair.advance(600 * SECOND_NS);
        assert_eq!(ended(&mut pair.a), [Event::TcpEnded(second)], "after TIME-WAIT");
        assert!([first, second, third].iter().all(|&id| !pair.a.stack.tcp_report_end(id)));
    });
}
