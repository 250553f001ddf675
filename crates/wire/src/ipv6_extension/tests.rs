//! Tests of extension headers.

extern crate std;

use std::vec;
use std::vec::Vec;

use super::*;

const HBH: u8 = 0;
const UDP: u8 = 17;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const OPTIONS: u8 = 60;

/// Walks `bytes`; `first` is the protocol of the first header.
fn walk(first: u8, bytes: &[u8]) -> Result<UpperLayer<'_>, ExtensionError> {
    upper_layer(Protocol(first), bytes)
}

fn reason(first: u8, bytes: &[u8]) -> DropReason {
    walk(first, bytes).unwrap_err().reason
}

/// Returns an options header, padded to a multiple of 8 bytes, followed by 8 bytes of UDP.
fn options(options: &[u8]) -> Vec<u8> {
    let bytes = (2 + options.len()).next_multiple_of(8);
    let mut header = vec![UDP, (bytes / 8 - 1) as u8];
    header.extend(options);
    match bytes - header.len() {
        0 => {}
        1 => header.push(0),
        n => {
            header.extend([1, n as u8 - 2]);
            header.resize(bytes, 0);
        }
    }
    header.extend([0xee; 8]);
    header
}

fn problem(code: u8, pointer: u32, allowed_for_group: bool) -> Option<ParameterProblem> {
    Some(ParameterProblem { code, pointer, allowed_for_group })
}

#[test]
fn returns_payload_without_extension_headers() {
    let upper = walk(UDP, &[1, 2, 3]).unwrap();
    assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[1, 2, 3][..]));
    assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (40, 6));
    assert_eq!(walk(59, &[]).unwrap().protocol, Protocol::NO_NEXT_HEADER);
}

