//! Steering rules, and their keys in the BPF program's maps.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::steering::{SteeringRule, TransportProtocol};

impl TransportProtocol {
    const fn number(self) -> u8 {
        match self {
            TransportProtocol::Tcp => 6,
            TransportProtocol::Udp => 17,
        }
    }
}

/// Frames to redirect from an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Steering {
    /// Rules; empty by default.
    pub rules: Vec<SteeringRule>,
    /// VLAN ID (IEEE 802.1Q) to which the rules apply; `None`: untagged frames. Ignored by
    /// [`SteeringRule::Everything`].
    pub vlan: Option<u16>,
}

/// Number of users of each steering rule.
#[derive(Debug, Default)]
pub(super) struct RuleUsers(HashMap<SteeringRule, usize>);

impl RuleUsers {
    /// Adds a user of a rule. Returns true if it is the first.
    pub(super) fn add(&mut self, rule: SteeringRule) -> bool {
        let users = self.0.entry(rule).or_default();
        *users += 1;
        *users == 1
    }

    /// Removes a user of a rule. Returns true if it was the last; false too if there was none.
    pub(super) fn remove(&mut self, rule: &SteeringRule) -> bool {
        match self.0.get_mut(rule) {
            Some(users) if *users > 1 => {
                *users -= 1;
                false
            }
            Some(_) => self.0.remove(rule).is_some(),
            None => false,
        }
    }
}

/// `struct settings` of the program.
pub(super) type SettingsValue = [u32; 2];
/// `struct address` of the program.
pub(super) type AddressKey = [u8; 20];
/// `struct port` of the program.
pub(super) type PortKey = [u8; 20];

const STEER_EVERYTHING: u32 = 1 << 0;
const STEER_ADDRESSES: u32 = 1 << 1;
const STEER_PORTS_OF_ADDRESS: u32 = 1 << 2;
const STEER_PORTS_OF_ANY: u32 = 1 << 3;
const STEER_ADMISSION: u32 = 1 << 4;
const STEER_HOLDING: u32 = 1 << 5;
const STEER_ALL_NODES: u32 = 1 << 6;

impl Steering {
    /// Redirects the untagged frames that match these rules.
    pub fn new(rules: impl Into<Vec<SteeringRule>>) -> Self {
        Self { rules: rules.into(), vlan: None }
    }

    /// Sets the VLAN ID to which the rules apply; `None` for untagged frames.
    pub fn vlan(self, vlan: impl Into<Option<u16>>) -> Self {
        Self { vlan: vlan.into(), ..self }
    }

    /// Redirects every frame.
    pub fn everything() -> Self {
        Self { rules: vec![SteeringRule::Everything], vlan: None }
    }

    /// Value of the settings map. `limiting`: matching frames pass admission first. `dropping`:
    /// matching frames without a socket are dropped.
    pub(super) fn settings(&self, limiting: bool, dropping: bool) -> SettingsValue {
        let admission = if limiting { STEER_ADMISSION } else { 0 };
        let no_socket = if dropping { STEER_HOLDING } else { 0 };
        let flags =
            self.rules.iter().fold(admission | no_socket, |flags, rule| flags | rule.flag());
        [flags, u32::from(self.vlan.unwrap_or(0))]
    }
}

impl SteeringRule {
    fn flag(&self) -> u32 {
        match self {
            SteeringRule::Everything => STEER_EVERYTHING,
            SteeringRule::Address(IpAddr::V4(_)) => STEER_ADDRESSES,
            SteeringRule::Address(IpAddr::V6(_)) => STEER_ADDRESSES | STEER_ALL_NODES,
            SteeringRule::Port { address: Some(_), .. } => STEER_PORTS_OF_ADDRESS,
            SteeringRule::Port { address: None, .. } => STEER_PORTS_OF_ANY,
        }
    }

    /// Key of the rule in the address map.
    pub(super) fn address_key(&self) -> Option<AddressKey> {
        let SteeringRule::Address(address) = *self else { return None };
        let mut key = [0; 20];
        let (bytes, family) = key.split_at_mut(16);
        family.copy_from_slice(&u32::from(write_address(bytes, address)).to_ne_bytes());
        Some(key)
    }

