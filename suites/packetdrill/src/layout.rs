//! Order of TCP options on the wire.
//!
//! No RFC fixes the order and the padding of options, but packetdrill compares them byte by byte.
//! Sent segments get the order of the system that the script was written for. No option is added
//! or removed, and no value is changed.

use tidegate_wire::tcp::TcpOption;
use tidegate_wire::{Ipv4Header, Ipv6Header, Protocol, TcpHeader};

use crate::profile::System;

/// Options of one segment, each as its bytes without padding.
#[derive(Default)]
struct OptionParts {
    mss: Vec<u8>,
    scale: Vec<u8>,
    sack_permitted: Vec<u8>,
    timestamps: Vec<u8>,
    sack: Vec<u8>,
}

impl OptionParts {
    fn parse(header: &TcpHeader, segment: &[u8]) -> Option<Self> {
        let mut parts = Self::default();
        for option in header.options(segment) {
            match option.ok()? {
                TcpOption::MaximumSegmentSize(size) => {
                    parts.mss = [&[2, 4], &size.to_be_bytes()[..]].concat();
                }
                TcpOption::WindowScale(shift) => parts.scale = vec![3, 3, shift],
                TcpOption::SackPermitted => parts.sack_permitted = vec![4, 2],
                TcpOption::Timestamps { value, echo } => {
                    parts.timestamps =
                        [&[8, 10], &value.to_be_bytes()[..], &echo.to_be_bytes()[..]].concat();
                }
                TcpOption::Sack(blocks) => {
                    let edges: Vec<u8> = blocks
                        .flat_map(|(start, end)| [start.to_be_bytes(), end.to_be_bytes()].concat())
                        .collect();
                    parts.sack = [&[5, 2 + edges.len() as u8], &edges[..]].concat();
                }
                TcpOption::Other(..) => return None,
            }
        }
        Some(parts)
    }

    fn linux(&self) -> Vec<u8> {
        let mut bytes = self.mss.clone();
        if !self.timestamps.is_empty() && !self.sack_permitted.is_empty() {
            bytes.extend(self.sack_permitted.iter().chain(&self.timestamps));
        } else {
            for part in [&self.timestamps, &self.sack_permitted] {
                if !part.is_empty() {
                    bytes.extend([&[1, 1], &part[..]].concat());
                }
            }
        }
        if !self.scale.is_empty() {
            bytes.extend([&[1], &self.scale[..]].concat());
        }
        if !self.sack.is_empty() {
            bytes.extend([&[1, 1], &self.sack[..]].concat());
        }
        bytes
    }

    /// FreeBSD aligns each option for itself and ends the list with zeros.
    fn freebsd(&self) -> Vec<u8> {
        let mut bytes = self.mss.clone();
        if !self.scale.is_empty() {
            bytes.push(1);
            bytes.extend(&self.scale);
        }
        bytes.extend(&self.sack_permitted);
        for part in [&self.timestamps, &self.sack] {
            if !part.is_empty() {
                while bytes.len() % 4 != 2 {
                    bytes.push(1);
                }
                bytes.extend(part);
            }
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }
}

/// Returns `packet` with its TCP options in the order of `system`.
pub fn reorder(packet: Vec<u8>, system: System) -> Vec<u8> {
    let reordered = reorder_known(&packet, system);
    reordered.unwrap_or(packet)
}

fn reorder_known(packet: &[u8], system: System) -> Option<Vec<u8>> {
    let (ip_bytes, pseudo) = match packet.first()? >> 4 {
        4 => {
            let (header, _) = Ipv4Header::parse(packet).ok()?;
            (header.protocol == Protocol::TCP).then_some(())?;
            (usize::from(packet[0] & 15) * 4, packet[12..20].to_vec())
        }
        _ => {
            let (header, _) = Ipv6Header::parse(packet).ok()?;
            (header.next_header == Protocol::TCP).then_some(())?;
            (40, packet[8..40].to_vec())
        }
    };
    let segment = &packet[ip_bytes..];
    let (header, _) = TcpHeader::parse(segment).ok()?;
    let parts = OptionParts::parse(&header, segment)?;
    let options = match system {
        System::Linux => parts.linux(),
        System::FreeBsd => parts.freebsd(),
    };
    let header_bytes = usize::from(segment[12] >> 4) * 4;
    let mut bytes = packet[..ip_bytes + 20].to_vec();
    bytes.extend(&options);
    bytes.extend(&segment[header_bytes..]);
    bytes[ip_bytes + 12] = ((20 + options.len()) as u8 / 4) << 4 | segment[12] & 15;
    finish(&mut bytes, ip_bytes, &pseudo);
    Some(bytes)
}

/// Sets the lengths and checksums of a changed packet.
fn finish(bytes: &mut [u8], ip_bytes: usize, pseudo: &[u8]) {
    let total = bytes.len();
    match ip_bytes {
        40 if bytes[0] >> 4 == 6 => {
            bytes[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes());
        }
        _ => {
            bytes[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            bytes[10..12].fill(0);
            let sum = internet_checksum(&[&bytes[..ip_bytes]]);
            bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    }
    let segment = &mut bytes[ip_bytes..];
    segment[16..18].fill(0);
    let length = (segment.len() as u32).to_be_bytes();
    let sum = internet_checksum(&[pseudo, &length, &[0, 0, 0, 6], segment]);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
}

/// Internet checksum (RFC 1071) of parts of even length; the last part may be odd.
fn internet_checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
