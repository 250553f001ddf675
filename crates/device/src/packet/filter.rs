//! Socket filters: select the frames that the kernel copies to the packet socket.
//!
//! Programs for the classic BPF machine, as packet sockets take them (linux/filter.h). The stack
//! checks every address again; the filter only saves work on frames that the stack would drop.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::ndp::solicited_node;

/// One BPF instruction: opcode, jump offsets and operand (`struct sock_filter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub code: u16,
    pub if_true: u8,
    pub if_false: u8,
    pub k: u32,
}

/// Maximum addresses of one family to match one by one. With more, all packets of the family
/// are accepted and the stack selects.
const MAX_ADDRESSES: usize = 64;

const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Program that accepts every frame, cut to its first `bytes` bytes.
pub const fn first_bytes(bytes: u32) -> [Instruction; 1] {
    [Instruction { k: bytes, ..ACCEPT }]
}

const ACCEPT: Instruction = Instruction { code: RETURN, if_true: 0, if_false: 0, k: u32::MAX };
const REJECT: Instruction = Instruction { code: RETURN, if_true: 0, if_false: 0, k: 0 };

const fn load_word(at: u32) -> Instruction {
    Instruction { code: LOAD_WORD, if_true: 0, if_false: 0, k: at }
}

const fn equal(k: u32, if_true: u8, if_false: u8) -> Instruction {
    Instruction { code: JUMP_IF_EQUAL, if_true, if_false, k }
}

/// A program that accepts the frames for a host with these addresses on an Ethernet link: IPv4
/// and IPv6 packets to the addresses, ARP from or to them, and the neighbour discovery groups
/// that the addresses are members of (RFC 4291 section 2.8).
///
/// The kernel removes VLAN tags before filters run, so offsets do not move.
pub fn for_addresses(addresses: &[IpAddr]) -> Vec<Instruction> {
    let v4: BTreeSet<_> = addresses.iter().filter_map(only_v4).collect();
    let mut v6: BTreeSet<_> = addresses.iter().filter_map(only_v6).collect();
    if !v6.is_empty() {
        v6.extend(v6.clone().into_iter().map(solicited_node));
        v6.insert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
    }
    let sections = [
        (0x0806, match_words(&v4, &[ARP_SENDER, ARP_TARGET])),
        (0x0800, match_words(&v4, &[IPV4_DESTINATION])),
        (0x86dd, match_v6(&v6)),
    ];
    let mut program = vec![Instruction { code: LOAD_HALF, if_true: 0, if_false: 0, k: ETHER_TYPE }];
    for (ether_type, section) in sections {
        program.push(equal(ether_type, 1, 0));
        // Jumps over the section, which may be longer than a conditional jump can reach.
        program.push(Instruction { code: JUMP, if_true: 0, if_false: 0, k: section.len() as u32 });
        program.extend(section);
    }
    program.push(REJECT);
    program
}

// Offsets in an Ethernet frame.
const ETHER_TYPE: u32 = 12;
const ARP_SENDER: u32 = 28;
const ARP_TARGET: u32 = 38;
const IPV4_DESTINATION: u32 = 30;
const IPV6_DESTINATION: u32 = 38;

fn only_v4(address: &IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    }
}

fn only_v6(address: &IpAddr) -> Option<Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(*v6),
    }
}

/// Accepts when the word at one of the offsets is one of the addresses.
fn match_words(addresses: &BTreeSet<Ipv4Addr>, offsets: &[u32]) -> Vec<Instruction> {
    let mut section = Vec::new();
    if addresses.len() > MAX_ADDRESSES {
        return vec![ACCEPT];
    }
    for &offset in offsets {
        section.push(load_word(offset));
        for &address in addresses {
            section.extend([equal(address.into(), 0, 1), ACCEPT]);
        }
    }
    section.push(REJECT);
    section
}