#[test]
fn walks_complete_chain_and_reports_offsets() {
    let mut bytes = router_alert_header(Protocol(OPTIONS)).to_vec();
    bytes.extend([ROUTING, 1, 0x1e, 2, 0xaa, 0xbb, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([FRAGMENT, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([UDP, 0, 0, 0, 1, 2, 3, 4]);
    bytes.extend([0xee; 8]);
    // The padding is longer than alignment requires.
    assert_eq!(reason(HBH, &bytes), DropReason::Ipv6ExtensionLimit);
    bytes[14..16].copy_from_slice(&[0x1f, 6]);
    let upper = walk(HBH, &bytes).unwrap();
    assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[0xee; 8][..]));
    assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (80, 72));
    assert!(upper.router_alert);
    assert_eq!(upper.fragment, None, "an atomic fragment is a whole packet");
}

#[test]
fn rejects_truncated_chain() {
    let mut bytes = options(&[5, 2, 0, 0, 0x1e, 3, 1, 2, 3]);
    bytes.truncate(16);
    for first in [HBH, OPTIONS] {
        for cut in 1..16 {
            assert_eq!(reason(first, &bytes[..cut]), DropReason::Ipv6ExtensionTruncated);
        }
    }
    for first in [ROUTING, FRAGMENT] {
        for cut in 0..8 {
            assert_eq!(reason(first, &[0; 8][..cut]), DropReason::Ipv6ExtensionTruncated);
        }
    }
}

#[test]
fn rejects_length_past_packet_without_wrapping() {
    for first in [HBH, OPTIONS, ROUTING] {
        assert_eq!(
            reason(first, &[UDP, 255, 0, 0, 0, 0, 0, 0]),
            DropReason::Ipv6ExtensionTruncated
        );
    }
    // In a fragment header, the same byte is reserved.
    assert!(walk(FRAGMENT, &[UDP, 255, 0, 0, 0, 0, 0, 0]).is_ok());
}

#[test]
fn rejects_hop_by_hop_header_not_first_or_repeated() {
    let twice = [HBH, 0, 1, 4, 0, 0, 0, 0, UDP, 0, 1, 4, 0, 0, 0, 0];
    let error = walk(HBH, &twice).unwrap_err();
    assert_eq!(error.reason, DropReason::Ipv6ExtensionOrder);
    assert_eq!(error.icmp_error, problem(parameter_problem::NEXT_HEADER, 40, false));
    assert_eq!(reason(OPTIONS, &twice), DropReason::Ipv6ExtensionOrder);
}

#[test]
fn limits_number_of_extension_headers() {
    let chain = |headers: usize| {
        let mut bytes = [OPTIONS, 0, 1, 4, 0, 0, 0, 0].repeat(headers);
        bytes[8 * (headers - 1)] = UDP;
        bytes
    };
    assert!(walk(OPTIONS, &chain(MAX_HEADERS)).is_ok());
    assert_eq!(reason(OPTIONS, &chain(MAX_HEADERS + 1)), DropReason::Ipv6ExtensionLimit);
    assert_eq!(reason(OPTIONS, &chain(8000)), DropReason::Ipv6ExtensionLimit);
}

#[test]
fn limits_options_and_padding() {
    let at_limit = [0x1e, 0].repeat(MAX_OPTIONS);
    assert!(walk(HBH, &options(&at_limit)).is_ok());
    assert_eq!(reason(HBH, &options(&[0x1e, 0].repeat(9))), DropReason::Ipv6ExtensionLimit);
    assert_eq!(reason(HBH, &options(&[0; 2046])), DropReason::Ipv6ExtensionLimit);
    assert_eq!(
        reason(OPTIONS, &options(&[1, 6, 0, 0, 0, 0, 0, 0])),
        DropReason::Ipv6ExtensionLimit
    );
}

#[test]
fn rejects_option_past_its_header() {
    for bad in [[5, 200, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0x1e], [0, 0, 0, 0, 0, 1]]
    {
        assert_eq!(reason(HBH, &options(&bad)), DropReason::Ipv6ExtensionTruncated, "{bad:?}");
    }
}

#[test]
fn applies_four_actions_for_unknown_options() {
    use parameter_problem::OPTION;
    for first in [HBH, OPTIONS] {
        // The option follows a router alert, at offset 40 + 2 + 4.
        let with = |kind: u8| options(&[5, 2, 0, 0, kind, 1, 0xee]);
        assert!(walk(first, &with(0x1e)).is_ok());
        for (kind, icmp_error) in
            [(0x5e, None), (0x9e, problem(OPTION, 46, true)), (0xde, problem(OPTION, 46, false))]
        {
            let bytes = with(kind);
            let error = walk(first, &bytes).unwrap_err();
            assert_eq!(error.reason, DropReason::Ipv6OptionUnknown);
            assert_eq!(error.icmp_error, icmp_error, "{kind:#x}");
        }
    }
}

#[test]
fn rejects_jumbograms() {
    assert_eq!(reason(HBH, &[]), DropReason::Ipv6Jumbogram);
    let error = walk(HBH, &[UDP, 0, 0xc2, 4, 0, 1, 0, 0]).unwrap_err();
    assert_eq!(error.reason, DropReason::Ipv6Jumbogram);
    assert_eq!(error.icmp_error, problem(parameter_problem::OPTION, 42, false));
}

#[test]
fn rejects_routing_headers_with_segments_left() {
    for kind in [0, 2, 4, 253] {
        let mut bytes = vec![UDP, 2, kind, 1];
        bytes.resize(24, 0);
        let error = walk(ROUTING, &bytes).unwrap_err();
        assert_eq!(error.reason, DropReason::Ipv6RoutingHeader);
        assert_eq!(error.icmp_error, problem(parameter_problem::HEADER_FIELD, 42, false));
        bytes[3] = 0;
        assert_eq!(walk(ROUTING, &bytes).unwrap().protocol, Protocol::UDP);
    }
}

#[test]
fn stops_at_fragment() {
    let header =
        FragmentHeader { offset_bytes: 1448, more_fragments: true, identification: 0xdead_beef };
    let mut bytes = [0xee; 24];
    header.emit(Protocol(OPTIONS), &mut bytes).unwrap();
    let upper = walk(FRAGMENT, &bytes).unwrap();
    assert_eq!(upper.fragment, Some(header));
    // The content of a later fragment is data, whatever its protocol.
    assert_eq!((upper.protocol, upper.payload), (Protocol(OPTIONS), &[0xee; 16][..]));
    assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (48, 40));
    assert!(header.emit(Protocol::UDP, &mut bytes[..7]).is_none());
}

#[test]
fn requires_complete_header_chain_in_first_fragment() {
    let first = |next: u8, rest: &[u8]| [&[next, 0, 0, 1, 0, 0, 0, 9], rest].concat();
    let incomplete = |next: u8, rest: &[u8]| {
        let bytes = first(next, rest);
        let error = walk(FRAGMENT, &bytes).unwrap_err();
        assert_eq!(error.icmp_error, problem(parameter_problem::HEADER_CHAIN, 0, false));
        error.reason == DropReason::FragmentHeaderChain
    };
    assert!(walk(FRAGMENT, &first(UDP, &[0; 8])).unwrap().fragment.is_some());
    assert!(incomplete(UDP, &[0; 7]));
    assert!(incomplete(6, &[0; 16]), "truncated TCP header");
    assert!(incomplete(58, &[]));
    assert!(incomplete(OPTIONS, &[UDP, 2, 1, 4, 0, 0, 0, 0]));
    assert!(incomplete(OPTIONS, &[UDP, 0, 1, 4, 0, 0, 0, 0]));
    assert!(walk(FRAGMENT, &first(253, &[])).is_ok());
    assert_eq!(reason(FRAGMENT, &first(HBH, &[0; 8])), DropReason::Ipv6ExtensionOrder);
}

#[test]
fn rejects_nested_fragment_headers() {
    for field in [0, 1] {
        let bytes =
            [FRAGMENT, 0, 0, field, 0, 0, 0, 1, UDP, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(reason(FRAGMENT, &bytes), DropReason::FragmentInvalid);
    }
}
