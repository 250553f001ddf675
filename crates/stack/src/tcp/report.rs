//! What ICMP reports about segments of ours (RFC 9293 section 3.9.2.2), after
//! the checks of RFC 5927: the ends and the sequence number that are quoted
//! must be those of something that is on its way.

use std::net::SocketAddr;

use tidegate_wire::DropReason;

use super::connection::{Connection, Is};
use super::segment::Ends;
use super::seq::Seq;
use super::socket::{Failure, TcpState};
use crate::Stack;
use crate::icmp::{Quote, Report};

impl Stack {
    /// Brings a report to the connection it is about.
    ///
    /// # Errors
    /// [`DropReason::IcmpQuote`] when we have sent no such segment,
    /// [`DropReason::IcmpMtu`] for a path MTU that cannot be.
    pub(crate) fn tcp_report(
        &mut self,
        now_ns: u64,
        report: Report,
        quote: &Quote<'_>,
    ) -> Result<(), DropReason> {
        // RFC 792 promises no more than eight bytes: ports and number.
        let head = quote.payload.first_chunk::<8>().ok_or(DropReason::IcmpQuote)?;
        let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let ends = Ends::new(
            SocketAddr::new(quote.source, port(0)),
            SocketAddr::new(quote.destination, port(2)),
        );
        let seq = Seq(u32::from_be_bytes([head[4], head[5], head[6], head[7]]));
        let index = self.tcp.index.find(&self.tcp.connections, &ends);
        let index = index.ok_or(DropReason::IcmpQuote)?;
        let on_its_way = self
            .tcp
            .connections
            .at(index)
            .is_some_and(|c| c.una.is_up_to(seq) && seq.is_before(c.nxt));
        if !on_its_way {
            return Err(DropReason::IcmpQuote);
        }
        if let Report::TooBig(told) = report {
            self.path_mtu_told(now_ns, told, quote)?;
        }
        if let Some(connection) = self.tcp.connections.at_mut(index) {
            match report {
                Report::TooBig(_) => connection.on_too_big(),
                Report::Refused if connection.state == TcpState::SynSent => {
                    connection.abort(&mut self.tcp.shared, Some(Failure::Refused), false);
                }
                // RFC 5461 section 4, RFC 5927 section 5.2: once it is
                // established nothing that anybody could forge ends it.
                Report::Refused => connection.soft_failure = Some(Failure::Refused),
                Report::Host => connection.soft_failure = Some(Failure::HostUnreachable),
                Report::Network => connection.soft_failure = Some(Failure::NetworkUnreachable),
            }
        }
        self.tcp.settle(now_ns, index);
        Ok(())
    }
}

impl Connection {
    /// What was too large goes again at once, in smaller pieces: nothing was
    /// lost to congestion (RFC 1191 section 6.5).
    fn on_too_big(&mut self) {
        if let Some(flight) = &mut self.flight {
            flight.mark_first_lost();
            self.is.insert(Is::FORCE_RETRANSMISSION);
            self.is.insert(Is::WANTS_OUTPUT);
        }
    }
}
