//! ICMP errors about our segments (RFC 9293 section 3.9.2.2), after the checks of RFC 5927:
//! the quoted addresses, ports and sequence number must match a segment in flight.

use std::net::SocketAddr;

use tidegate_wire::DropReason;

use super::table::TcpTable;
use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::interface::Interface;
use crate::ip::path_mtu::QuotedKind;
use crate::tcp::connection::Connection;
use crate::tcp::flags::ConnFlags;
use crate::tcp::segment::FourTuple;
use crate::tcp::seq::Seq;
use crate::tcp::socket::{Failure, TcpState};

impl TcpTable {
    /// Delivers an ICMP error to the connection of the quoted segment.
    ///
    /// # Errors
    /// [`DropReason::IcmpQuote`] when no connection has the quoted segment in flight,
    /// [`DropReason::IcmpMtu`] for an impossible path MTU.
    pub(crate) fn handle_icmp_error(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        report: ReceivedIcmpError,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        // RFC 792 guarantees only eight bytes: ports and sequence number.
        let head = quote.payload.first_chunk::<8>().ok_or(DropReason::IcmpQuote)?;
        let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let tuple = FourTuple::new(
            SocketAddr::new(quote.source, port(0)),
            SocketAddr::new(quote.destination, port(2)),
        );
        let seq = Seq(u32::from_be_bytes([head[4], head[5], head[6], head[7]]));
        let index = self.by_tuple.find(&self.connections, &tuple);
        let index = index.ok_or(DropReason::IcmpQuote)?;
        let is_in_flight = self
            .connections
            .at(index)
            .is_some_and(|c| c.send.una.is_at_or_before(seq) && seq.is_before(c.send.nxt));
        if !is_in_flight {
            return Err(DropReason::IcmpQuote);
        }
        if let ReceivedIcmpError::TooBig(mtu) = report {
            interface.learn_path_mtu(now_ns, mtu, QuotedKind::Segment, quote)?;
        }
        if let Some(connection) = self.connections.at_mut(index) {
            match report {
                ReceivedIcmpError::TooBig(_) => connection.on_too_big(),
                ReceivedIcmpError::PortUnreachable if connection.state == TcpState::SynSent => {
                    connection.abort(&mut self.shared, Some(Failure::Refused), false);
                }
                ReceivedIcmpError::ProtocolUnreachable if connection.state == TcpState::SynSent => {
                    connection.soft_failure = Some(Failure::ProtocolUnreachable);
                    connection.abort(&mut self.shared, Some(Failure::ProtocolUnreachable), false);
                }
                ReceivedIcmpError::HostProhibited if connection.state == TcpState::SynSent => {
                    connection.abort(&mut self.shared, Some(Failure::HostUnreachable), false);
                }
                ReceivedIcmpError::NetworkProhibited if connection.state == TcpState::SynSent => {
                    connection.abort(&mut self.shared, Some(Failure::NetworkUnreachable), false);
                }
                // RFC 5461 section 4, RFC 5927 section 5.2: an established connection never ends
                // because of an ICMP error, which anybody could forge.
                ReceivedIcmpError::PortUnreachable => {
                    connection.soft_failure = Some(Failure::Refused);
                }
                ReceivedIcmpError::ProtocolUnreachable => {
                    connection.soft_failure = Some(Failure::ProtocolUnreachable);
                }
                ReceivedIcmpError::SourceRouteFailed => {
                    connection.soft_failure = Some(Failure::SourceRouteFailed);
                }
                ReceivedIcmpError::HostUnknown => {
                    connection.soft_failure = Some(Failure::HostUnknown);
                }
                ReceivedIcmpError::SourceHostIsolated => {
                    connection.soft_failure = Some(Failure::SourceHostIsolated);
                }
                ReceivedIcmpError::HostUnreachable
                | ReceivedIcmpError::HostProhibited
                | ReceivedIcmpError::TimeExceeded => {
                    connection.soft_failure = Some(Failure::HostUnreachable);
                }
                ReceivedIcmpError::NetworkUnreachable | ReceivedIcmpError::NetworkProhibited => {
                    connection.soft_failure = Some(Failure::NetworkUnreachable);
                }
            }
        }
        self.update(now_ns, index);
        Ok(())
    }
}

impl Connection {
    /// Retransmits the oversized segment at once, in smaller segments, without congestion
    /// response (RFC 1191 section 6.5).
    fn on_too_big(&mut self) {
        if self.recovery.mark_first_lost() {
            self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
    }
}
