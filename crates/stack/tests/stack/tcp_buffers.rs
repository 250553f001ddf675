//! Buffers of connections grow with what a path needs, within the options and the memory.

use tidegate_stack::TcpOptions;

use crate::kit::{SECOND_NS, for_each_family};
use crate::tcp_pair::{Endpoint, Exchange, Link};

const MS: u64 = 1_000_000;
const MIB: u32 = 1 << 20;

/// Bytes that are still to be sent when a test looks at the window.
const REST_BYTES: usize = 5_000_000;

/// Path with a round trip of 100 ms.
fn long_path() -> Link {
    Link { delay_ns: 50 * MS, ..Link::default() }
}

#[test]
fn a_long_path_passes_more_than_the_first_buffer_per_round_trip() {
    for_each_family(|family| {
        const BYTES: usize = 100_000_000;
        let (up, down) =
            (Endpoint::new(BYTES + REST_BYTES, 64_000, 0), Endpoint::new(0, 64_000, 0));
        let mut exchange = Exchange::new(family, long_path(), TcpOptions::default(), up, down);
        let took_ns = exchange.run_until(60 * SECOND_NS, |exchange| exchange.server_has(BYTES));
        let mbit_per_s = BYTES as u64 * 8 * 1000 / took_ns;
        println!("{mbit_per_s} Mb/s");
        assert!(mbit_per_s > 300, "{mbit_per_s} Mb/s");
        assert!(exchange.server_window() > 8 * MIB);
    });
}

#[test]
fn buffers_that_were_set_keep_their_size() {
    for_each_family(|family| {
        let options = TcpOptions::default().send_buffer_bytes(MIB).receive_buffer_bytes(MIB);
        let (up, down) =
            (Endpoint::new(8_000_000 + REST_BYTES, 64_000, 0), Endpoint::new(0, 64_000, 0));
        let mut exchange = Exchange::new(family, long_path(), options, up, down);
        exchange.run_until(60 * SECOND_NS, |exchange| exchange.server_has(8_000_000));
        let window = exchange.server_window();
        assert!(window > 0 && window <= MIB, "{window} bytes");
    });
}

#[test]
fn an_application_that_reads_slowly_gets_no_larger_buffer() {
    for_each_family(|family| {
        // Some 700 bytes a millisecond: 70,000 in a round trip.
        let (up, down) =
            (Endpoint::new(3_000_000 + REST_BYTES, 64_000, 0), Endpoint::new(0, 700, 0));
        let mut exchange = Exchange::new(family, long_path(), TcpOptions::default(), up, down);
        exchange.run_until(60 * SECOND_NS, |exchange| exchange.server_has(3_000_000));
        let window = exchange.server_window();
        assert!(window > 0 && window <= MIB, "{window} bytes");
    });
}

#[test]
fn buffers_take_at_most_an_eighth_of_the_memory() {
    for_each_family(|family| {
        let (up, down) =
            (Endpoint::new(20_000_000 + REST_BYTES, 64_000, 0), Endpoint::new(0, 64_000, 0));
        let memory_bytes = 16 * MIB as usize;
        let options = TcpOptions::default();
        let mut exchange =
            Exchange::with_memory(family, long_path(), options, up, down, memory_bytes);
        exchange.run_until(60 * SECOND_NS, |exchange| exchange.server_has(20_000_000));
        let window = exchange.server_window();
        assert!(window > MIB && window <= 2 * MIB, "{window} bytes");
    });
}
