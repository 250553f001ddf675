//! Applications that are killed in any state, beside others that lose nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::child::Victim;
use super::honest::{Honest, beside};
use super::peers::visit;
use super::site::{Rest, Site, own};
use super::victim::State;
use super::{ChaosConfig, RESIDENT_SLACK_BYTES};
use crate::LabError;
use crate::stop::StopAtEnd;

/// Victims that live at once.
const AT_ONCE: u64 = 4;

/// The first port that victims listen on.
const PORTS: u16 = 9000;

/// The longest life of a victim that does what it is to do.
const LONGEST_LIFE: Duration = Duration::from_millis(30);

/// One in so many is killed at a time that knows nothing of what it does: while
/// it starts, or attaches.
const UNSEEN: u64 = 8;

/// Bytes of a frame in the daemon, of a connection in the stack, and of a place
/// for a socket that is taken for ever.
const FRAME_BYTES: u64 = 2048;
const CONNECTION_BYTES: u64 = 416;

/// What came of it.
pub(super) struct Killed {
    pub(super) honest: Honest,
    /// By what they did.
    pub(super) states: BTreeMap<&'static str, u64>,
    pub(super) before: Rest,
    pub(super) after: Rest,
}

impl Killed {
    pub(super) fn kills(&self) -> u64 {
        self.states.values().sum()
    }

    /// Memory that did not come back. What the daemon has of its own may grow by
    /// a slack: what is in use does not lie as close as it did.
    pub(super) fn leaked_bytes(&self) -> u64 {
        let Self { before, after, .. } = self;
        let frames = before.frames_available.saturating_sub(after.frames_available) as u64;
        let tcp = after.tcp_memory_bytes.saturating_sub(before.tcp_memory_bytes) as u64;
        let connections = after.connections.saturating_sub(before.connections) as u64;
        let resident = after.resident_bytes.saturating_sub(before.resident_bytes);
        frames * FRAME_BYTES
            + tcp
            + connections * CONNECTION_BYTES
            + resident.saturating_sub(RESIDENT_SLACK_BYTES)
    }

    /// Descriptors and applications that did not go away.
    pub(super) fn left(&self) -> [usize; 2] {
        let Self { before, after, .. } = self;
        [after.descriptors.saturating_sub(before.descriptors), after.applications]
    }
}

/// Kills a few to warm up, then as many as were asked for.
pub(super) fn run(site: &Site, config: &ChaosConfig) -> Result<Killed, LabError> {
    let warm_up = (config.kills / 5).clamp(AT_ONCE, 200);
    let honest = Honest::default();
    kill(site, &honest, warm_up, config.seed ^ u64::MAX)?;
    let before = site.rest(0)?;
    eprintln!("warm: {before:?}");
    let states = kill(site, &honest, config.kills, config.seed)?;
    let after = site.rest(before.frames_available)?;
    eprintln!("after {} kills: {after:?}", config.kills);
    Ok(Killed { honest, states, before, after })
}

fn kill(
    site: &Site,
    honest: &Honest,
    kills: u64,
    seed: u64,
) -> Result<BTreeMap<&'static str, u64>, LabError> {
    let states = Mutex::new(BTreeMap::new());
    let begun = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let listeners: Vec<SocketAddr> = (0..AT_ONCE)
        .flat_map(|place| [0, 1].map(|family| SocketAddr::new(own(family), port(place))))
        .collect();
    beside(site, honest, || {
        thread::scope(|scope| {
            let _stop_visits = StopAtEnd(&stop);
            scope.spawn(|| site.pair.a.namespace.enter(|| visit(&listeners, &stop)));
            let killers: Vec<_> = (0..AT_ONCE)
                .map(|place| {
                    let (begun, states) = (&begun, &states);
                    scope.spawn(move || kill_one_by_one(site, place, kills, seed, begun, states))
                })
                .collect();
            killers.into_iter().try_for_each(|killer| {
                killer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    })?;
    Ok(states.into_inner().unwrap_or_default())
}

fn port(place: u64) -> u16 {
    PORTS + place as u16
}

fn kill_one_by_one(
    site: &Site,
    place: u64,
    kills: u64,
    seed: u64,
    begun: &AtomicU64,
    states: &Mutex<BTreeMap<&'static str, u64>>,
) -> Result<(), LabError> {
    let socket = site.socket();
    loop {
        let number = begun.fetch_add(1, Ordering::Relaxed);
        if number >= kills {
            return Ok(());
        }
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(number);
        let mut chance = fastrand::Rng::with_seed(seed);
        let state = State::VICTIMS[chance.usize(..State::VICTIMS.len())];
        let mut victim = Victim::start(state, &socket, port(place), seed)?;
        let is_unseen = chance.u64(..UNSEEN) == 0;
        if !is_unseen {
            victim.wait_until_begun(state)?;
        }
        thread::sleep(LONGEST_LIFE.mul_f64(chance.f64()));
        drop(victim);
        let name = if is_unseen { "any" } else { state.name() };
        if let Ok(mut states) = states.lock() {
            *states.entry(name).or_default() += 1;
        }
        if number % 100 == 99 {
            // A daemon that has ended ends this.
            let report = site.report()?;
            eprintln!("{} killed, {} attached", number + 1, report.applications.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_come_back_is_counted() {
        let before = Rest {
            applications: 0,
            connections: 0,
            frames_available: 100,
            tcp_memory_bytes: 0,
            resident_bytes: 1 << 20,
            descriptors: 10,
        };
        let of = |after| Killed {
            honest: Honest::default(),
            states: BTreeMap::from([("idle", 2), ("any", 1)]),
            before,
            after,
        };
        let grown = before.resident_bytes + RESIDENT_SLACK_BYTES;
        let same = of(Rest { frames_available: 101, resident_bytes: grown, ..before });
        assert_eq!((same.leaked_bytes(), same.left(), same.kills()), (0, [0, 0], 3));
        let leaky = of(Rest {
            applications: 1,
            connections: 2,
            frames_available: 99,
            tcp_memory_bytes: 5,
            resident_bytes: grown + 7,
            descriptors: 13,
        });
        assert_eq!(leaky.leaked_bytes(), FRAME_BYTES + 5 + 2 * CONNECTION_BYTES + 7);
        assert_eq!(leaky.left(), [3, 1]);
    }
}
