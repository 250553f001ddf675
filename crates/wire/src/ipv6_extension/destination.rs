//! Processing of extension headers by the destination of a packet.

use super::{
    Extension, ExtensionError, ExtensionWalk, Ipv6Option, Ipv6Options, RoutingHeader, UpperLayer,
    is_extension,
};
use crate::icmpv6::parameter_problem;
use crate::{DropReason, Protocol};

/// Processes the extension headers in `payload` as the packet's destination. `payload` follows
/// an IPv6 header whose Next Header field is `next_header`.
///
/// # Errors
/// An [`ExtensionError`] when the chain
/// * is malformed or exceeds a limit,
/// * has an unknown option that must not be skipped,
/// * has a routing header with segments left, or
/// * is incomplete in a first fragment (RFC 7112).
///
/// # Examples
/// ```
/// use tidegate_wire::{Protocol, upper_layer};
///
/// // Destination options with 4 bytes of padding data, then UDP.
/// let payload = [17, 0, 1, 4, 0, 0, 0, 0, 0xaa, 0xbb];
/// let upper = upper_layer(Protocol::DESTINATION_OPTIONS, &payload).unwrap();
/// assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[0xaa, 0xbb][..]));
/// ```
#[inline]
pub fn upper_layer(
    next_header: Protocol,
    payload: &[u8],
) -> Result<UpperLayer<'_>, ExtensionError> {
    let walk = ExtensionWalk::new(next_header, payload);
    if is_extension(next_header) { walk_as_destination(walk) } else { Ok(walk.remainder()) }
}

fn walk_as_destination(mut walk: ExtensionWalk<'_>) -> Result<UpperLayer<'_>, ExtensionError> {
    if walk.protocol == Protocol::HOP_BY_HOP && walk.rest.is_empty() {
        // A jumbogram begins with a payload length of zero (RFC 2675).
        return Err(ExtensionError::without_icmp_error(DropReason::Ipv6Jumbogram));
    }
    let mut router_alert = false;
    loop {
        let offset_bytes = walk.offset_bytes;
        let Some(extension) = walk.next() else { break };
        match extension? {
            Extension::HopByHop(options) => router_alert |= process_options(options)?,
            Extension::Destination(options) => {
                process_options(options)?;
            }
            Extension::Routing(RoutingHeader { segments_left: 0, .. }) => {}
            Extension::Routing(_) => {
                return Err(ExtensionError::with_icmp_error(
                    DropReason::Ipv6RoutingHeader,
                    parameter_problem::HEADER_FIELD,
                    offset_bytes + 2,
                ));
            }
            Extension::Fragment(fragment) if fragment.is_atomic() => {}
            Extension::Fragment(fragment) => {
                if fragment.offset_bytes == 0 {
                    check_header_chain_complete(walk)?;
                }
                let fragment = Some(fragment);
                return Ok(UpperLayer { fragment, router_alert, ..walk.remainder() });
            }
        }
    }
    Ok(UpperLayer { router_alert, ..walk.remainder() })
}

/// Applies the actions of the unknown options of a header. Returns true if the header has a
/// router alert.
fn process_options(options: Ipv6Options<'_>) -> Result<bool, ExtensionError> {
    let mut router_alert = false;
    for option in options {
        let option = option.map_err(ExtensionError::without_icmp_error)?;
        match option.kind {
            Ipv6Option::ROUTER_ALERT => router_alert = true,
            _ => option.apply_unknown_option_action()?,
        }
    }
    Ok(router_alert)
}

/// Checks that this first fragment contains the rest of the header chain and the upper-layer
/// header's first bytes (RFC 7112, RFC 8200 section 4.5).
fn check_header_chain_complete(mut walk: ExtensionWalk<'_>) -> Result<(), ExtensionError> {
    let incomplete = ExtensionError::with_icmp_error(
        DropReason::FragmentHeaderChain,
        parameter_problem::HEADER_CHAIN,
        0,
    );
    for extension in &mut walk {
        match extension {
            Err(error) if error.reason == DropReason::Ipv6ExtensionTruncated => {
                return Err(incomplete);
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
    }
    let needed_bytes = match walk.protocol {
        Protocol::TCP => 20,
        Protocol::UDP => 8,
        Protocol::ICMPV6 => 4,
        _ => 0,
    };
    if walk.rest.len() < needed_bytes { Err(incomplete) } else { Ok(()) }
}
