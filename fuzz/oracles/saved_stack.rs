//! Any bytes as the snapshot of a stack: the snapshot is refused, or the restored stack
//! behaves, in place or with its sockets migrated to another stack. Nothing panics or
//! spins, every frame is accounted for, no memory is leaked.
//!
//! The input is one byte of setup and then a snapshot, encoded by postcard.

use std::cell::RefCell;
use std::collections::BTreeSet;

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{
    Config, Event, Route, SocketSelection, Stack, StackSnapshot, TcpId, TcpListenerId, UdpId,
};
use tidegate_wire::MacAddr;

const FRAMES: u32 = 512;
const SECOND_NS: u64 = 1_000_000_000;
/// Slots of connections and listeners that are tried, and generations of each slot.
const SLOTS: u64 = 16;
const GENERATIONS: u64 = 3;
const ROUNDS: u32 = 4;
const TIMERS: u32 = 100;

/// Bits of the first byte.
mod setup {
    /// All sockets migrate to another stack before they are used.
    pub const MOVE: u8 = 1;
    /// A peer host is on the link.
    pub const PEER: u8 = 2;
    /// The stack's clock is far ahead of the snapshot's.
    pub const LATE: u8 = 4;
}

/// Result of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The input is no snapshot.
    Unreadable,
    /// The stack refused the snapshot.
    Refused,
    /// A stack was restored from the snapshot.
    Restored,
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::new(
        Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
            .expect("a small arena"),
    );
}

/// Runs one input.
pub fn check(input: &[u8]) -> Outcome {
    let Some((&bits, state)) = input.split_first() else { return Outcome::Unreadable };
    let Ok(saved) = postcard::from_bytes::<StackSnapshot>(state) else {
        return Outcome::Unreadable;
    };
    let has = |bit: u8| bits & bit != 0;
    let now_ns = if has(setup::LATE) { 1 << 60 } else { 7 * SECOND_NS };
    ARENA.with_borrow_mut(|arena| {
        let outcome = match Stack::restore(host(2), saved, now_ns, arena) {
            Ok(stack) => {
                let mut host = TestHost { stack, peer: None, now_ns };
                host.peer = has(setup::PEER).then(|| Stack::new(self::host(1), now_ns).unwrap());
                host.run(arena, has(setup::MOVE));
                Outcome::Restored
            }
            Err(_) => Outcome::Refused,
        };
        assert_eq!(arena.available(), arena.capacity(), "a frame was lost");
        outcome
    })
}

/// Configuration of host `n`; snapshots are restored as host 2.
fn host(n: u8) -> Config {
    let mut config = Config::ethernet(MacAddr([2, 0, 0, 0, 0, n]), [n; 16]);
    let cidrs = [format!("192.0.2.{n}/24"), format!("2001:db8::{n}/64")];
    config.addresses = cidrs.map(|cidr| cidr.parse().expect("an address")).into();
    config.routes = ["0.0.0.0/0", "::/0"]
        .map(|prefix| prefix.parse().unwrap())
        .map(|prefix| Route { prefix, gateway: None })
        .into();
    config.limits.tcp_connections = 64;
    config.limits.sockets = 16;
    config.limits.tcp_buffer_bytes = 1 << 20;
    config
}

struct TestHost {
    stack: Stack,
    peer: Option<Stack>,
    now_ns: u64,
}

/// Handles of the sockets to use.
#[derive(Default)]
struct Handles {
    udp: BTreeSet<UdpId>,
    listeners: BTreeSet<TcpListenerId>,
    connections: BTreeSet<TcpId>,
}

impl TestHost {
    fn run(mut self, arena: &mut Arena, moves: bool) {
        let mut names = Handles::default();
        for bits in (0..GENERATIONS).flat_map(|used| (0..SLOTS).map(move |at| used << 32 | at)) {
            names.connections.insert(TcpId::from_bits(bits));
            names.listeners.extend(TcpListenerId::from_bits(bits));
        }
        self.take_events(&mut names);
        if moves {
            self.migrate_all(arena, &mut names);
        }
        for round in 0..ROUNDS {
            self.take_events(&mut names);
            self.use_all(arena, &mut names);
            if round + 2 == ROUNDS {
                self.close_all(arena, &names);
            }
            self.exchange(arena);
            self.pass(arena);
            assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
        }
        if self.stack.tcp_connections() == 0 {
            assert_eq!(self.stack.tcp_memory_used(), 0, "buffer memory leaked");
        }
        self.stack.release(arena);
        self.peer.into_iter().for_each(|peer| peer.release(arena));
    }

