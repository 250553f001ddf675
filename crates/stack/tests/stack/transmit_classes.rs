//! Transmit classes: order, rates and losses of the frames of a stack whose link is slower than its
//! senders.

use std::net::SocketAddr;

use tidegate_gate::transmit::{Class, Config, Match};
use tidegate_stack::{TcpError, TcpId, TcpListenerId, TcpOptions, UdpOptions};
use tidegate_wire::{DropReason, Ipv4Header, Ipv6Header};

use crate::kit::{Family, HostPair, SECOND_NS, for_each_family, mac};

const LINK_BPS: u64 = 100_000_000;
const MS: u64 = 1_000_000;
const BULK_PORT: u16 = 5001;
const SMALL_PORT: u16 = 7;
const LINK_BYTES: usize = 14;

/// Host `a` sends by classes to host `b`; both are on an in-memory link.
struct Link {
    pair: HostPair,
    family: Family,
    bulk: Vec<TcpId>,
    listener: Option<TcpListenerId>,
    accepted: Vec<TcpId>,
    /// Frames that have left `a`.
    left: Vec<Vec<u8>>,
}

impl Link {
    fn new(family: Family, classes: &Config) -> Self {
        let mut pair = HostPair::new();
        pair.advance(3 * SECOND_NS);
        for (host, other) in [(&mut pair.a, 2), (&mut pair.b, 1)] {
            host.sent();
            host.stack.set_neighbour(
                host.now_ns,
                family.host(other),
                Some(mac(other)),
                &mut host.arena,
            );
        }
        pair.a.stack.set_transmit_classes(classes).unwrap();
        Self {
            pair,
            family,
            bulk: Vec::new(),
            listener: None,
            accepted: Vec::new(),
            left: Vec::new(),
        }
    }

    fn at(&self, host: u8, port: u16) -> SocketAddr {
        SocketAddr::new(self.family.host(host), port)
    }

    /// Connects `a` to a listener on `b`.
    fn connect(&mut self, port: u16) -> TcpId {
        let remote = self.at(2, port);
        let HostPair { a, b } = &mut self.pair;
        let listener = b.stack.tcp_listen(remote, 64, TcpOptions::default());
        self.listener = listener.ok().or(self.listener);
        let options = TcpOptions::default().no_delay(true);
        let id = a.stack.tcp_connect(a.now_ns, &mut a.arena, None, remote, options).unwrap();
        self.carry();
        id
    }

    /// Starts bulk senders.
    fn start_bulk(&mut self, connections: usize) {
        (0..connections).for_each(|_| {
            let id = self.connect(BULK_PORT);
            self.bulk.push(id);
        });
    }

    /// Runs both applications once: bulk senders write what they can, and `b` reads.
    fn run_applications(&mut self) {
        let HostPair { a, b } = &mut self.pair;
        for &id in &self.bulk {
            let _ = a.stack.tcp_send(a.now_ns, &mut a.arena, id, &[b'x'; 16 << 10]);
        }
        if let Some(listener) = self.listener {
            self.accepted.extend(std::iter::from_fn(|| b.stack.tcp_accept(listener).ok()));
        }
        for &id in &self.accepted {
            let mut buf = [0; 64 << 10];
            while !matches!(
                b.stack.tcp_recv(b.now_ns, &mut b.arena, id, &mut buf),
                Err(TcpError::WouldBlock) | Ok(0)
            ) {}
        }
    }

