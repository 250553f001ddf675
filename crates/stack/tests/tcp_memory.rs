//! What connections cost in memory, counted at the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Stack, TcpId, TcpListenerId, TcpOptions};

/// Counts what is allocated.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CONNECTIONS: usize = 20_000;
const TO: u16 = 80;

/// How often many connections are full of data, and how many.
const PEAKS: usize = 20;
const FULL: usize = 8;

/// What the two stacks may keep for the next ones.
const RESTING_BYTES: usize = 3 << 20;

/// Two stacks, the frames of each carried to the other at once.
struct Hosts {
    arena: Arena,
    a: Stack,
    b: Stack,
    now_ns: u64,
}

impl Hosts {
    fn new() -> Self {
        let arena = ArenaConfig { frames: 512, frame_size: FrameSize::K2, hugepages: false };
        let host = |n: u8| {
            let mut config = Config::ip([n; 16]);
            config.addresses = vec![format!("192.0.2.{n}/24").parse().unwrap()];
            config.limits.sockets = 8;
            Stack::new(config, 0).unwrap()
        };
        Self { arena: Arena::new(arena).unwrap(), a: host(1), b: host(2), now_ns: 0 }
    }

    fn carry(&mut self) {
        for _ in 0..20 {
            let Self { arena, a, b, now_ns } = self;
            while let Some(frame) = a.transmit_queue().pop_front() {
                b.ingest(*now_ns, frame, arena);
            }
            while let Some(frame) = b.transmit_queue().pop_front() {
                a.ingest(*now_ns, frame, arena);
            }
        }
    }

    fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.a.handle_timeout(self.now_ns, &mut self.arena);
        self.b.handle_timeout(self.now_ns, &mut self.arena);
        self.carry();
    }
}

/// One test, since the counters are for the whole process.
#[test]
fn connections_are_small_data_allocates_nothing_and_peaks_go_back() {
    let mut hosts = Hosts::new();
    let to = SocketAddr::from(([192, 0, 2, 2], TO));
    let listener = hosts.b.tcp_listen(to, CONNECTIONS, TcpOptions::default()).unwrap();
    let before = BYTES.load(Ordering::Relaxed);
    let mut clients: Vec<TcpId> = Vec::with_capacity(CONNECTIONS);
    let mut servers: Vec<TcpId> = Vec::with_capacity(CONNECTIONS);
    let handles = BYTES.load(Ordering::Relaxed) - before;
    for _ in 0..CONNECTIONS {
        let Hosts { arena, a, now_ns, .. } = &mut hosts;
        clients.push(a.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap());
        hosts.carry();
        servers.push(hosts.b.tcp_accept(listener).unwrap());
        while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    }
    // All of them have spoken once.
    for (&client, &server) in clients.iter().zip(&servers) {
        exchange(&mut hosts, client, server);
    }
    for _ in 0..1000 {
        hosts.pass(1_000_000);
    }
    for _ in 0..200 {
        hosts.pass(100_000_000);
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    let used = BYTES.load(Ordering::Relaxed) - before - handles;
    // Each connection has two ends here.
    let each = used / (2 * CONNECTIONS);
    assert!(each <= 512, "{each} bytes for an idle connection");
    println!("{each} bytes for an idle connection");

    // Once everything has its place, requests and answers allocate nothing.
    let (client, server) = (clients[7], servers[7]);
    for _ in 0..10 {
        exchange(&mut hosts, client, server);
    }
    let calls = CALLS.load(Ordering::Relaxed);
    for _ in 0..1000 {
        exchange(&mut hosts, client, server);
    }
    assert_eq!(CALLS.load(Ordering::Relaxed), calls, "data on an open connection allocates");

    // And all of it comes back.
    for (client, server) in clients.into_iter().zip(servers) {
        let Hosts { arena, a, b, now_ns } = &mut hosts;
        a.tcp_close(*now_ns, arena, client);
        b.tcp_close(*now_ns, arena, server);
        hosts.carry();
    }
    hosts.pass(100_000_000_000);
    assert_eq!((hosts.a.tcp_connections(), hosts.b.tcp_connections()), (0, 0));
    assert_eq!((hosts.a.tcp_memory_used(), hosts.b.tcp_memory_used()), (0, 0));

    // What many took at once who read nothing goes back, though nothing happens
    // afterwards; and the next ones take no more than those before.
    let resting: Vec<usize> = (0..PEAKS).map(|_| peak(&mut hosts, listener)).collect();
    let (first, last) = (resting[1], resting[PEAKS - 1]);
    assert!(last <= first, "{first} bytes after two peaks, {last} after {PEAKS}");
}

/// Connections are full of data both ways, and break off. Returns what is
/// allocated when the stacks have come to rest.
fn peak(hosts: &mut Hosts, listener: TcpListenerId) -> usize {
    let to = SocketAddr::from(([192, 0, 2, 2], TO));
    let before = BYTES.load(Ordering::Relaxed);
    let mut ends = Vec::with_capacity(FULL);
    for _ in 0..FULL {
        let Hosts { arena, a, now_ns, .. } = hosts;
        let client = a.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap();
        hosts.carry();
        let server = hosts.b.tcp_accept(listener).unwrap();
        loop {
            let Hosts { arena, a, b, now_ns } = hosts;
            let ours = a.tcp_send(*now_ns, arena, client, &[1; 4096]).unwrap_or(0);
            let theirs = b.tcp_send(*now_ns, arena, server, &[2; 4096]).unwrap_or(0);
            hosts.carry();
            if ours + theirs == 0 {
                break;
            }
        }
        ends.push((client, server));
    }
    let full = hosts.a.tcp_memory_used() + hosts.b.tcp_memory_used();
    assert!(full > 2 * RESTING_BYTES, "{full} bytes are no peak");
    for (client, server) in ends {
        let Hosts { arena, a, b, now_ns } = hosts;
        a.tcp_abort(*now_ns, arena, client);
        b.tcp_abort(*now_ns, arena, server);
        hosts.carry();
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    // Only when they ask for it do they hear that time has passed.
    let end_ns = hosts.now_ns + 10_000_000_000;
    while let Some(at_ns) = hosts.a.next_timeout().into_iter().chain(hosts.b.next_timeout()).min()
        && at_ns < end_ns
    {
        hosts.pass(at_ns.saturating_sub(hosts.now_ns));
    }
    hosts.now_ns = end_ns;
    assert_eq!((hosts.a.tcp_memory_used(), hosts.b.tcp_memory_used()), (0, 0));
    let now = BYTES.load(Ordering::Relaxed);
    assert!(now < before + RESTING_BYTES, "{} bytes stay of a peak of {full}", now - before);
    now
}

/// A request and its answer.
fn exchange(hosts: &mut Hosts, client: TcpId, server: TcpId) {
    let mut buf = [0; 256];
    for (sends, receives) in [(true, client), (false, server)] {
        let Hosts { arena, a, b, now_ns } = hosts;
        match sends {
            true => a.tcp_send(*now_ns, arena, receives, &[1; 200]).unwrap(),
            false => b.tcp_send(*now_ns, arena, receives, &[2; 200]).unwrap(),
        };
        hosts.carry();
        let Hosts { arena, a, b, now_ns } = hosts;
        let len = match sends {
            true => b.tcp_recv(*now_ns, arena, server, &mut buf).unwrap(),
            false => a.tcp_recv(*now_ns, arena, client, &mut buf).unwrap(),
        };
        assert_eq!(len, 200);
        hosts.carry();
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
}
