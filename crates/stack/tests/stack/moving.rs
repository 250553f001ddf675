//! Sockets move from one stack to another of the same process: nobody notices,
//! and nothing is left behind.

use proptest::prelude::*;
use tidegate_stack::{
    Config, CongestionControl, Keepalive, Moved, MovingSockets, Stack, TcpId, TcpListenerId,
    TcpOptions, UdpId,
};

use crate::kit::{Family, Host, SECOND_NS};
use crate::tcp_pair::{Exchange, Link, Side};
use crate::upgrade::fresh_arena;

/// The name of no connection.
pub const GONE: TcpId = TcpId::from_bits(u64::MAX);

/// The new name of what has moved.
pub fn renamed<T: Copy + PartialEq>(moved: &[(T, T)], old: T) -> Option<T> {
    moved.iter().find(|&&(known, _)| known == old).map(|&(_, new)| new)
}

/// Another stack for the host, on the same clock and with an arena of its own.
fn stack_beside(host: &Host, config: Config) -> Host {
    // The seed is another one in life too.
    let config = Config { seed: [host.now_ns as u8 ^ 0x3c; 16], ..config };
    let mut stack = Stack::new(config, host.now_ns).unwrap();
    stack.share_tcp_secrets(host.stack.tcp_secrets());
    Host { stack, arena: fresh_arena(), now_ns: host.now_ns }
}

/// Moves sockets, and sees that nothing is left of them if they are all there
/// were.
pub fn move_between(from: &mut Host, to: &mut Host, sockets: &MovingSockets) -> Moved {
    to.now_ns = from.now_ns;
    // It may have slept.
    to.stack.handle_timeout(to.now_ns, &mut to.arena);
    let taken = from.stack.take_out(from.now_ns, &mut from.arena, sockets);
    assert_eq!(from.stack.counters().balance(), 0);
    let left = (from.stack.tcp_connections(), from.stack.tcp_memory_used());
    assert_eq!(left, (0, 0), "something was left behind");
    assert_eq!(from.stack.counters().held, 0);
    assert_eq!(from.events(), []);
    let moved = to.stack.put_in(to.now_ns, &mut to.arena, taken).unwrap();
    assert_eq!(to.stack.counters().balance(), 0);
    moved
}

/// All of TCP in a stack that has had little to do, and these sockets.
fn all_sockets(stack: &Stack, udp: &[UdpId]) -> MovingSockets {
    let names =
        |places: u64| (0..places).flat_map(|index| (0..40).map(move |used| used << 32 | index));
    let listeners = names(4).filter_map(TcpListenerId::from_bits);
    MovingSockets {
        udp: udp.to_vec(),
        listeners: listeners.filter(|&id| stack.tcp_listener_addr(id).is_some()).collect(),
        connections: names(64).map(TcpId::from_bits).filter(|&id| stack.tcp_exists(id)).collect(),
    }
}

/// Everything there is goes on in a new stack in the place of the host's. What
/// the old one wanted to send is sent first.
pub fn move_all(host: &mut Host, config: Config, udp: &[UdpId]) -> Moved {
    let mut other = stack_beside(host, config);
    for bytes in host.sent() {
        let frame = other.arena.alloc_from(&bytes).unwrap();
        other.stack.transmit_queue().push_back(frame);
    }
    let moved = move_between(host, &mut other, &all_sockets(&host.stack, udp));
    std::mem::swap(host, &mut other);
    other.finish();
    moved
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_byte_arrives_once_and_in_order_however_often_sockets_move(
        v6 in any::<bool>(),
        moves in 1u32..300,
        lost in 0u32..200,
        doubled in 0u32..100,
        late in 0u32..200,
        corrupted in 0u32..50,
        delay_us in 1u64..100_000,
        seed in any::<u64>(),
        sizes in (0usize..100_000, 0usize..100_000),
        buffers in (2048u32..200_000, 2048u32..200_000),
        appetites in (100usize..20_000, 100usize..20_000),
        newreno in any::<bool>(),
        ecn in any::<bool>(),
    ) {
        let family = if v6 { Family::V6 } else { Family::V4 };
        let link = Link { lost, doubled, late, corrupted, delay_ns: delay_us * 1000, seed };
        let options = TcpOptions {
            send_buffer_bytes: buffers.0,
            receive_buffer_bytes: buffers.1,
            ecn,
            // A peer that has given up may not get the word through.
            keepalive: Some(Keepalive { idle_ms: 60_000, interval_ms: 10_000, probes: 20 }),
            congestion_control: match newreno {
                true => CongestionControl::NewReno,
                false => CongestionControl::Cubic,
            },
            ..TcpOptions::default()
        };
        let up = Side::new(sizes.0, appetites.0, 0);
        let down = Side::new(sizes.1, appetites.1, 0xaa);
        let exchange = Exchange::new(family, link, options, up, down);
        let mut exchange = exchange.with_moves(moves);
        exchange.run(100_000 * SECOND_NS);
        exchange.check_ended(lost > 100);
    }
}