    /// Carries frames until no frame has its turn now.
    fn carry(&mut self) {
        loop {
            self.run_applications();
            let HostPair { a, b } = &mut self.pair;
            a.stack.take_turns(a.now_ns, &mut a.arena);
            let (from_a, from_b) = (a.sent(), b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            b.feed_burst(from_a.iter().cloned());
            a.feed_burst(from_b);
            self.left.extend(from_a);
        }
    }

    /// Waits for the next turn or timer.
    fn wait(&mut self) {
        let HostPair { a, b } = &mut self.pair;
        let times = [a.stack.next_turn_ns(), a.stack.next_timeout(), b.stack.next_timeout()];
        let next_ns = times.into_iter().flatten().min().expect("something is due");
        for host in [a, b] {
            host.now_ns = host.now_ns.max(next_ns);
            host.stack.handle_timeout(host.now_ns, &mut host.arena);
        }
    }

    /// Runs the link for `ns`.
    fn run(&mut self, ns: u64) {
        let end_ns = self.pair.a.now_ns + ns;
        while self.pair.a.now_ns < end_ns {
            self.carry();
            self.wait();
        }
    }

    /// Frames that leave before the first that `is_it` describes.
    fn frames_before(&mut self, is_it: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        self.left.clear();
        for _ in 0..10_000 {
            self.carry();
            if let Some(at) = self.left.iter().position(|frame| is_it(frame)) {
                self.left.truncate(at);
                return std::mem::take(&mut self.left);
            }
            self.wait();
        }
        panic!("the frame never leaves");
    }

    /// Destination port of a frame to send.
    fn port_of(family: Family, frame: &[u8]) -> u16 {
        let at = LINK_BYTES + family.header_bytes() + 2;
        frame.get(at..at + 2).map_or(0, |port| u16::from_be_bytes([port[0], port[1]]))
    }

    fn finish(self) {
        self.pair.finish();
    }
}

fn one_class() -> Config {
    Config::default().ceiling_bps(LINK_BPS)
}

#[test]
fn small_datagram_overtakes_the_backlog_of_bulk_senders() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        let socket = link.pair.a.bind(link.at(1, SMALL_PORT));
        link.start_bulk(8);
        link.run(300 * MS);
        for _ in 0..20 {
            link.run(MS);
            let to = link.at(2, SMALL_PORT);
            link.pair.a.send(socket, Some(to), b"an answer");
            let before = link.frames_before(|frame| Link::port_of(family, frame) == SMALL_PORT);
            assert!(before.len() <= 1, "{} frames left first", before.len());
        }
        link.finish();
    });
}

#[test]
fn small_message_on_a_connection_overtakes_bulk_senders() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        let small = link.connect(SMALL_PORT);
        link.start_bulk(8);
        link.run(300 * MS);
        for _ in 0..20 {
            link.run(MS);
            let a = &mut link.pair.a;
            a.stack.tcp_send(a.now_ns, &mut a.arena, small, b"an answer").unwrap();
            let before = link.frames_before(|frame| Link::port_of(family, frame) == SMALL_PORT);
            assert!(before.len() <= 1, "{} frames left first", before.len());
        }
        link.finish();
    });
}

#[test]
fn bulk_senders_use_the_whole_ceiling_fairly_and_lose_nothing() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        link.start_bulk(4);
        link.run(500 * MS);
        link.left.clear();
        let before: Vec<u64> = acked(&link);
        link.run(1000 * MS);
        let bytes: usize = link.left.iter().map(Vec::len).sum();
        let rate = bytes as f64 * 8.0 / LINK_BPS as f64;
        assert!((0.99..=1.01).contains(&rate), "{rate} of the ceiling");
        let each: Vec<u64> =
            acked(&link).iter().zip(before).map(|(after, before)| after - before).collect();
        let (least, most) = (each.iter().min().unwrap(), each.iter().max().unwrap());
        assert!(most - least < most / 50, "{each:?}");
        assert_eq!(link.pair.a.stack.counters().transmit_drops.total(), 0);
        let (_, class) = link.pair.a.stack.transmit_classes().next().unwrap();
        assert!(class.queued <= 4 * 3, "data waits in the send buffers: {class:?}");
        link.finish();
    });
}

/// Bytes that `b` has acknowledged on each connection.
fn acked(link: &Link) -> Vec<u64> {
    let info = |&id: &TcpId| link.pair.a.stack.tcp_info(id).unwrap().traffic.acknowledged_bytes;
    link.bulk.iter().map(info).collect()
}

#[test]
fn other_classes_take_over_what_waits() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        let socket = link.pair.a.bind(link.at(1, SMALL_PORT));
        link.start_bulk(4);
        link.run(300 * MS);
        let to = link.at(2, SMALL_PORT);
        (0..10).for_each(|number| link.pair.a.send(socket, Some(to), &[number; 1000]));
        let (_, before) = link.pair.a.stack.transmit_classes().next().unwrap();
        let rule = Match::default()
            .local_port("7".parse::<tidegate_gate::admission::NumberRange>().unwrap());
        let classes = vec![Class::new("small").rules(vec![rule])];
        let faster = Config::default().ceiling_bps(10 * LINK_BPS).classes(classes);
        link.left.clear();
        link.pair.a.stack.set_transmit_classes(&faster).unwrap();
        let acked_before: u64 = acked(&link).iter().sum();
        link.run(300 * MS);
        let datagrams = link.left.iter().filter(|frame| Link::port_of(family, frame) == SMALL_PORT);
        let numbers: Vec<u8> = datagrams.map(|frame| *frame.last().unwrap()).collect();
        assert!(numbers.iter().copied().eq(0..10), "{numbers:?}");
        let bps = 8 * (acked(&link).iter().sum::<u64>() - acked_before) * 10 / 3;
        assert!(bps > 9 * LINK_BPS, "{bps} bit/s on a link that is ten times as fast now");
        let retransmitted: u64 = link
            .bulk
            .iter()
            .map(|&id| link.pair.a.stack.tcp_info(id).unwrap().traffic.retransmitted_segments)
            .map(u64::from)
            .sum();
        assert_eq!(retransmitted, 0);
        assert_eq!(link.pair.a.stack.counters().transmit_drops.total(), 0);
        let counters: Vec<_> = link.pair.a.stack.transmit_classes().collect();
        let [("small", small), ("others", others)] = counters[..] else { panic!("{counters:?}") };
        assert_eq!(small.sent, 10);
        assert!(others.sent > before.sent, "class `others` has counted on");
        link.finish();
    });
}

