//! Admission conserves work: as long as anyone wants it, what the server can do is done.
//!
//! A server inside the polling loop examines packets when it polls, and refusing costs time. The
//! sources together send from the capacity to ten times the capacity.

use tidegate_gate::admission;
use tidegate_sim::{
    ArrivalPattern, Costs, HostRole, IpFamily, Machine, OfferedLoad, Placement, Setup, SimReport,
};

const MS: u64 = 1_000_000;
/// Rate of the known peer, in packets per second.
const PEER_PPS: u64 = 2_000;
/// Time in which the peer becomes known: two learning periods and more.
const LEARNING_NS: u64 = 2_500 * MS;

fn load(pps: u64, sources: u32) -> OfferedLoad {
    OfferedLoad { pps, shape: ArrivalPattern::Poisson, flows: sources }
}

/// Server with 20 microseconds of work per packet, and a NIC with the ring of a present-day card.
/// Refusing costs what a program on the interface costs.
fn server(family: IpFamily, sources: u32, known_peer: bool, admits: bool) -> Machine {
    let role =
        HostRole::Udp { family, socket_queue: 256, answers: true, placement: Placement::Inline };
    let setup = Setup {
        costs: Costs { work_ns: 20_000, refuse_ns: 60, ..Costs::default() },
        receive_ring: 1024,
        role,
        load: load(0, sources),
        peer_load: known_peer.then(|| load(PEER_PPS, 1)),
        admission: admits.then(admission::Config::default),
        ..Setup::default()
    };
    Machine::new(&setup).unwrap()
}

/// Offers `pps` packets per second from `sources` to a server whose peer is known, if it has one.
fn offer(machine: &mut Machine, pps: u64, sources: u32, known_peer: bool) -> SimReport {
    if known_peer {
        machine.run(LEARNING_NS);
    }
    machine.set_load(load(pps, sources)).unwrap();
    machine.run(300 * MS);
    machine.run(400 * MS)
}

/// Packets served per second without admission, when far more arrive.
fn capacity_pps() -> u64 {
    let report = offer(&mut server(IpFamily::V4, 10, false, false), 400_000, 10, false);
    report.delivered_pps() as u64
}

#[test]
fn serves_as_much_as_without_admission() {
    let capacity_pps = capacity_pps();
    let mut failures = Vec::new();
    for (sources, known_peer) in
        [1, 2, 10, 1000].into_iter().flat_map(|sources| [(sources, false), (sources, true)])
    {
        for times in [1, 2, 5, 10] {
            let family = if times % 2 == 0 { IpFamily::V4 } else { IpFamily::V6 };
            let served = |admits| {
                let mut machine = server(family, sources, known_peer, admits);
                offer(&mut machine, times * capacity_pps, sources, known_peer)
            };
            let (with, without) = (served(true), served(false));
            let ratio = with.delivered as f64 / without.delivered as f64;
            let peer_answered = with.peer_delivered as f64 / with.peer_offered.max(1) as f64;
            let cell = format!(
                "{sources} sources at {times} times the capacity, known peer {known_peer}: \
                 {} of {} served, peer {peer_answered:.3}",
                with.delivered, without.delivered
            );
            if ratio < 0.95 || known_peer && times > 1 && peer_answered < 0.98 {
                failures.push(cell);
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
