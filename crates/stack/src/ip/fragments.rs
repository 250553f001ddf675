//! Received fragments, until their packet is complete or late.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::DropReason;

use crate::interface::Interface;
use crate::ip::packet::{IcmpErrorKind, RxVerdict};
use crate::ip::reassembly::{ExpiredReassembly, Fragment, FragmentKey};
use crate::ip::{ipv4, ipv6};
use crate::link::LinkMeta;

impl Interface {
    /// Stores a fragment until its packet is complete.
    pub(crate) fn handle_fragment(
        &mut self,
        now_ns: u64,
        key: FragmentKey,
        fragment: &Fragment<'_>,
    ) -> Result<RxVerdict, DropReason> {
        let inserted = self.reassembly.insert(now_ns, key, fragment);
        self.counters.held -= inserted.dropped.total();
        self.counters.drops.merge(&inserted.dropped);
        let Some(whole) = inserted.result? else {
            self.counters.held += 1;
            return Ok(RxVerdict::FragmentHeld);
        };
        self.counters.held -= whole.fragments - 1;
        self.counters.merged += whole.fragments - 1;
        let packet = match key.source {
            IpAddr::V4(_) => ipv4::build_reassembled(&whole),
            IpAddr::V6(_) => ipv6::build_reassembled(&whole),
        };
        packet.map(RxVerdict::Reassembled).ok_or(DropReason::FragmentTooBig)
    }

    /// Counts the fragments of a packet that stayed incomplete, and reports it to the sender.
    pub(crate) fn handle_reassembly_timeout(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        timeout: &ExpiredReassembly,
    ) {
        self.counters.held -= timeout.fragments;
        self.counters.count_drops(DropReason::FragmentTimeout, timeout.fragments);
        let Some(quote) = &timeout.quote else { return };
        let link_meta = LinkMeta::new(Checksum::Unknown);
        self.send_icmp_error(now_ns, quote, &link_meta, IcmpErrorKind::ReassemblyTimeout);
        self.flush_reply(now_ns, arena);
    }
}
