//! Rules that sort packets to send into classes.

use std::net::IpAddr;

use tidegate_wire::{IpCidr, Protocol};

use crate::admission::{NumberRange, PacketKind, ProtocolMatch};

/// Largest differentiated services code point (RFC 2474).
pub(super) const MAX_DSCP: u8 = 63;

/// Program that a daemon serves.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Name of its executable, as in the kernel's `comm`.
    pub name: &'a str,
    /// Number of its user.
    pub user: u32,
}

/// Metadata of a packet to send, as far as rules match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketMeta {
    /// Protocol above IP.
    pub protocol: Protocol,
    /// Local port of UDP or TCP; `None` for fragments and other protocols.
    pub local_port: Option<u16>,
    /// Destination address.
    pub destination: IpAddr,
    /// Differentiated services code point.
    pub dscp: u8,
}

/// Conditions of a rule. All conditions that are present must hold; absent conditions match every
/// packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields, rename_all = "kebab-case"))]
#[non_exhaustive]
#[must_use]
pub struct Match {
    /// Protocol.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub protocol: Option<ProtocolMatch>,
    /// Range of local ports of UDP or TCP.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub local_port: Option<NumberRange>,
    /// Destination network.
    #[cfg_attr(
        feature = "serde",
        serde(with = "crate::serialize::cidr", skip_serializing_if = "Option::is_none")
    )]
    pub destination: Option<IpCidr>,
    /// Differentiated services code point, as the program has set it.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub dscp: Option<u8>,
    /// Name of the program, as the kernel knows it; only a daemon knows its programs.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub program: Option<String>,
    /// Number of the user whose program it is; only a daemon knows its programs.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub user: Option<u32>,
}

impl Match {
    /// Sets the protocol; `None` matches every protocol.
    pub fn protocol(self, protocol: impl Into<Option<ProtocolMatch>>) -> Self {
        Self { protocol: protocol.into(), ..self }
    }

    /// Sets the range of local ports; `None` matches every packet.
    pub fn local_port(self, local_port: impl Into<Option<NumberRange>>) -> Self {
        Self { local_port: local_port.into(), ..self }
    }

    /// Sets the destination network; `None` matches every destination.
    pub fn destination(self, destination: impl Into<Option<IpCidr>>) -> Self {
        Self { destination: destination.into(), ..self }
    }

    /// Sets the code point; `None` matches every packet.
    pub fn dscp(self, dscp: impl Into<Option<u8>>) -> Self {
        Self { dscp: dscp.into(), ..self }
    }

    /// Sets the name of the program; `None` matches every program.
    pub fn program(self, program: impl Into<Option<String>>) -> Self {
        Self { program: program.into(), ..self }
    }

    /// Sets the number of the user; `None` matches every user.
    pub fn user(self, user: impl Into<Option<u32>>) -> Self {
        Self { user: user.into(), ..self }
    }

    /// Describes a mistake in the conditions; `None` if there is none.
    pub(super) fn fault(&self) -> Option<String> {
        if self.protocol == Some(ProtocolMatch::NEIGHBOUR) {
            return Some("neighbour discovery always goes first: leave the rule out".into());
        }
        if let Some(port) = self.local_port
            && port.high > 65_535
        {
            return Some(format!("local-port {port} is invalid: write a port or a range of ports"));
        }
        if self.dscp.is_some_and(|dscp| dscp > MAX_DSCP) {
            return Some(format!("dscp is a number from 0 to {MAX_DSCP}"));
        }
        None
    }

    fn names_program(&self) -> bool {
        self.program.is_some() || self.user.is_some()
    }

    fn is_of(&self, program: Program<'_>) -> bool {
        self.program.as_deref().is_none_or(|name| name == program.name)
            && self.user.is_none_or(|user| user == program.user)
    }

    /// True if all conditions but those on the program hold.
    fn matches(&self, packet: &PacketMeta) -> bool {
        self.protocol.is_none_or(|protocol| protocol.matches(packet.kind()))
            && self.local_port.is_none_or(|range| {
                packet.local_port.is_some_and(|port| range.contains(port.into()))
            })
            && self.destination.is_none_or(|network| network.contains(packet.destination))
            && self.dscp.is_none_or(|dscp| dscp == packet.dscp)
    }
}

impl PacketMeta {
    fn kind(&self) -> PacketKind {
        match self.protocol {
            Protocol::ICMPV4 | Protocol::ICMPV6 => PacketKind::Icmp,
            protocol => PacketKind::Ip(protocol),
        }
    }
}

/// Rules of all classes in matching order.
#[derive(Clone, Debug, Default)]
pub struct RuleSet {
    rules: Vec<(u8, Match)>,
    default_class: u8,
}

impl RuleSet {
    /// `rules` with the class of each; packets that match none are in `default_class`.
    pub(super) fn new(rules: Vec<(u8, Match)>, default_class: u8) -> Self {
        Self { rules, default_class }
    }

    /// True if a rule names a program or a user.
    pub fn names_programs(&self) -> bool {
        self.rules.iter().any(|(_, rule)| rule.names_program())
    }

    /// Rules whose conditions on the program hold, as bits, for [`RuleSet::class_of`]. Without a
    /// program these are the rules that name none.
    pub fn rules_of(&self, program: Option<Program<'_>>) -> u32 {
        let holds = |rule: &Match| match program {
            Some(program) => rule.is_of(program),
            None => !rule.names_program(),
        };
        let numbered = self.rules.iter().enumerate();
        numbered.fold(0, |bits, (at, (_, rule))| bits | u32::from(holds(rule)) << at)
    }

    /// Class of a packet. `rules` are those of the sending program ([`RuleSet::rules_of`]).
    pub fn class_of(&self, packet: &PacketMeta, rules: u32) -> u8 {
        let mut numbered = self.rules.iter().enumerate();
        let matching =
            numbered.find(|(at, (_, rule))| rules >> at & 1 != 0 && rule.matches(packet));
        matching.map_or(self.default_class, |(_, (class, _))| *class)
    }
}