    fn take_events(&mut self, names: &mut Handles) {
        for count in 0.. {
            assert!(count < 1000, "the event queue never empties");
            match self.stack.poll_event() {
                Some(Event::UdpReadable(id) | Event::UdpError(id)) => {
                    names.udp.insert(id);
                }
                Some(Event::TcpAcceptable(id)) => {
                    names.listeners.insert(id);
                }
                Some(Event::TcpReadable(id) | Event::TcpWritable(id)) => {
                    names.connections.insert(id);
                }
                Some(_) => {}
                None => return,
            }
        }
    }

    fn migrate_all(&mut self, arena: &mut Arena, names: &mut Handles) {
        let mut other = Stack::new(host(2), self.now_ns).expect("a valid configuration");
        other.set_tcp_secrets(self.stack.tcp_secrets());
        let sockets = SocketSelection {
            udp: names.udp.iter().copied().collect(),
            listeners: names.listeners.iter().copied().collect(),
            connections: names.connections.iter().copied().collect(),
        };
        let before = self.stack.tcp_connections();
        let taken = self.stack.extract_sockets(self.now_ns, arena, &sockets);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
        let moved =
            other.insert_sockets(self.now_ns, arena, taken).expect("the new stack is empty");
        assert_eq!(before, self.stack.tcp_connections() + moved.connections.len());
        names.udp.extend(moved.udp.into_iter().map(|(_, new)| new));
        names.listeners.extend(moved.listeners.into_iter().map(|(_, new)| new));
        names.connections.extend(moved.connections.into_iter().map(|(_, new)| new));
        std::mem::replace(&mut self.stack, other).release(arena);
    }

    fn use_all(&mut self, arena: &mut Arena, names: &mut Handles) {
        let (stack, now_ns) = (&mut self.stack, self.now_ns);
        let mut buf = vec![0; 4096];
        for &id in &names.udp {
            while let Some(datagram) = stack.udp_recv(arena, id) {
                datagram.release(arena);
            }
            let _ = stack.udp_take_error(id);
            let _ = stack.udp_send(now_ns, arena, id, None, None, b"hello");
        }
        for &id in &names.listeners {
            names.connections.extend(std::iter::from_fn(|| stack.tcp_accept(id).ok()));
        }
        for &id in &names.connections {
            while let Ok(1..) = stack.tcp_recv(now_ns, arena, id, &mut buf) {}
            let _ = stack.tcp_send(now_ns, arena, id, &buf[..3000]);
            let _ = (stack.tcp_info(id), stack.tcp_readiness(id), stack.tcp_take_error(id));
        }
    }

    fn close_all(&mut self, arena: &mut Arena, names: &Handles) {
        for &id in &names.udp {
            self.stack.udp_close(id, arena);
        }
        for &id in &names.listeners {
            self.stack.tcp_close_listener(self.now_ns, arena, id);
        }
        for &id in &names.connections {
            self.stack.tcp_close(self.now_ns, arena, id);
        }
    }

    /// Delivers frames to the peer and back, or discards them without a peer.
    fn exchange(&mut self, arena: &mut Arena) {
        for _ in 0..20 {
            let frames: Vec<_> = self.stack.transmit_queue().drain(..).collect();
            for frame in frames {
                let bytes = arena.bytes(&frame).to_vec();
                arena.free(frame);
                let Some(peer) = &mut self.peer else { continue };
                if let Some(frame) = arena.alloc_from(&bytes) {
                    peer.handle_frame(self.now_ns, frame, arena);
                }
            }
            let Some(peer) = &mut self.peer else { return };
            let answers: Vec<_> = peer.transmit_queue().drain(..).collect();
            for frame in answers {
                let bytes = arena.bytes(&frame).to_vec();
                arena.free(frame);
                if let Some(frame) = arena.alloc_from(&bytes) {
                    self.stack.handle_frame(self.now_ns, frame, arena);
                }
            }
        }
    }

    /// Advances the clock through at most `TIMERS` timers.
    fn pass(&mut self, arena: &mut Arena) {
        for _ in 0..TIMERS {
            let Some(due_ns) = self.stack.next_timeout() else { return };
            self.now_ns = self.now_ns.max(due_ns.min(self.now_ns.saturating_add(SECOND_NS)));
            self.stack.handle_timeout(self.now_ns, arena);
            let next_ns = self.stack.next_timeout();
            assert!(next_ns.is_none_or(|next_ns| next_ns > self.now_ns), "a timer was left due");
            self.exchange(arena);
        }
    }
}