#[test]
fn datagrams_that_wait_too_long_are_dropped_and_counted() {
    for_each_family(|family| {
        let config = Config::default().ceiling_bps(1_000_000).max_delay_ms(20);
        let mut link = Link::new(family, &config);
        let socket = link.pair.a.bind(link.at(1, SMALL_PORT));
        let to = link.at(2, SMALL_PORT);
        for _ in 0..100 {
            link.pair.a.send(socket, Some(to), &[0; 1000]);
        }
        let start_ns = link.pair.a.now_ns;
        while link.pair.a.stack.transmit_classes().any(|(_, class)| class.queued > 0)
            || link.left.is_empty()
        {
            link.carry();
            link.pair.a.now_ns = link.pair.a.stack.next_turn_ns().unwrap_or(link.pair.a.now_ns);
        }
        assert!(link.pair.a.now_ns <= start_ns + 30 * MS);
        let sent = link.left.len();
        let dropped = link.pair.a.transmit_drops(DropReason::TransmitQueueFull);
        assert_eq!(sent as u64 + dropped, 100);
        assert!((2..=5).contains(&sent), "1 Mb/s sends {sent} datagrams in 20 ms");
        link.finish();
    });
}

#[test]
fn class_has_its_ceiling_and_its_code_point() {
    for_each_family(|family| {
        let rule = Match::default()
            .local_port("7".parse::<tidegate_gate::admission::NumberRange>().unwrap());
        let class = Class::new("slow").rules(vec![rule]).ceiling_bps(8_000_000).set_dscp(8);
        let mut link = Link::new(family, &one_class().classes(vec![class]));
        let options = UdpOptions::default();
        let local = link.at(1, SMALL_PORT);
        let socket = link.pair.a.stack.udp_bind(local, options).unwrap();
        let to = link.at(2, 9);
        for _ in 0..200 {
            link.pair.a.send(socket, Some(to), &[0; 958]);
            link.carry();
            link.pair.a.now_ns += MS / 2;
        }
        let bytes: usize = link.left.iter().map(Vec::len).sum();
        // Twice the ceiling was offered for 100 ms.
        assert!((95_000..=103_000).contains(&bytes), "{bytes}");
        for frame in &link.left {
            let packet = &frame[LINK_BYTES..];
            let class = match family {
                Family::V4 => Ipv4Header::parse(packet).expect("a valid checksum").0.dscp_ecn,
                Family::V6 => Ipv6Header::parse(packet).unwrap().0.traffic_class,
            };
            assert_eq!(class, 8 << 2);
        }
        link.finish();
    });
}

#[test]
fn neighbour_discovery_goes_before_everything_that_waits() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        link.start_bulk(4);
        link.run(300 * MS);
        let a = &mut link.pair.a;
        let stranger = a.bind(SocketAddr::new(family.host(1), 99));
        let to = SocketAddr::new(family.host(77), 9);
        a.send(stranger, Some(to), b"to a host whose hardware address is unknown");
        let is_discovery = |frame: &[u8]| match family {
            Family::V4 => frame[12..14] == [8, 6],
            Family::V6 => frame.get(LINK_BYTES + 40) == Some(&135),
        };
        assert_eq!(link.frames_before(is_discovery).len(), 0);
        link.finish();
    });
}

#[test]
fn aborted_connection_that_waits_sends_its_reset() {
    for_each_family(|family| {
        let mut link = Link::new(family, &one_class());
        link.start_bulk(2);
        link.run(100 * MS);
        let id = link.bulk.pop().unwrap();
        let a = &mut link.pair.a;
        a.stack.tcp_abort(a.now_ns, &mut a.arena, id);
        let is_reset = |frame: &[u8]| frame[LINK_BYTES + family.header_bytes() + 13] & 4 != 0;
        link.frames_before(is_reset);
        link.finish();
    });
}
