//! The fast checksum against a direct implementation of RFC 1071.

use tidegate_wire::Sum;
use tidegate_wire::checksum::{pseudo_header_v4, pseudo_header_v6, update};

/// Runs one input: the first two bytes give the offsets that cut the rest in three.
pub fn check(input: &[u8]) {
    let [a, b, data @ ..] = input else { return };
    let (a, b) = (usize::from(*a).min(data.len()), usize::from(*b).min(data.len()));
    let (a, b) = (a.min(b), a.max(b));

    let naive = naive_fold(data);
    assert_eq!(Sum::of(data).fold(), naive);
    assert_eq!(Sum::of(&data[..a]).with(&data[a..b]).with(&data[b..]).fold(), naive);
    check_field(data);
    check_update(data, a & !1);
    check_pseudo_headers(data);
}

/// Asserts that the bytes followed by their checksum are valid, and by a wrong checksum
/// are not.
fn check_field(data: &[u8]) {
    let mut whole = data.to_vec();
    whole.resize(data.len().next_multiple_of(2), 0);
    let sum = Sum::of(&whole);
    if whole.iter().all(|&byte| byte == 0) {
        assert!(!sum.is_valid());
    }
    for (field, right) in
        [(sum.checksum(), true), (sum.udp_checksum(), true), (sum.checksum() ^ 0x0100, false)]
    {
        whole.extend(field.to_be_bytes());
        assert_eq!(Sum::of(&whole).is_valid(), right);
        whole.truncate(whole.len() - 2);
    }
}

/// Asserts that an update for two bytes changed at `at` equals a new sum.
fn check_update(data: &[u8], at: usize) {
    let mut changed = data.to_vec();
    let Some(word) = changed.get_mut(at..at + 2) else { return };
    let old = Sum::of(word);
    word.swap(0, 1);
    word[0] ^= 0x5a;
    let new = Sum::of(word);
    if changed.iter().all(|&byte| byte == 0) {
        // Excluded by the documentation of `update`.
        return;
    }
    let field = update(Sum::of(data).checksum(), old, new);
    changed.resize(data.len().next_multiple_of(2), 0);
    changed.extend(field.to_be_bytes());
    assert!(Sum::of(&changed).is_valid());
}

fn check_pseudo_headers(data: &[u8]) {
    if let Some((&[a, b, c, d, e, f, g, h, protocol, high, low], _)) = data.split_first_chunk() {
        let header = [a, b, c, d, e, f, g, h, 0, protocol, high, low];
        let bytes = u16::from_be_bytes([high, low]);
        let protocol = tidegate_wire::Protocol(protocol);
        let sum = pseudo_header_v4([a, b, c, d].into(), [e, f, g, h].into(), protocol, bytes);
        assert_eq!(sum.fold(), naive_fold(&header));
    }
    if let Some((addresses, &[protocol, a, b, c, d, ..])) = data.split_first_chunk::<32>() {
        let (source, destination) = addresses.split_at(16);
        let of = |octets: &[u8]| std::net::Ipv6Addr::from(*octets.first_chunk::<16>().unwrap());
        let mut header = addresses.to_vec();
        header.extend([a, b, c, d, 0, 0, 0, protocol]);
        let bytes = u32::from_be_bytes([a, b, c, d]);
        let protocol = tidegate_wire::Protocol(protocol);
        let sum = pseudo_header_v6(of(source), of(destination), protocol, bytes);
        assert_eq!(sum.fold(), naive_fold(&header));
    }
}

fn naive_fold(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}
