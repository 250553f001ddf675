use std::task::Waker;

use super::*;

const KIB: usize = 1024;

fn limits(memory_bytes: usize, max_connections: usize) -> HttpLimits {
    HttpLimits { memory_bytes, max_connections, ..HttpLimits::default() }
}

/// Ledger with open accounts, at a time that the test chooses.
struct Fixture {
    ledger: Arc<Ledger>,
    start: Instant,
}

impl Fixture {
    fn new(limits: HttpLimits) -> Self {
        Self { ledger: Arc::new(Ledger::new(limits)), start: Instant::now() }
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    /// Opens an account that holds `bytes` and has waited since `ms`.
    fn open(&self, peer: &str, bytes: usize, ms: u64) -> Account {
        let account = self.ledger.open(peer.parse().unwrap(), 0, self.at(ms));
        assert_eq!(update(&account, self.at(ms), bytes, self.at(ms)), Order::Continue);
        account
    }
}

fn update(account: &Account, now: Instant, bytes: usize, waiting_since: Instant) -> Order {
    account.update(now, bytes, waiting_since, Waker::noop())
}

/// Orders that the accounts get now.
fn orders(accounts: &[Account], fixture: &Fixture, ms: u64) -> Vec<Order> {
    let order = |account: &Account| {
        let state = account.ledger.lock();
        let entry = state.entries.iter().find(|(slot, _)| *slot == account.slot).unwrap().1;
        let (bytes, waiting_since) = (entry.bytes, entry.waiting_since);
        drop(state);
        update(account, fixture.at(ms), bytes, waiting_since)
    };
    accounts.iter().map(order).collect()
}

#[test]
fn evicts_the_longest_waiting_of_the_heaviest_source_first() {
    let fixture = Fixture::new(limits(160 * KIB, 100));
    let mut accounts = vec![
        fixture.open("192.0.2.1", 30 * KIB, 0),
        fixture.open("192.0.2.2", 40 * KIB, 20),
        fixture.open("192.0.2.2", 40 * KIB, 10),
        fixture.open("192.0.2.2", 40 * KIB, 30),
    ];
    assert!(fixture.ledger.make_room(fixture.at(500)));
    accounts.push(fixture.open("192.0.2.3", 10 * KIB, 500));
    assert!(!fixture.ledger.lock().has_room(&fixture.ledger.limits()));
    assert!(fixture.ledger.make_room(fixture.at(600)));
    use Order::{Abort, Continue};
    let expected = [Continue, Continue, Abort, Continue, Continue];
    assert_eq!(orders(&accounts, &fixture, 600), expected);
}

#[test]
fn counts_the_addresses_of_an_ipv6_prefix_together() {
    let fixture = Fixture::new(limits(100 * KIB, 100));
    let accounts = [
        fixture.open("2001:db8::1", 30 * KIB, 10),
        fixture.open("2001:db8::ffff:2", 30 * KIB, 20),
        fixture.open("2001:db8:0:1::1", 40 * KIB, 0),
        fixture.open("::ffff:192.0.2.1", KIB / 2, 0),
        fixture.open("192.0.2.1", KIB / 2, 0),
    ];
    assert_eq!(fixture.ledger.lock().sources.len(), 3);
    // Without its twin, the first connection would hold less than the third.
    assert!(!fixture.ledger.lock().has_room(&fixture.ledger.limits()));
    assert!(fixture.ledger.make_room(fixture.at(500)));
    assert_eq!(
        orders(&accounts[..3], &fixture, 500),
        [Order::Abort, Order::Continue, Order::Continue]
    );
    drop(accounts);
    let state = fixture.ledger.lock();
    assert_eq!((state.sources.len(), state.connections, state.used_bytes), (0, 0, 0));
}

#[test]
fn evicts_for_connections_and_for_descriptors() {
    let fixture = Fixture::new(limits(1 << 30, 3));
    let accounts: Vec<_> = (0..3).map(|n| fixture.open("192.0.2.1", KIB, n)).collect();
    assert!(fixture.ledger.make_room(fixture.at(500)));
    assert_eq!(orders(&accounts, &fixture, 500)[0], Order::Abort);
    assert_eq!(fixture.ledger.connections(), 2);
    fixture.ledger.release_descriptors(fixture.at(600));
    assert_eq!(fixture.ledger.connections(), 1);
    assert_eq!(orders(&accounts, &fixture, 600)[1], Order::Abort);
}

#[test]
fn spares_connections_that_wait_for_a_moment() {
    let fixture = Fixture::new(limits(100 * KIB, 100));
    let account = fixture.open("192.0.2.1", 99 * KIB, 0);
    assert_eq!(update(&account, fixture.at(50), 200 * KIB, fixture.at(0)), Order::Continue);
    assert!(!fixture.ledger.make_room(fixture.at(90)));
    assert!(fixture.ledger.make_room(fixture.at(150)));
    assert_eq!(update(&account, fixture.at(150), 99 * KIB, fixture.at(0)), Order::Abort);
    drop(account);
    assert_eq!(fixture.ledger.connections(), 0);
}

#[test]
fn send_buffers_get_smaller_as_memory_is_used() {
    let limits = HttpLimits { max_send_buffer_bytes: 1 << 20, ..limits(512 << 20, 100) };
    let fixture = Fixture::new(limits);
    assert_eq!(fixture.ledger.send_buffer_bytes(), 1 << 20);
    let account = fixture.open("192.0.2.1", 384 << 20, 0);
    assert_eq!(fixture.ledger.send_buffer_bytes(), 512 << 10);
    update(&account, fixture.at(1), 512 << 20, fixture.at(1));
    assert_eq!(fixture.ledger.send_buffer_bytes(), MIN_SEND_BUFFER_BYTES);
}

#[test]
fn stop_wakes_and_finishes_every_connection() {
    let fixture = Fixture::new(limits(1 << 20, 100));
    let accounts = [fixture.open("192.0.2.1", KIB, 0), fixture.open("192.0.2.2", KIB, 0)];
    fixture.ledger.stop();
    assert_eq!(orders(&accounts, &fixture, 1), [Order::Finish; 2]);
}
