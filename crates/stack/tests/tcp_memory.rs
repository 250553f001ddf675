//! Memory cost of connections, counted at the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Stack, TcpId, TcpListenerId, TcpOptions};

/// System allocator that counts allocated bytes and calls.
struct CountingAllocator;

static ALLOCATED_BYTES: AtomicUsize = AtomicUsize::new(0);
static ALLOCATION_CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        ALLOCATION_CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const CONNECTIONS: usize = 20_000;
const PORT: u16 = 80;

/// Number of load peaks, and of connections full of data in each.
const PEAK_COUNT: usize = 20;
const CONNECTIONS_PER_PEAK: usize = 8;

/// Maximum bytes that the two stacks may keep allocated for later connections.
const MAX_RETAINED_BYTES: usize = 3 << 20;

/// Two stacks; each receives the frames of the other at once.
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

    fn deliver_frames(&mut self) {
        for _ in 0..20 {
            let Self { arena, a, b, now_ns } = self;
            while let Some(frame) = a.transmit_queue().pop_front() {
                b.handle_frame(*now_ns, frame, arena);
            }
            while let Some(frame) = b.transmit_queue().pop_front() {
                a.handle_frame(*now_ns, frame, arena);
            }
        }
    }

    fn advance(&mut self, ns: u64) {
        self.now_ns += ns;
        self.a.handle_timeout(self.now_ns, &mut self.arena);
        self.b.handle_timeout(self.now_ns, &mut self.arena);
        self.deliver_frames();
    }
}

