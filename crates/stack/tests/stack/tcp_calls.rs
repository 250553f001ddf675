//! TCP by its calls: two stacks on a wire without faults, driven by hand.

use std::net::SocketAddr;

use tidegate_stack::{
    Config, Event, Shutdown, TcpError, TcpId, TcpListenerId, TcpOptions, TcpState,
};

use crate::kit::{Family, Host, SECOND_NS, both, config, mac};

const PORT: u16 = 80;

/// Host 1, which connects, and host 2, which listens.
struct Pair {
    a: Host,
    b: Host,
    listener: TcpListenerId,
    to: SocketAddr,
}

impl Pair {
    fn new(family: Family, configs: [Config; 2]) -> Self {
        let [mut a, mut b] = configs.map(Host::quiet);
        for (host, other) in [(&mut a, 2), (&mut b, 1)] {
            let Host { stack, arena, now_ns } = host;
            stack.set_neighbour(*now_ns, family.host(other), Some(mac(other)), arena);
        }
        let to = SocketAddr::new(family.host(2), PORT);
        let listener = b.stack.tcp_listen(to, 16, TcpOptions::default()).unwrap();
        Self { a, b, listener, to }
    }

    /// Both ends of a new connection.
    fn connect(&mut self) -> (TcpId, TcpId) {
        let Host { stack, arena, now_ns } = &mut self.a;
        let client = stack.tcp_connect(*now_ns, arena, None, self.to, TcpOptions::default());
        self.carry();
        (client.unwrap(), self.b.stack.tcp_accept(self.listener).unwrap())
    }

    /// Brings everything that was sent to the other side, until there is no
    /// more.
    fn carry(&mut self) {
        loop {
            let (from_a, from_b) = (self.a.sent(), self.b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            from_a.iter().for_each(|bytes| self.b.feed(bytes));
            from_b.iter().for_each(|bytes| self.a.feed(bytes));
        }
    }

    /// Lets time pass for both, timer by timer, and carries what is sent.
    fn pass(&mut self, ns: u64) {
        let end_ns = self.a.now_ns + ns;
        loop {
            self.carry();
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

fn send(host: &mut Host, id: TcpId, data: &[u8]) -> Result<usize, TcpError> {
    host.stack.tcp_send(host.now_ns, &mut host.arena, id, data)
}

fn receive(host: &mut Host, id: TcpId) -> Result<Vec<u8>, TcpError> {
    let mut buf = vec![0; 1 << 20];
    let len = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf)?;
    buf.truncate(len);
    Ok(buf)
}

/// What waits in our own queue is not lost, so no time-out may count it.
#[test]
fn a_full_transmit_queue_gives_no_connection_up() {
    both(|family| {
        let mut small = config(1);
        small.limits.transmit_frames = 4;
        let mut pair = Pair::new(family, [small, config(2)]);
        let ends = [pair.connect(), pair.connect(), pair.connect()];
        for (client, _) in ends {
            assert_eq!(send(&mut pair.a, client, b"request"), Ok(7));
        }
        // For a minute the port takes nothing.
        let end_ns = pair.a.now_ns + 60 * SECOND_NS;
        while let Some(due_ns) = pair.a.stack.next_timeout().filter(|&due_ns| due_ns < end_ns) {
            pair.a.now_ns = pair.a.now_ns.max(due_ns);
            pair.a.stack.handle_timeout(pair.a.now_ns, &mut pair.a.arena);
        }
        pair.b.now_ns = pair.a.now_ns;
        pair.pass(SECOND_NS);
        for (client, server) in ends {
            assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::Established));
            assert_eq!(receive(&mut pair.b, server), Ok(b"request".to_vec()));
        }
    });
}

/// A byte far ahead takes memory for itself only, and whoever does not read
/// leaves memory to the others.
#[test]
fn readers_who_do_not_read_leave_memory_to_others() {
    both(|family| {
        let mut small = config(2);
        small.limits.tcp_buffer_bytes = 1 << 20;
        let mut pair = Pair::new(family, [config(1), small]);
        let stuck = [pair.connect(), pair.connect()];
        for (client, _) in stuck {
            assert_eq!(send(&mut pair.a, client, &[1; 1 << 20]), Ok(1 << 20));
        }
        pair.pass(20 * SECOND_NS);
        let held = pair.b.stack.tcp_memory_used();
        assert!((3 << 18..7 << 17).contains(&held), "{held} bytes");
        let (client, server) = pair.connect();
        for _ in 0..20 {
            assert_eq!(send(&mut pair.a, client, &[2; 10_000]), Ok(10_000));
            pair.pass(SECOND_NS);
            assert_eq!(receive(&mut pair.b, server), Ok(vec![2; 10_000]));
            assert_eq!(send(&mut pair.b, server, &[3; 10_000]), Ok(10_000));
            pair.pass(SECOND_NS);
            assert_eq!(receive(&mut pair.a, client), Ok(vec![3; 10_000]));
        }
        // When they read at last, everything is there.
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
                pair.pass(SECOND_NS);
            }
        }
    });
}

