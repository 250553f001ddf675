//! Admission control for servers on the kernel's own stack.
//!
//! The server needs no change. A BPF program on the interface drops frames that are not
//! admitted. The admitted rates follow the load of the kernel's queues ([`load`]). This is the
//! hybrid of Farias (2023): the kernel's TCP and UDP behind the gate of Tidegate.

pub mod load;
mod queues;

use std::io;

use tidegate_device::xdp::{AttachMode, XdpError, XdpGuard};
use tidegate_gate::admission::{
    Admission, Class, Config, Match, NumberRange, ProtocolMatch, SourceId,
};
use tidegate_wire::IpCidr;

use crate::admission::{AdmissionError, install_classes, update_limits};
use load::KernelLoad;
pub use queues::WatchedPort;

/// Error of setting up a guard.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The BPF program cannot be loaded or attached.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// The admission classes are invalid or too many.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The load of the kernel's queues cannot be read.
    #[error("cannot read the load of the kernel's queues: {0}; is /proc mounted?")]
    Load(#[source] io::Error),
}

/// Interval of learning sources while nothing is refused.
const LEARN_INTERVAL_NS: u64 = 250_000_000;

/// Guard attached to an interface. It is detached on drop and when the process ends in any way.
pub struct KernelGuard {
    program: XdpGuard,
    admission: Admission,
    load: KernelLoad,
    native: bool,
    next_learn_ns: u64,
}

impl KernelGuard {
    /// Attaches a guard to an interface of the calling thread's network namespace.
    ///
    /// The sockets on the ports `watch` measure overload. The seed keys hash functions and should
    /// be secret.
    ///
    /// # Errors
    /// See [`GuardError`]; nothing is left behind.
    pub fn attach(
        interface: &str,
        mode: AttachMode,
        config: &Config,
        watch: &[WatchedPort],
        seed: [u8; 16],
    ) -> Result<Self, GuardError> {
        let mut admission = Admission::new(config, seed).map_err(AdmissionError::from)?;
        let load = KernelLoad::open(watch.to_vec()).map_err(GuardError::Load)?;
        let mut program = XdpGuard::load()?;
        install_classes(&mut admission, &mut program).map_err(AdmissionError::from)?;
        let native = program.attach(interface, mode)?;
        Ok(Self { program, admission, load, native, next_learn_ns: 0 })
    }

    /// Measures the kernel's load and adjusts the admitted rates. To be called about every
    /// [`Config::PERIOD_NS`].
    ///
    /// # Errors
    /// If the kernel's counters cannot be read, or the kernel rejects the limits.
    pub fn step(&mut self, now_ns: u64) -> io::Result<()> {
        let pressure = self.load.read(self.admission.is_limiting())?;
        let learn = now_ns >= self.next_learn_ns || self.next_learn_ns - now_ns > LEARN_INTERVAL_NS;
        if learn && !self.admission.is_limiting() {
            self.next_learn_ns = now_ns.saturating_add(LEARN_INTERVAL_NS);
            let admission = &mut self.admission;
            self.program.take_seen(|source| admission.learn_source(SourceId::from_bits(source)))?;
        }
        update_limits(&mut self.admission, now_ns, &pressure, &mut self.program)
    }

    /// Replaces the classes. Sources have to become known again, and counters begin anew.
    ///
    /// # Errors
    /// If the classes are invalid, or the kernel refuses them.
    pub fn set_classes(&mut self, config: &Config, seed: [u8; 16]) -> Result<(), GuardError> {
        let mut admission = Admission::new(config, seed).map_err(AdmissionError::from)?;
        install_classes(&mut admission, &mut self.program).map_err(AdmissionError::from)?;
        self.admission = admission;
        Ok(())
    }

    /// The admission controller, with its counters.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// True if the BPF program runs in the driver (native mode).
    pub fn is_native(&self) -> bool {
        self.native
    }
}

/// Admission classes for a server on the ports `watch`: trusted sources first, then known
/// sources, unknown sources last. Other traffic is exempt.
pub fn policy(watch: &[WatchedPort], trusted: &[IpCidr]) -> Config {
    let matches = |base: Match| -> Vec<Match> {
        let ports = watch.iter().map(|watch| {
            let port = u32::from(watch.port);
            watch.protocol_match(base).port(NumberRange { low: port, high: port })
        });
        // A fragment does not show its port: one rule per protocol.
        let first = |tcp| watch.iter().find(move |watch| watch.is_tcp() == tcp);
        let fragments = [false, true].into_iter().filter_map(first);
        let fragments = fragments.map(|watch| watch.protocol_match(base).port(NumberRange::NONE));
        ports.chain(fragments).collect()
    };
    let class = |name: &str, rules, rank, guaranteed_pps| {
        Class::new(name).rules(rules).rank(rank).guaranteed_pps(guaranteed_pps)
    };
    let mut classes = Vec::new();
    if !trusted.is_empty() {
        let from = |&source| matches(Match::default().source(source));
        classes.push(class("trusted", trusted.iter().flat_map(from).collect(), 0, 0));
    }
    classes.push(class("known", matches(Match::default().known(true)), 1, 0));
    classes.push(class("unknown", matches(Match::default()), 2, 100));
    classes.push(class("rest", Vec::new(), 0, 0).exempt(true));
    Config::default().classes(classes)
}

impl WatchedPort {
    fn protocol_match(self, base: Match) -> Match {
        let protocol = if self.is_tcp() { ProtocolMatch::TCP } else { ProtocolMatch::UDP };
        base.protocol(protocol)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_gate::admission::{PacketKind, PacketMeta};
    use tidegate_wire::Protocol;

    #[test]
    fn policy_covers_only_watched_ports_and_their_fragments() {
        let watch: Vec<WatchedPort> =
            ["udp/53", "tcp/53", "udp/54"].map(|text| text.parse().unwrap()).into();
        let trusted = ["192.0.2.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
        let config = policy(&watch, &trusted);
        let mut admission = Admission::new(&config, [1; 16]).unwrap();
        let names: Vec<_> = admission.classes().names().map(str::to_owned).collect();
        assert_eq!(names, ["trusted", "known", "unknown", "rest"]);
        admission.confirm(SourceId::from_address("198.51.100.1".parse().unwrap()));
        for (source, protocol, destination_port, class) in [
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
            let meta = PacketMeta {
                kind: PacketKind::Ip(protocol),
                source,
                destination_port,
                packet_bytes: 60,
                payload: &[],
            };
            assert_eq!(admission.classify(&meta), class, "{meta:?}");
        }
    }
}
