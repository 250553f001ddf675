//! Which frames to take, and the same as keys of the program's maps.

use std::net::IpAddr;

use crate::steering::{Protocol, Rule};

impl Protocol {
    const fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }
    }
}

/// What to take from an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steering {
    /// What to take; nothing at first.
    pub rules: Vec<Rule>,
    /// Frames of which VLAN (IEEE 802.1Q) the rules are for; `None` is
    /// untagged ones. Not asked about by [`Rule::Everything`].
    pub vlan: Option<u16>,
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

impl Steering {
    /// Takes every frame.
    pub fn everything() -> Self {
        Self { rules: vec![Rule::Everything], vlan: None }
    }

    /// `limiting` says whether what is taken has to be admitted first, `holding`
    /// whether it is dropped where nobody takes it.
    pub(super) fn settings(&self, limiting: bool, holding: bool) -> SettingsValue {
        let admission = if limiting { STEER_ADMISSION } else { 0 };
        let fate = if holding { STEER_HOLDING } else { 0 };
        let flags = self.rules.iter().fold(admission | fate, |flags, rule| flags | rule.flag());
        [flags, u32::from(self.vlan.unwrap_or(0))]
    }
}

impl Rule {
    fn flag(&self) -> u32 {
        match self {
            Rule::Everything => STEER_EVERYTHING,
            Rule::Address(_) => STEER_ADDRESSES,
            Rule::Port { address: Some(_), .. } => STEER_PORTS_OF_ADDRESS,
            Rule::Port { address: None, .. } => STEER_PORTS_OF_ANY,
        }
    }

    /// The rule's key in the map of addresses.
    pub(super) fn address_key(&self) -> Option<AddressKey> {
        let Rule::Address(address) = *self else { return None };
        let mut key = [0; 20];
        let (bytes, family) = key.split_at_mut(16);
        family.copy_from_slice(&u32::from(put_address(bytes, address)).to_ne_bytes());
        Some(key)
    }

    /// The rule's keys in the map of ports: one, or one for each family.
    pub(super) fn port_keys(&self) -> impl Iterator<Item = PortKey> + use<> {
        let mut keys = [None, None];
        match *self {
            Rule::Port { protocol, address: Some(address), port } => {
                let mut key = [0; 20];
                let family = put_address(&mut key[..16], address);
                put_port(&mut key, protocol, port, family);
                keys[0] = Some(key);
            }
            Rule::Port { protocol, address: None, port } => {
                keys = [4, 6].map(|family| {
                    let mut key = [0; 20];
                    put_port(&mut key, protocol, port, family);
                    Some(key)
                });
            }
            Rule::Address(_) | Rule::Everything => {}
        }
        keys.into_iter().flatten()
    }
}

/// Writes an address as the program compares it and returns its family.
fn put_address(to: &mut [u8], address: IpAddr) -> u8 {
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

fn put_port(key: &mut PortKey, protocol: Protocol, port: u16, family: u8) {
    key[16..18].copy_from_slice(&port.to_be_bytes());
    key[18] = protocol.number();
    key[19] = family;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_laid_out_as_the_program_reads_them() {
        let address = "10.1.2.3".parse().unwrap();
        let key = Rule::Address(address).address_key().unwrap();
        assert_eq!(key[..5], [10, 1, 2, 3, 0]);
        assert_eq!(u32::from_ne_bytes(key[16..].try_into().unwrap()), 4);

        let rule =
            Rule::Port { protocol: Protocol::Udp, address: "2001:db8::1".parse().ok(), port: 53 };
        let keys: Vec<_> = rule.port_keys().collect();
        assert_eq!(keys.len(), 1);
        assert_eq!(keys[0][..4], [0x20, 0x01, 0x0d, 0xb8]);
        assert_eq!(keys[0][15..], [1, 0, 53, 17, 6]);
        assert!(rule.address_key().is_none());
    }

    #[test]
    fn a_port_of_any_address_is_one_key_for_each_family() {
        let rule = Rule::Port { protocol: Protocol::Tcp, address: None, port: 443 };
        let keys: Vec<_> = rule.port_keys().collect();
        assert_eq!(keys.len(), 2);
        assert!(keys.iter().all(|key| key[..16] == [0; 16] && key[16..19] == [1, 187, 6]));
        assert_eq!((keys[0][19], keys[1][19]), (4, 6));
    }

    #[test]
    fn the_settings_say_which_maps_to_ask() {
        let port = |address| Rule::Port { protocol: Protocol::Udp, address, port: 53 };
        let address = "192.0.2.1".parse().unwrap();
        let cases = [
            (vec![], 0),
            (vec![Rule::Everything], STEER_EVERYTHING),
            (vec![Rule::Address(address)], STEER_ADDRESSES),
            (vec![port(Some(address))], STEER_PORTS_OF_ADDRESS),
            (vec![port(None), Rule::Address(address)], STEER_PORTS_OF_ANY | STEER_ADDRESSES),
        ];
        for (rules, flags) in cases {
            let steering = Steering { rules, vlan: Some(7) };
            assert_eq!(steering.settings(false, false), [flags, 7]);
            assert_eq!(steering.settings(false, true), [flags | STEER_HOLDING, 7]);
            assert_eq!(steering.settings(true, false), [flags | STEER_ADMISSION, 7]);
        }
    }
}
