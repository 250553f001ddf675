//! A guard for servers on the kernel's own stack.
//!
//! The server is not changed. A BPF program on the interface drops what is not
//! admitted; what is admitted is set by how the kernel's own queues do
//! ([`signals`]). This is the hybrid of Farias (2023): the kernel's TCP and
//! UDP behind a gate of ours.

mod queues;
pub mod signals;

use std::io;

use tidegate_gate::admission::{Admission, Class, Config, Match, ProtocolMatch, Range, Source};
use tidegate_port::xdp::{Guard, Mode, XdpError};
use tidegate_wire::IpCidr;

use crate::admission::{AdmissionError, install, update};
pub use queues::Watch;
use signals::Signals;

/// Why a guard cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The program cannot be loaded or attached.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// The classes are wrong, or do not fit.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The kernel does not tell how its queues do.
    #[error("cannot read how the kernel's queues do: {0}; is /proc mounted?")]
    Signals(#[source] io::Error),
}

/// How often it is noted who sends, in calm time.
const LEARN_EVERY_NS: u64 = 250_000_000;

/// A guard that is attached. Dropping it takes it off the interface; so does
/// the end of the process, however it ends.
pub struct KernelGuard {
    program: Guard,
    admission: Admission,
    signals: Signals,
    native: bool,
    learn_at_ns: u64,
}

impl KernelGuard {
    /// Puts a guard in front of an interface of the calling thread's network
    /// namespace. `watch` are the ports whose sockets tell when too much comes.
    /// The seed should be secret.
    ///
    /// # Errors
    /// See [`GuardError`]; nothing is left behind.
    pub fn attach(
        interface: &str,
        mode: Mode,
        config: &Config,
        watch: &[Watch],
        seed: [u8; 16],
    ) -> Result<Self, GuardError> {
        let admission = Admission::new(config, seed).map_err(AdmissionError::from)?;
        let signals = Signals::open(watch.to_vec()).map_err(GuardError::Signals)?;
        let mut program = Guard::load()?;
        install(&admission, &mut program).map_err(AdmissionError::from)?;
        let native = program.attach(interface, mode)?;
        Ok(Self { program, admission, signals, native, learn_at_ns: 0 })
    }

    /// Looks how things go and sets what is admitted. To be called about every
    /// [`Config::PERIOD_NS`].
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn step(&mut self, now_ns: u64) -> io::Result<()> {
        let pressure = self.signals.read(self.admission.is_limiting())?;
        let learn = now_ns >= self.learn_at_ns || self.learn_at_ns - now_ns > LEARN_EVERY_NS;
        if learn && !self.admission.is_limiting() {
            self.learn_at_ns = now_ns.saturating_add(LEARN_EVERY_NS);
            let admission = &mut self.admission;
            self.program.take_seen(|source| admission.learn_source(Source::from_bits(source)))?;
        }
        update(&mut self.admission, now_ns, &pressure, &mut self.program)
    }

    /// What decides, with its counters.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Whether the program runs in the driver.
    pub fn is_native(&self) -> bool {
        self.native
    }
}

/// Classes for a server on these ports: friends first, then who was seen
/// before, strangers last. Everything else is left alone.
pub fn policy(watch: &[Watch], friends: &[IpCidr]) -> Config {
    let matches = |base: Match| -> Vec<Match> {
        let ports = watch.iter().map(|watch| {
            let port = u32::from(watch.port);
            Match { port: Some(Range { low: port, high: port }), ..watch.protocol_match(base) }
        });
        // Behind a fragment there may be any port: one rule for each protocol.
        let first = |tcp| watch.iter().find(move |watch| watch.is_tcp() == tcp);
        let fragments = [false, true].into_iter().filter_map(first);
        let fragments =
            fragments.map(|watch| Match { port: Some(Range::NONE), ..watch.protocol_match(base) });
        ports.chain(fragments).collect()
    };
    let class = |name: &str, rules, rank, guaranteed_pps| Class {
        name: name.into(),
        rules,
        rank,
        guaranteed_pps,
        ceiling_pps: None,
        exempt: false,
    };
    let mut classes = Vec::new();
    if !friends.is_empty() {
        let from = |&friend| matches(Match { source: Some(friend), ..Match::default() });
        classes.push(class("friends", friends.iter().flat_map(from).collect(), 0, 0));
    }
    classes.push(class("known", matches(Match { known: Some(true), ..Match::default() }), 1, 0));
    classes.push(class("strangers", matches(Match::default()), 2, 100));
    classes.push(Class { exempt: true, ..class("rest", Vec::new(), 0, 0) });
    Config { classes, ..Config::default() }
}

impl Watch {
    fn protocol_match(self, base: Match) -> Match {
        let protocol = if self.is_tcp() { ProtocolMatch::TCP } else { ProtocolMatch::UDP };
        Match { protocol: Some(protocol), ..base }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_gate::admission::{Facts, Kind};
    use tidegate_wire::Protocol;

    #[test]
    fn the_policy_covers_its_ports_and_their_fragments_and_nothing_else() {
        let watch: Vec<Watch> =
            ["udp/53", "tcp/53", "udp/54"].map(|text| text.parse().unwrap()).into();
        let friends = ["192.0.2.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
        let config = policy(&watch, &friends);
        let mut admission = Admission::new(&config, [1; 16]).unwrap();
        let names: Vec<_> = admission.classes().names().map(str::to_owned).collect();
        assert_eq!(names, ["friends", "known", "strangers", "rest"]);
        admission.confirm(Source::of("198.51.100.1".parse().unwrap()));
        for (source, protocol, port, class) in [
            ("192.0.2.7", Protocol::UDP, Some(53), 0),
            ("2001:db8::7", Protocol::TCP, Some(53), 0),
            ("198.51.100.1", Protocol::UDP, Some(54), 1),
            ("203.0.113.1", Protocol::UDP, Some(54), 2),
            ("203.0.113.1", Protocol::UDP, None, 2),
            ("203.0.113.1", Protocol::TCP, Some(54), 3),
            ("203.0.113.1", Protocol::TCP, Some(22), 3),
            ("198.51.100.1", Protocol::UDP, Some(123), 3),
        ] {
            let source = source.parse().ok();
            let facts = Facts { kind: Kind::Ip(protocol), source, port, packet_bytes: 60 };
            assert_eq!(admission.classify(&facts), class, "{facts:?}");
        }
    }
}
