//! Transfer times over links with loss and delay: a golden table that shows a change of
//! behaviour as a change of numbers.
//!
//! `TIDEGATE_GOLDEN=write cargo test -p tidegate-stack goodput` accepts the new table.

use std::fmt::Write;
use std::path::Path;

use tidegate_stack::{CongestionControl, TcpOptions};

use crate::kit::{Family, SECOND_NS};
use crate::tcp_pair::{Endpoint, Exchange, Link};

const MS: u64 = 1_000_000;
const BYTES: usize = 2_000_000;

#[test]
fn goodput_over_loss_and_delay() {
    let mut table =
        String::from("# Milliseconds for 2,000,000 bytes: loss in 1/1000, delay one way in ms\n");
    for (name, congestion_control) in
        [("cubic", CongestionControl::Cubic), ("newreno", CongestionControl::NewReno)]
    {
        for delay_ms in [1, 10, 50] {
            for lost in [0, 1, 10, 50] {
                let took: Vec<u64> = (1..=5)
                    .map(|seed| transfer(congestion_control, delay_ms, lost, seed))
                    .collect();
                let mut sorted = took;
                sorted.sort_unstable();
                let [min_ms, _, median, _, max_ms] = sorted[..] else { unreachable!("five runs") };
                writeln!(table, "{name} {delay_ms} {lost}: {min_ms} {median} {max_ms}").unwrap();
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tcp_goodput.txt");
    if std::env::var("TIDEGATE_GOLDEN").is_ok_and(|what| what == "write") {
        std::fs::write(&path, &table).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(table == golden, "the table has changed; now it is\n{table}");
}

/// Time from the SYN to the last byte, in milliseconds.
fn transfer(congestion_control: CongestionControl, delay_ms: u64, lost: u32, seed: u64) -> u64 {
    let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let link = Link { lost, delay_ns: delay_ms * MS, seed, ..Link::default() };
    let options = TcpOptions::default().congestion_control(congestion_control);
    let (up, down) = (Endpoint::new(BYTES, 64_000, 0), Endpoint::new(0, 64_000, 0));
    let mut exchange = Exchange::new(Family::V4, link, options, up, down);
    exchange.run_until(1000 * SECOND_NS, |exchange| exchange.server_has(BYTES)) / MS
}
