//! Output of datagrams.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropReason, Protocol, Sum, UdpHeader, checksum, udp};

use super::{UdpId, UdpTable};
use crate::SendError;
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::packet::Packet;
use crate::ip::path::Path;

/// Header fields of one datagram that differ from those of its socket.
///
/// # Examples
/// ```
/// use std::net::IpAddr;
/// use tidegate_stack::UdpSendOptions;
///
/// let from: IpAddr = "192.0.2.1".parse().unwrap();
/// let options = UdpSendOptions::from(Some(from)).hop_limit(1);
/// assert_eq!((options.from, options.traffic_class), (Some(from), None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct UdpSendOptions {
    /// Source address: one of the local addresses, for a socket bound to the unspecified address.
    /// `None` selects that of the socket or of the path.
    pub from: Option<IpAddr>,
    /// Hop limit or time to live; `None` selects that of the socket.
    pub hop_limit: Option<u8>,
    /// Traffic class byte; `None` selects that of the socket.
    pub traffic_class: Option<u8>,
}

impl UdpSendOptions {
    /// Sets the hop limit; `None` selects that of the socket.
    pub fn hop_limit(self, hop_limit: impl Into<Option<u8>>) -> Self {
        Self { hop_limit: hop_limit.into(), ..self }
    }

    /// Sets the traffic class byte; `None` selects that of the socket.
    pub fn traffic_class(self, traffic_class: impl Into<Option<u8>>) -> Self {
        Self { traffic_class: traffic_class.into(), ..self }
    }

    /// True if hop limit and traffic class are those of the socket.
    #[inline(always)]
    pub(crate) fn has_socket_headers(&self) -> bool {
        self.hop_limit.is_none() && self.traffic_class.is_none()
    }
}

impl From<Option<IpAddr>> for UdpSendOptions {
    /// Options with this source address.
    #[inline(always)]
    fn from(from: Option<IpAddr>) -> Self {
        Self { from, ..Self::default() }
    }
}

/// Destination and options of a call to send.
#[derive(Clone, Copy)]
pub(crate) struct SendTarget {
    /// Destination; `None` for the peer of a connected socket.
    pub(crate) to: Option<SocketAddr>,
    pub(crate) options: UdpSendOptions,
}

/// Addresses, header fields and path of a datagram to send.
struct Flow {
    source: IpAddr,
    source_port: u16,
    remote: SocketAddr,
    hop_limit: u8,
    traffic_class: u8,
    dont_fragment: bool,
    path: Path,
}

impl UdpTable {
    /// Implements [`crate::Stack::udp_send`].
    #[inline]
    pub(crate) fn send(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        target: SendTarget,
        payload: &[u8],
    ) -> Result<(), SendError> {
        if interface.transmit.len() < interface.limits.transmit_frames
            && let Some(frame) = arena.alloc_from(payload)
        {
            return self.send_frame(interface, now_ns, arena, id, target, frame);
        }
        let flow = self.flow(interface, now_ns, arena, id, target)?;
        if payload.len() > flow.max_unfragmented_bytes() {
            return send_fragmented(interface, arena, &flow, payload);
        }
        Err(SendError::WouldBlock)
    }

    /// Implements [`crate::Stack::udp_send_frame`].
    #[inline]
    pub(crate) fn send_frame(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        target: SendTarget,
        frame: Frame,
    ) -> Result<(), SendError> {
        match self.send_plain(interface, now_ns, arena, id, target, frame) {
            Some(frame) => self.send_slow(interface, now_ns, arena, id, target, frame),
            None => Ok(()),
        }
    }

    /// Slow path of [`crate::Stack::udp_send_frame`]: resolves the path, copies and fragments as
    /// necessary.
    #[inline(never)]
    fn send_slow(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        target: SendTarget,
        frame: Frame,
    ) -> Result<(), SendError> {
        let checked = self.flow(interface, now_ns, arena, id, target).and_then(|flow| {
            interface.check_transmit_space(&flow.path)?;
            Ok(flow)
        });
        let flow = match checked {
            Ok(flow) => flow,
            Err(error) => {
                arena.free(frame);
                return Err(error);
            }
        };
        if frame.len() <= flow.max_unfragmented_bytes()
            && frame.headroom() >= interface.max_header_bytes()
        {
            emit(interface, arena, &flow, frame);
            return Ok(());
        }
        let payload = arena.bytes(&frame).to_vec();
        arena.free(frame);
        if payload.len() > flow.max_unfragmented_bytes() {
            return send_fragmented(interface, arena, &flow, &payload);
        }
        let frame = arena.alloc_from(&payload).ok_or(SendError::WouldBlock)?;
        emit(interface, arena, &flow, frame);
        Ok(())
    }

