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
const ALGORITHMS: [(&str, CongestionControl); 2] =
    [("cubic", CongestionControl::Cubic), ("newreno", CongestionControl::NewReno)];

#[test]
fn goodput_over_loss_and_delay() {
    let mut table =
        String::from("# Milliseconds for 2,000,000 bytes: loss in 1/1000, delay one way in ms\n");
    for (name, congestion_control) in ALGORITHMS {
        for delay_ms in [1, 10, 50] {
            for lost in [0, 1, 10, 50] {
                let link = |seed: u64| Link {
                    lost,
                    delay_ns: delay_ms * MS,
                    seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    ..Link::default()
                };
                let took: Vec<u64> =
                    (1..=5).map(|seed| transfer(congestion_control, link(seed), BYTES).0).collect();
                let mut sorted = took;
                sorted.sort_unstable();
                let [min_ms, _, median, _, max_ms] = sorted[..] else { unreachable!("five runs") };
                writeln!(table, "{name} {delay_ms} {lost}: {min_ms} {median} {max_ms}").unwrap();
            }
        }
    }
    compare("tcp_goodput.txt", &table);
}

#[test]
fn goodput_over_a_bottleneck() {
    let mut table = String::from(
        "# Milliseconds for a transfer through a bottleneck, and frames lost at its queue:\n\
         # rate in bytes per ms, delay one way in ms, queue in bytes, transfer in bytes\n",
    );
    for (name, congestion_control) in ALGORITHMS {
        for (bytes_per_ms, delay_ms, queue_bytes, bytes) in [
            (1250, 20, 20_000, 1_000_000),
            (1250, 20, 50_000, 1_000_000),
            (1250, 20, 200_000, 1_000_000),
            (12_500, 10, 60_000, 5_000_000),
            (12_500, 10, 250_000, 5_000_000),
            (12_500, 10, 500_000, 5_000_000),
        ] {
            let link =
                Link { bytes_per_ms, queue_bytes, delay_ns: delay_ms * MS, ..Link::default() };
            let (took_ms, overflows) = transfer(congestion_control, link, bytes);
            writeln!(
                table,
                "{name} {bytes_per_ms} {delay_ms} {queue_bytes} {bytes}: {took_ms} {overflows}"
            )
            .unwrap();
        }
    }
    compare("tcp_bottleneck.txt", &table);
}

/// Compares a table with a golden file, after writing the file if that is wanted.
fn compare(file: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    if std::env::var("TIDEGATE_GOLDEN").is_ok_and(|what| what == "write") {
        std::fs::write(&path, table).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(table == golden, "the table has changed; now it is\n{table}");
}

/// Time from the SYN to the last of `bytes` bytes in milliseconds, and frames that the link had no
/// space for.
fn transfer(congestion_control: CongestionControl, link: Link, bytes: usize) -> (u64, u64) {
    let options = TcpOptions::default().congestion_control(congestion_control);
    let (up, down) = (Endpoint::new(bytes, 64_000, 0), Endpoint::new(0, 64_000, 0));
    let mut exchange = Exchange::new(Family::V4, link, options, up, down);
    let took_ns = exchange.run_until(1000 * SECOND_NS, |exchange| exchange.server_has(bytes));
    (took_ns / MS, exchange.overflows())
}