/// A single test: the counters are for the whole process.
#[test]
fn idle_connections_are_small_and_peaks_release_memory() {
    let mut hosts = Hosts::new();
    let to = SocketAddr::from(([192, 0, 2, 2], PORT));
    let listener = hosts.b.tcp_listen(to, CONNECTIONS, TcpOptions::default()).unwrap();
    let before = ALLOCATED_BYTES.load(Ordering::Relaxed);
    let mut clients: Vec<TcpId> = Vec::with_capacity(CONNECTIONS);
    let mut servers: Vec<TcpId> = Vec::with_capacity(CONNECTIONS);
    let handles = ALLOCATED_BYTES.load(Ordering::Relaxed) - before;
    for _ in 0..CONNECTIONS {
        let Hosts { arena, a, now_ns, .. } = &mut hosts;
        clients.push(a.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap());
        hosts.deliver_frames();
        servers.push(hosts.b.tcp_accept(listener).unwrap());
        while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    }
    // Every connection has exchanged data once.
    for (&client, &server) in clients.iter().zip(&servers) {
        exchange(&mut hosts, client, server);
    }
    for _ in 0..1000 {
        hosts.advance(1_000_000);
    }
    for _ in 0..200 {
        hosts.advance(100_000_000);
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    let used = ALLOCATED_BYTES.load(Ordering::Relaxed) - before - handles;
    // Both ends of each connection are in this process.
    let each = used / (2 * CONNECTIONS);
    assert!(each <= 512, "{each} bytes for an idle connection");
    println!("{each} bytes for an idle connection");

    // Once all buffers are set up, requests and replies allocate nothing.
    let (client, server) = (clients[7], servers[7]);
    for _ in 0..10 {
        exchange(&mut hosts, client, server);
    }
    let calls = ALLOCATION_CALLS.load(Ordering::Relaxed);
    for _ in 0..1000 {
        exchange(&mut hosts, client, server);
    }
    assert_eq!(
        ALLOCATION_CALLS.load(Ordering::Relaxed),
        calls,
        "data on an open connection allocates"
    );

    // Closing returns all the memory.
    for (client, server) in clients.into_iter().zip(servers) {
        let Hosts { arena, a, b, now_ns } = &mut hosts;
        a.tcp_close(*now_ns, arena, client);
        b.tcp_close(*now_ns, arena, server);
        hosts.deliver_frames();
    }
    hosts.advance(100_000_000_000);
    assert_eq!((hosts.a.tcp_connections(), hosts.b.tcp_connections()), (0, 0));
    assert_eq!((hosts.a.tcp_memory_used(), hosts.b.tcp_memory_used()), (0, 0));

    // The buffers of many connections with unread data are freed without further traffic,
    // and later peaks need no more memory than earlier ones.
    let idle_bytes: Vec<usize> = (0..PEAK_COUNT).map(|_| run_peak(&mut hosts, listener)).collect();
    let (first, last) = (idle_bytes[1], idle_bytes[PEAK_COUNT - 1]);
    assert!(last <= first, "{first} bytes after two peaks, {last} after {PEAK_COUNT}");
}

/// Fills connections with data both ways and aborts them. Returns the bytes still
/// allocated once the stacks are idle.
fn run_peak(hosts: &mut Hosts, listener: TcpListenerId) -> usize {
    let to = SocketAddr::from(([192, 0, 2, 2], PORT));
    let before = ALLOCATED_BYTES.load(Ordering::Relaxed);
    let mut connections = Vec::with_capacity(CONNECTIONS_PER_PEAK);
    for _ in 0..CONNECTIONS_PER_PEAK {
        let Hosts { arena, a, now_ns, .. } = hosts;
        let client = a.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap();
        hosts.deliver_frames();
        let server = hosts.b.tcp_accept(listener).unwrap();
        loop {
            let Hosts { arena, a, b, now_ns } = hosts;
            let ours = a.tcp_send(*now_ns, arena, client, &[1; 4096]).unwrap_or(0);
            let theirs = b.tcp_send(*now_ns, arena, server, &[2; 4096]).unwrap_or(0);
            hosts.deliver_frames();
            if ours + theirs == 0 {
                break;
            }
        }
        connections.push((client, server));
    }
    let peak_bytes = hosts.a.tcp_memory_used() + hosts.b.tcp_memory_used();
    assert!(peak_bytes > 2 * MAX_RETAINED_BYTES, "{peak_bytes} bytes are too few for a peak");
    for (client, server) in connections {
        let Hosts { arena, a, b, now_ns } = hosts;
        a.tcp_abort(*now_ns, arena, client);
        b.tcp_abort(*now_ns, arena, server);
        hosts.deliver_frames();
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
    // The stacks get time only at the timers that they ask for.
    let end_ns = hosts.now_ns + 10_000_000_000;
    while let Some(at_ns) = hosts.a.next_timeout().into_iter().chain(hosts.b.next_timeout()).min()
        && at_ns < end_ns
    {
        hosts.advance(at_ns.saturating_sub(hosts.now_ns));
    }
    hosts.now_ns = end_ns;
    assert_eq!((hosts.a.tcp_memory_used(), hosts.b.tcp_memory_used()), (0, 0));
    let now = ALLOCATED_BYTES.load(Ordering::Relaxed);
    assert!(
        now < before + MAX_RETAINED_BYTES,
        "{} bytes are still allocated after a peak of {peak_bytes}",
        now - before
    );
    now
}

/// Exchanges a request and its reply.
fn exchange(hosts: &mut Hosts, client: TcpId, server: TcpId) {
    let mut buf = [0; 256];
    for (sends, receives) in [(true, client), (false, server)] {
        let Hosts { arena, a, b, now_ns } = hosts;
        match sends {
            true => a.tcp_send(*now_ns, arena, receives, &[1; 200]).unwrap(),
            false => b.tcp_send(*now_ns, arena, receives, &[2; 200]).unwrap(),
        };
        hosts.deliver_frames();
        let Hosts { arena, a, b, now_ns } = hosts;
        let len = match sends {
            true => b.tcp_recv(*now_ns, arena, server, &mut buf).unwrap(),
            false => a.tcp_recv(*now_ns, arena, client, &mut buf).unwrap(),
        };
        assert_eq!(len, 200);
        hosts.deliver_frames();
    }
    while hosts.a.poll_event().is_some() || hosts.b.poll_event().is_some() {}
}