    /// Keys of the rule in the port map: one, or one per IP family.
    pub(super) fn port_keys(&self) -> impl Iterator<Item = PortKey> + use<> {
        let mut keys = [None, None];
        match *self {
            SteeringRule::Port { protocol, address: Some(address), port } => {
                let mut key = [0; 20];
                let family = write_address(&mut key[..16], address);
                write_port(&mut key, protocol, port, family);
                keys[0] = Some(key);
            }
            SteeringRule::Port { protocol, address: None, port } => {
                keys = [4, 6].map(|family| {
                    let mut key = [0; 20];
                    write_port(&mut key, protocol, port, family);
                    Some(key)
                });
            }
            SteeringRule::Address(_) | SteeringRule::Everything => {}
        }
        keys.into_iter().flatten()
    }
}

/// Writes an address in the layout of the BPF program; returns the IP version (4 or 6).
fn write_address(to: &mut [u8], address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(address) => {
            to[..4].copy_from_slice(&address.octets());
            4
        }
        IpAddr::V6(address) => {
            to[..16].copy_from_slice(&address.octets());
            6
        }
    }
}

fn write_port(key: &mut PortKey, protocol: TransportProtocol, port: u16, family: u8) {
    key[16..18].copy_from_slice(&port.to_be_bytes());
    key[18] = protocol.number();
    key[19] = family;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_lasts_until_its_last_user_leaves() {
        let port = |protocol, address: &str, port| SteeringRule::Port {
            protocol,
            address: address.parse().ok(),
            port,
        };
        let rules = [
            port(TransportProtocol::Tcp, "10.1.2.3", 53),
            port(TransportProtocol::Udp, "10.1.2.3", 53),
            port(TransportProtocol::Tcp, "2001:db8::1", 53),
            port(TransportProtocol::Tcp, "10.1.2.3", 54),
        ];
        let mut users = RuleUsers::default();
        for rule in rules {
            assert!(users.add(rule) && !users.add(rule) && !users.add(rule), "{rule:?}");
        }
        for rule in &rules {
            assert!(!users.remove(rule) && !users.remove(rule) && users.remove(rule), "{rule:?}");
            assert!(!users.remove(rule), "no user is left: {rule:?}");
            assert!(users.add(*rule));
        }
    }

    #[test]
    fn keys_match_the_layout_of_the_program() {
        let address = "10.1.2.3".parse().unwrap();
        let key = SteeringRule::Address(address).address_key().unwrap();
        assert_eq!(key[..5], [10, 1, 2, 3, 0]);
        assert_eq!(u32::from_ne_bytes(key[16..].try_into().unwrap()), 4);

        let rule = SteeringRule::Port {
            protocol: TransportProtocol::Udp,
            address: "2001:db8::1".parse().ok(),
            port: 53,
        };
        let keys: Vec<_> = rule.port_keys().collect();
        assert_eq!(keys.len(), 1);
        assert_eq!(keys[0][..4], [0x20, 0x01, 0x0d, 0xb8]);
        assert_eq!(keys[0][15..], [1, 0, 53, 17, 6]);
        assert!(rule.address_key().is_none());
    }

    #[test]
    fn port_of_any_address_has_one_key_per_family() {
        let rule =
            SteeringRule::Port { protocol: TransportProtocol::Tcp, address: None, port: 443 };
        let keys: Vec<_> = rule.port_keys().collect();
        assert_eq!(keys.len(), 2);
        assert!(keys.iter().all(|key| key[..16] == [0; 16] && key[16..19] == [1, 187, 6]));
        assert_eq!((keys[0][19], keys[1][19]), (4, 6));
    }

    #[test]
    fn settings_flags_name_the_maps_in_use() {
        let port =
            |address| SteeringRule::Port { protocol: TransportProtocol::Udp, address, port: 53 };
        let address = "192.0.2.1".parse().unwrap();
        let cases = [
            (vec![], 0),
            (vec![SteeringRule::Everything], STEER_EVERYTHING),
            (vec![SteeringRule::Address(address)], STEER_ADDRESSES),
            (
                vec![SteeringRule::Address("2001:db8::1".parse().unwrap())],
                STEER_ADDRESSES | STEER_ALL_NODES,
            ),
            (vec![port(Some(address))], STEER_PORTS_OF_ADDRESS),
            (
                vec![port(None), SteeringRule::Address(address)],
                STEER_PORTS_OF_ANY | STEER_ADDRESSES,
            ),
        ];
        for (rules, flags) in cases {
            let steering = Steering { rules, vlan: Some(7) };
            assert_eq!(steering.settings(false, false), [flags, 7]);
            assert_eq!(steering.settings(false, true), [flags | STEER_HOLDING, 7]);
            assert_eq!(steering.settings(true, false), [flags | STEER_ADMISSION, 7]);
        }
    }
}