/// Who found no memory to write to is told when there is some.
#[test]
fn writers_wait_for_memory() {
    both(|family| {
        let mut small = config(1);
        small.limits.tcp_buffer_bytes = 4 * 2048;
        let mut pair = Pair::new(family, [small, config(2)]);
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
        pair.pass(SECOND_NS);
        assert_eq!(receive(&mut pair.b, reader).map(|data| data.len()), Ok(4 * 2048));
        assert!(pair.a.events().contains(&Event::TcpWritable(second)));
        assert_eq!(send(&mut pair.a, second, b"x"), Ok(1));
    });
}

/// Both with the SYN remembered and with a cookie instead.
#[test]
fn a_peer_is_confirmed_by_a_finished_handshake_and_nothing_else() {
    for half_open in [16, 0] {
        both(|family| {
            let mut server = config(2);
            server.limits.tcp_half_open = half_open;
            let mut pair = Pair::new(family, [config(1), server]);
            let confirmed = |host: &mut Host| {
                let is_it = |event: &Event| matches!(event, Event::PeerConfirmed(_));
                host.events().into_iter().filter(is_it).collect::<Vec<_>>()
            };
            pair.connect();
            assert_eq!(confirmed(&mut pair.b), [], "nobody has asked");
            pair.b.stack.tell_confirmed_peers();
            let Host { stack, arena, now_ns } = &mut pair.a;
            stack.tcp_connect(*now_ns, arena, None, pair.to, TcpOptions::default()).unwrap();
            // The SYN alone.
            pair.a.sent().iter().for_each(|bytes| pair.b.feed(bytes));
            assert_eq!(confirmed(&mut pair.b), []);
            pair.carry();
            assert_eq!(confirmed(&mut pair.b), [Event::PeerConfirmed(family.host(1))]);
            pair.pass(SECOND_NS);
            assert_eq!(confirmed(&mut pair.b), [], "once");
        });
    }
}

#[test]
fn listeners_that_agree_share_a_port() {
    both(|family| {
        let mut pair = Pair::new(family, [config(1), config(2)]);
        let to = SocketAddr::new(family.host(2), 81);
        let shared = TcpOptions { reuse_port: true, ..TcpOptions::default() };
        let alone = TcpOptions::default();
        let first = pair.b.stack.tcp_listen(to, 30, shared).unwrap();
        let foreign = TcpOptions { party: 1, ..shared };
        assert_eq!(pair.b.stack.tcp_listen(to, 30, foreign), Err(TcpError::AddressInUse(to)));
        assert_eq!(pair.b.stack.tcp_listen(to, 30, alone), Err(TcpError::AddressInUse(to)));
        assert_eq!(
            pair.b.stack.tcp_listen(pair.to, 30, shared),
            Err(TcpError::AddressInUse(pair.to))
        );
        let second = pair.b.stack.tcp_listen(to, 30, shared).unwrap();
        pair.to = to;
        let dial = |pair: &mut Pair, count| {
            for _ in 0..count {
                let Host { stack, arena, now_ns } = &mut pair.a;
                stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap();
                pair.carry();
            }
            [first, second].map(|listener| pair.b.stack.tcp_acceptable(listener))
        };
        let [at_first, at_second] = dial(&mut pair, 40);
        assert_eq!(at_first + at_second, 40);
        assert!(at_first >= 10 && at_second >= 10, "{at_first} and {at_second}");
        // A full queue passes on.
        assert_eq!(dial(&mut pair, 20), [30, 30]);
        let Host { stack, arena, now_ns } = &mut pair.b;
        stack.tcp_close_listener(*now_ns, arena, first);
        for _ in 0..5 {
            stack.tcp_accept(second).unwrap();
        }
        pair.carry();
        assert_eq!(dial(&mut pair, 5), [0, 30]);
    });
}

/// RFC 6191 section 2, from the side that connects.
#[test]
fn a_connection_may_begin_where_one_is_in_time_wait() {
    both(|family| {
        let mut pair = Pair::new(family, [config(1), config(2)]);
        let local = SocketAddr::new(family.host(1), 4000);
        let dial = |pair: &mut Pair| {
            let Host { stack, arena, now_ns } = &mut pair.a;
            let options = TcpOptions::default();
            let client = stack.tcp_connect(*now_ns, arena, Some(local), pair.to, options)?;
            pair.carry();
            Ok((client, pair.b.stack.tcp_accept(pair.listener).unwrap()))
        };
        let (client, server) = dial(&mut pair).unwrap();
        for (host, id) in [(&mut pair.a, client), (&mut pair.b, server)] {
            host.stack.tcp_shutdown(host.now_ns, &mut host.arena, id, Shutdown::Write).unwrap();
        }
        let Host { stack, arena, now_ns } = &mut pair.b;
        stack.tcp_close(*now_ns, arena, server);
        pair.carry();
        assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::TimeWait));
        assert_eq!(dial(&mut pair), Err(TcpError::AddressInUse(local)));
        pair.pass(SECOND_NS);
        let (again, server) = dial(&mut pair).unwrap();
        assert_eq!(pair.a.stack.tcp_state(client), Some(TcpState::Closed));
        assert_eq!(send(&mut pair.a, again, b"again"), Ok(5));
        pair.carry();
        assert_eq!(receive(&mut pair.b, server), Ok(b"again".to_vec()));
    });
}