/// Accepts when the IPv6 destination is one of the addresses.
fn match_v6(addresses: &BTreeSet<Ipv6Addr>) -> Vec<Instruction> {
    let mut section = Vec::new();
    if addresses.len() > 2 * MAX_ADDRESSES {
        return vec![ACCEPT];
    }
    for address in addresses {
        let bits = u128::from(*address);
        // Last word first: it differs most often, so most comparisons end there.
        for word in [3u8, 2, 1, 0] {
            let value = (bits >> (96 - 32 * u32::from(word))) as u32;
            let to_next_address = 2 * word + 1;
            section.push(load_word(IPV6_DESTINATION + 4 * u32::from(word)));
            section.push(equal(value, 0, to_next_address));
        }
        section.push(ACCEPT);
    }
    section.push(REJECT);
    section
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a program as the kernel would.
    fn accepts(program: &[Instruction], frame: &[u8]) -> bool {
        let (mut at, mut register) = (0, 0);
        loop {
            let i = program[at];
            at += 1;
            let byte = |k: usize| frame.get(i.k as usize + k).copied().map(u32::from);
            match i.code {
                LOAD_WORD => match (byte(0), byte(1), byte(2), byte(3)) {
                    (Some(a), Some(b), Some(c), Some(d)) => {
                        register = a << 24 | b << 16 | c << 8 | d;
                    }
                    _ => return false,
                },
                LOAD_HALF => match (byte(0), byte(1)) {
                    (Some(a), Some(b)) => register = a << 8 | b,
                    _ => return false,
                },
                JUMP => at += i.k as usize,
                JUMP_IF_EQUAL => {
                    at += usize::from(if register == i.k { i.if_true } else { i.if_false });
                }
                RETURN => return i.k != 0,
                other => panic!("no such instruction: {other}"),
            }
        }
    }

    fn frame(ether_type: u16, offset: usize, address: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&ether_type.to_be_bytes());
        frame[offset..offset + address.len()].copy_from_slice(address);
        frame
    }

    fn v4_to(address: Ipv4Addr) -> Vec<u8> {
        frame(0x0800, 30, &address.octets())
    }

    fn v6_to(address: Ipv6Addr) -> Vec<u8> {
        frame(0x86dd, 38, &address.octets())
    }

    #[test]
    fn accepts_only_frames_for_the_addresses() {
        let (v4, v6) = (Ipv4Addr::new(192, 0, 2, 1), "2001:db8::1:2:3".parse().unwrap());
        let program = for_addresses(&[v4.into(), IpAddr::V6(v6)]);
        assert!(accepts(&program, &v4_to(v4)));
        assert!(!accepts(&program, &v4_to(Ipv4Addr::new(192, 0, 2, 2))));
        assert!(
            accepts(&program, &frame(0x0806, 38, &v4.octets())),
            "ARP request for an own address"
        );
        assert!(
            accepts(&program, &frame(0x0806, 28, &v4.octets())),
            "ARP from a host with the same address"
        );
        assert!(!accepts(&program, &frame(0x0806, 38, &[192, 0, 2, 2])), "ARP for another address");
        assert!(accepts(&program, &v6_to(v6)));
        assert!(accepts(&program, &v6_to("ff02::1:ff02:3".parse().unwrap())), "solicited node");
        assert!(accepts(&program, &v6_to("ff02::1".parse().unwrap())), "all nodes");
        assert!(!accepts(&program, &v6_to("2001:db8::2:2:3".parse().unwrap())));
        assert!(!accepts(&program, &v6_to("ff02::fb".parse().unwrap())), "group not joined");
        assert!(!accepts(&program, &frame(0x88cc, 14, &[])), "another protocol");
        assert!(!accepts(&program, &[0; 13]), "truncated header");
    }

    #[test]
    fn single_family_filter_rejects_the_other_family() {
        let program = for_addresses(&["192.0.2.1".parse().unwrap()]);
        assert!(!accepts(&program, &v6_to("ff02::1".parse().unwrap())));
        let program = for_addresses(&["2001:db8::1".parse().unwrap()]);
        assert!(!accepts(&program, &v4_to(Ipv4Addr::new(192, 0, 2, 1))));
    }

    proptest! {
        #[test]
        fn every_address_is_accepted_and_the_kernel_s_limit_kept(
            v4 in proptest::collection::vec(any::<u32>(), 0..100),
            v6 in proptest::collection::vec(any::<u128>(), 0..100),
            others: (u32, u128),
        ) {
            let addresses: Vec<IpAddr> = v4.iter().map(|&bits| Ipv4Addr::from(bits).into())
                .chain(v6.iter().map(|&bits| Ipv6Addr::from(bits).into()))
                .collect();
            let program = for_addresses(&addresses);
            // BPF_MAXINSNS.
            prop_assert!(program.len() <= 4096);
            for &bits in &v4 {
                prop_assert!(accepts(&program, &v4_to(bits.into())));
            }
            for &bits in &v6 {
                prop_assert!(accepts(&program, &v6_to(bits.into())));
                prop_assert!(accepts(&program, &v6_to(solicited_node(bits.into()))));
            }
            if v4.len() <= MAX_ADDRESSES && !v4.contains(&others.0) {
                prop_assert!(!accepts(&program, &v4_to(others.0.into())));
            }
            if v6.len() < MAX_ADDRESSES && !v6.contains(&others.1)
                && others.1 >> 112 != 0xff02
            {
                prop_assert!(!accepts(&program, &v6_to(others.1.into())));
            }
        }
    }
}
