//! ICMP errors about datagrams of this host, reported to the socket that sent them.

use std::net::SocketAddr;

use tidegate_wire::{DropReason, UdpHeader};

use super::{UdpErrorReport, UdpTable};
use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::interface::Interface;
use crate::ip::path_mtu::QuotedKind;
use crate::{Event, SocketError};

impl UdpTable {
    /// Delivers a received ICMP error to the socket that sent the quoted packet (RFC 1122 section
    /// 4.1.3.3), after the checks of RFC 5927 section 4 that apply to UDP. The quoted datagram must
    /// belong to a bound local address and port and, for a connected socket, to its peer.
    ///
    /// # Errors
    /// [`DropReason::IcmpQuote`] when no socket can have sent the quoted packet,
    /// [`DropReason::IcmpMtu`] for an impossible path MTU.
    pub(crate) fn handle_icmp_error(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        icmp_error: ReceivedIcmpError,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        let udp = UdpHeader::parse_quoted(quote.payload).map_err(|_| DropReason::IcmpQuote)?;
        let local = SocketAddr::new(quote.source, udp.source_port);
        let remote = SocketAddr::new(quote.destination, udp.destination_port);
        let index = self.find(local, remote).ok_or(DropReason::IcmpQuote)?;
        if let ReceivedIcmpError::TooBig(mtu) = icmp_error {
            // A socket without a peer matches any destination: believe only what quotes a
            // destination that datagrams were sent to lately.
            let is_connected =
                self.by_index(index).is_some_and(|(_, known)| known.remote.is_some());
            if !is_connected && interface.paths.get(now_ns, quote.destination).is_none() {
                return Err(DropReason::IcmpQuote);
            }
            interface.learn_path_mtu(now_ns, mtu, QuotedKind::Datagram, quote)?;
        }
        let limit_bytes = interface.path_mtu(now_ns, QuotedKind::Datagram, quote.destination).0;
        let Some((id, socket)) = self.by_index(index) else {
            return Err(DropReason::IcmpQuote);
        };
        let presented = socket.to_app_address(remote);
        let error = match icmp_error {
            ReceivedIcmpError::PortUnreachable | ReceivedIcmpError::ProtocolUnreachable => {
                SocketError::ConnectionRefused(presented)
            }
            ReceivedIcmpError::TimeExceeded if !socket.options.report_errors => return Ok(()),
            ReceivedIcmpError::HostUnreachable
            | ReceivedIcmpError::HostUnknown
            | ReceivedIcmpError::SourceHostIsolated
            | ReceivedIcmpError::SourceRouteFailed
            | ReceivedIcmpError::HostProhibited
            | ReceivedIcmpError::TimeExceeded => SocketError::HostUnreachable(presented),
            ReceivedIcmpError::NetworkUnreachable | ReceivedIcmpError::NetworkProhibited => {
                SocketError::NetworkUnreachable(presented)
            }
            // Only sockets that forbid fragmentation need the error; the others continue with
            // smaller fragments.
            ReceivedIcmpError::TooBig(_) if !socket.options.dont_fragment => return Ok(()),
            ReceivedIcmpError::TooBig(_) => {
                let headers = if quote.destination.is_ipv4() { 28 } else { 48 };
                let limit_bytes = limit_bytes.saturating_sub(headers);
                SocketError::MessageTooLong { remote: presented, limit_bytes }
            }
        };
        if socket.remote.is_none() && !socket.options.report_errors {
            return Ok(());
        }
        socket.error = Some(error);
        if socket.options.report_errors {
            let mut report = UdpErrorReport::new(presented, icmp_error, quote, &udp);
            report.reporter = socket.to_app_ip(report.reporter);
            socket.push_error_report(report);
        }
        if !socket.error_notified {
            socket.error_notified = true;
            interface.events.push_back(Event::UdpError(id));
        }
        Ok(())
    }
}