    /// Determines addresses, header fields and path.
    #[inline]
    fn flow(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        target: SendTarget,
    ) -> Result<Flow, SendError> {
        let socket = self.get(id).ok_or(SendError::Closed)?;
        let remote = match (target.to, socket.remote) {
            (Some(to), _) => {
                let remote = match to.ip() {
                    IpAddr::V4(_) => to,
                    IpAddr::V6(ip) => SocketAddr::new(ip.to_canonical(), to.port()),
                };
                if to.port() == 0 || !socket.accepts_peer(remote.ip()) {
                    return Err(SendError::DestinationInvalid(to));
                }
                remote
            }
            (None, Some(remote)) => remote,
            (None, None) => return Err(SendError::NotConnected),
        };
        let (local, options) = (socket.local, socket.options);
        let path = interface.path(now_ns, arena, remote.ip()).inspect_err(|error| {
            if matches!(error, SendError::NetworkUnreachable(_) | SendError::NoSource(_)) {
                interface.counters.count_transmit_drop(DropReason::NoRoute);
            }
        })?;
        let source = match target.options.from {
            Some(from) => interface.check_source(from.to_canonical(), remote.ip())?,
            None if local.ip().is_unspecified() => path.source,
            // A socket bound to a group or broadcast address cannot send from that address.
            None if interface.addresses.kind(local.ip()) != AddressKind::Local => path.source,
            None => local.ip(),
        };
        let hop_limit = target.options.hop_limit.or(options.hop_limit);
        Ok(Flow {
            source,
            source_port: local.port(),
            remote,
            hop_limit: hop_limit.unwrap_or(interface.hop_limit),
            traffic_class: target.options.traffic_class.unwrap_or(options.traffic_class),
            dont_fragment: options.dont_fragment,
            path,
        })
    }
}

/// Writes the headers in front of the payload and sends the frame.
#[inline]
fn emit(interface: &mut Interface, arena: &mut Arena, flow: &Flow, mut frame: Frame) {
    frame.retreat(UdpHeader::BYTES);
    let header_at = interface.link_header_bytes() + ip_header_bytes(flow.remote.ip());
    // No receiver verifies the checksum of loopback packets.
    let partial = interface.transmit_checksum || flow.path.is_loopback;
    write_udp_header(flow, partial, arena.bytes_mut(&mut frame));
    if partial {
        frame.set_checksum(Checksum::Partial { start: header_at as u16, offset: 6 });
    } else {
        frame.set_checksum(Checksum::Unknown);
    }
    interface.send_frame(arena, &flow.packet(), &flow.path, None, frame);
}

fn send_fragmented(
    interface: &mut Interface,
    arena: &mut Arena,
    flow: &Flow,
    payload: &[u8],
) -> Result<(), SendError> {
    let max_payload_bytes = match (flow.dont_fragment, flow.remote.ip()) {
        (true, _) => flow.max_unfragmented_bytes(),
        (false, IpAddr::V4(_)) => UdpHeader::MAX_PAYLOAD_BYTES - 20,
        (false, IpAddr::V6(_)) => UdpHeader::MAX_PAYLOAD_BYTES,
    };
    if payload.len() > max_payload_bytes {
        return Err(SendError::MessageTooLong { limit_bytes: max_payload_bytes });
    }
    let mut datagram = vec![0; UdpHeader::BYTES + payload.len()];
    datagram[UdpHeader::BYTES..].copy_from_slice(payload);
    write_udp_header(flow, false, &mut datagram);
    interface.send_fragments(arena, &flow.packet(), &flow.path, &datagram)
}

impl Flow {
    /// Largest payload in bytes that fits in one packet on the path.
    #[inline]
    fn max_unfragmented_bytes(&self) -> usize {
        let headers = ip_header_bytes(self.remote.ip()) + UdpHeader::BYTES;
        usize::from(self.path.mtu).saturating_sub(headers)
    }

    #[inline]
    fn packet(&self) -> Packet {
        Packet {
            source: self.source,
            destination: self.remote.ip(),
            protocol: Protocol::UDP,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
        }
    }
}

#[inline]
fn ip_header_bytes(address: IpAddr) -> usize {
    if address.is_ipv4() { 20 } else { 40 }
}

/// Writes the UDP header to the front of `datagram`, whose payload is in place. With `partial` the
/// device completes the checksum, and the field gets the pseudo-header sum.
#[inline]
fn write_udp_header(flow: &Flow, partial: bool, datagram: &mut [u8]) {
    let bytes = datagram.len();
    let pseudo = pseudo_header(flow.source, flow.remote.ip(), bytes);
    let Some(mut header) =
        UdpHeader::new(flow.source_port, flow.remote.port(), bytes - UdpHeader::BYTES)
    else {
        debug_assert!(false, "the length was checked");
        return;
    };
    if partial {
        header.checksum = pseudo.fold();
    }
    let written = header.emit(datagram).is_some();
    debug_assert!(written, "the header fits in the datagram");
    if !partial {
        udp::fill_checksum(pseudo, datagram);
    }
}

#[inline]
fn pseudo_header(source: IpAddr, destination: IpAddr, bytes: usize) -> Sum {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            checksum::pseudo_header_v4(source, destination, Protocol::UDP, bytes as u16)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            checksum::pseudo_header_v6(source, destination, Protocol::UDP, bytes as u32)
        }
        _ => Sum::ZERO,
    }
}
