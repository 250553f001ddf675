//! Table of drop reasons.
//!
//! Every packet that leaves the data path undelivered is counted under a reason from this table.
//! The table generates the enum, the metric names and the manual text. So every counted reason
//! is listed here, and every listed reason is documented.

use core::fmt;

/// Importance of a drop reason for the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Normal network operation: no action needed.
    Normal,
    /// Caused by a peer's packet: malformed, hostile or not addressed to this host.
    Peer,
    /// A local limit was reached: more memory, queue space or CPU time would help.
    Limit,
    /// Something on this host is wrong and needs attention.
    Fault,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Severity::Normal => "normal",
            Severity::Peer => "peer",
            Severity::Limit => "limit",
            Severity::Fault => "fault",
        })
    }
}

macro_rules! drop_reasons {
    ($($variant:ident, $name:literal, $severity:ident, $sentence:literal;)+) => {
        /// Reason for which a packet left the data path.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $(#[doc = $sentence] $variant,)+
        }

        impl DropReason {
            /// All reasons, in the order of the table.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)+];

            /// Returns the counter name: lower case with underscores.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)+ }
            }

            /// Returns the importance for the operator.
            pub const fn severity(self) -> Severity {
                match self { $(DropReason::$variant => Severity::$severity,)+ }
            }

            /// Returns the explanation, one sentence.
            pub const fn sentence(self) -> &'static str {
                match self { $(DropReason::$variant => $sentence,)+ }
            }
        }
    };
}

drop_reasons! {
    // Device: before any header was read.
    DeviceRingFull, "device_ring_full", Limit, "The device's receive ring was full, so the kernel or the NIC dropped the frame.";
    DeviceInvalidDescriptor, "device_invalid_descriptor", Fault, "The kernel rejected or returned a descriptor that the device did not own.";
    DeviceFrameDamaged, "device_frame_damaged", Fault, "The NIC received a damaged, truncated or otherwise invalid frame: check the cable, the transceiver and the link partner.";
    FrameTooLong, "frame_too_long", Limit, "The frame exceeds the limit of the NIC or the size of an arena buffer: lower the peer's MTU; or the frame holds several datagrams of a sender on this machine (`UDP_SEGMENT`), which AF_XDP in generic mode cannot tell apart: use native mode or --io packet.";
    NoBuffer, "no_buffer", Limit, "The arena had no free frame.";
    InputQueueFull, "input_queue_full", Limit, "The queue between receive processing and protocol processing was full: only modes `interrupt` and `moderated` have this queue.";
    FaultInjected, "fault_injected", Normal, "The fault injector dropped the frame on purpose.";
    NotSteered, "not_steered", Normal, "The frame was neither for this host nor for a UDP or TCP port served by Tidegate.";

    // Admission control: refused under overload.
    AdmissionClassClosed, "admission_class_closed", Limit, "Admission control is closed for the packet's class: classes of better rank need the full capacity.";
    AdmissionRate, "admission_rate", Limit, "The packet's class exceeds the rate that admission control leaves for the class.";
    AdmissionSourceShare, "admission_source_share", Limit, "The packet's source exceeds its fair share of its class.";

    // Ethernet.
    EthernetTruncated, "ethernet_truncated", Peer, "The frame is shorter than an Ethernet header.";
    EthernetNotForUs, "ethernet_not_for_us", Normal, "The destination hardware address is neither this interface's address nor a group that the interface has joined.";
    EthernetSourceInvalid, "ethernet_source_invalid", Peer, "The source hardware address is a group address.";
    EtherTypeUnknown, "ethertype_unknown", Normal, "The stack does not support the EtherType.";
    VlanTruncated, "vlan_truncated", Peer, "The frame ends inside its VLAN tag.";
    VlanNotForUs, "vlan_not_for_us", Normal, "The VLAN tag differs from the interface's VLAN, or the frame has more than one tag.";

    // ARP and neighbour discovery.
    ArpMalformed, "arp_malformed", Peer, "The ARP packet is truncated or not for Ethernet and IPv4 (RFC 826).";
    ArpNotForUs, "arp_not_for_us", Normal, "The ARP packet requests another host's address.";
    ArpConflict, "arp_conflict", Fault, "Another host claims an IPv4 address of this host (RFC 5227).";
    ArpUnsolicited, "arp_unsolicited", Peer, "An unsolicited ARP reply was ignored.";
    ArpSenderInvalid, "arp_sender_invalid", Peer, "The ARP sender's hardware or protocol address is not a valid host address.";
    NdpMalformed, "ndp_malformed", Peer, "The neighbour discovery message violates a rule of RFC 4861 section 7.1 or 6.1.";
    NdpHopLimit, "ndp_hop_limit", Peer, "The neighbour discovery message has a hop limit under 255, so the sender may be off link.";
    NdpNotForUs, "ndp_not_for_us", Normal, "The neighbour discovery message requests another host's address.";
    NdpConflict, "ndp_conflict", Fault, "Another host claims an IPv6 address of this host (RFC 4862 section 5.4).";
    NdpUnsolicited, "ndp_unsolicited", Peer, "A neighbour advertisement for an address that was never solicited was ignored.";
    NdpIgnored, "ndp_ignored", Normal, "A router advertisement or redirect was ignored: routes are configured, not learned.";
    NeighbourTableFull, "neighbour_table_full", Limit, "The neighbour table is full of entries in use (RFC 6583).";
    NeighbourQueueFull, "neighbour_queue_full", Limit, "The queue of packets waiting for this neighbour's hardware address was full.";
    NeighbourUnreachable, "neighbour_unreachable", Normal, "The next hop did not answer address resolution.";

    // IPv4.
    Ipv4Truncated, "ipv4_truncated", Peer, "The frame is shorter than an IPv4 header.";
    Ipv4Version, "ipv4_version", Peer, "The version field of an IPv4 packet is not 4.";
    Ipv4HeaderLength, "ipv4_header_length", Peer, "The IPv4 header length is under 20 bytes or past the packet.";
    Ipv4TotalLength, "ipv4_total_length", Peer, "The IPv4 total length is past the frame or shorter than the header.";
    Ipv4Checksum, "ipv4_checksum", Peer, "The IPv4 header checksum is wrong.";
    Ipv4Options, "ipv4_options", Peer, "An IPv4 option has an invalid length.";
    Ipv4SourceRoute, "ipv4_source_route", Peer, "The packet has a source route option, which is never followed (RFC 7126).";
    Ipv4SourceInvalid, "ipv4_source_invalid", Peer, "The IPv4 source address is not a valid remote host address: multicast, broadcast, loopback or this host's own.";
    Ipv4NotForUs, "ipv4_not_for_us", Normal, "The IPv4 destination is not an address of this host.";

    // IPv6.
    Ipv6Truncated, "ipv6_truncated", Peer, "The frame is shorter than an IPv6 header.";
    Ipv6Version, "ipv6_version", Peer, "The version field of an IPv6 packet is not 6.";
    Ipv6PayloadLength, "ipv6_payload_length", Peer, "The IPv6 payload length is past the frame.";
    Ipv6SourceInvalid, "ipv6_source_invalid", Peer, "The IPv6 source address is not a valid remote host address: multicast, loopback or this host's own.";
    Ipv6NotForUs, "ipv6_not_for_us", Normal, "The IPv6 destination is neither an address of this host nor a multicast group that this host has joined.";
    Ipv6ExtensionTruncated, "ipv6_extension_truncated", Peer, "An IPv6 extension header runs past the packet.";
    Ipv6ExtensionOrder, "ipv6_extension_order", Peer, "A hop-by-hop header is not the first extension header or occurs twice (RFC 8200 section 4.1).";
    Ipv6ExtensionLimit, "ipv6_extension_limit", Peer, "The packet exceeds the limits on extension headers, options or padding, which legitimate packets do not reach.";
    Ipv6OptionUnknown, "ipv6_option_unknown", Peer, "An unknown option requires the packet to be discarded (RFC 8200 section 4.2).";
    Ipv6RoutingHeader, "ipv6_routing_header", Peer, "The packet has a routing header with segments left (RFC 5095).";
    Ipv6NextHeaderUnknown, "ipv6_next_header_unknown", Peer, "The next header type is unknown; an ICMP error was returned (RFC 8200 section 4).";
    Ipv6Jumbogram, "ipv6_jumbogram", Peer, "Jumbograms are not supported (RFC 2675).";

    // Forwarding.
    ForwardLinkGroup, "forward_link_group", Peer, "The packet was not forwarded because its link-layer destination was multicast or broadcast (RFC 1812 section 5.3.4).";
    ForwardScope, "forward_scope", Peer, "The packet was not forwarded because the scope of an address does not extend beyond its link (RFC 1812 section 5.3.7, RFC 4291 section 2.5.6).";
    ForwardBroadcast, "forward_broadcast", Peer, "A directed broadcast to a network behind this router was not forwarded (RFC 2644).";
    HopLimitExceeded, "hop_limit_exceeded", Normal, "The time to live or hop limit was exceeded; an ICMP error was returned.";
    ForwardQueueFull, "forward_queue_full", Limit, "The queue of packets to forward was full.";
    FilterQueueFull, "filter_queue_full", Limit, "The queue to the packet filter was full.";
    FilterRefused, "filter_refused", Normal, "A rule of the packet filter refused the packet.";
    FilterGone, "filter_gone", Fault, "The packet filter is not running or does not respond, and no packet passes without a verdict: start `tidegate filter`.";

    // Fragments.
    FragmentInvalid, "fragment_invalid", Peer, "The fragment's offset or length is invalid.";
    FragmentTooBig, "fragment_too_big", Peer, "The reassembled packet would exceed 65,535 bytes.";
    FragmentOverlap, "fragment_overlap", Peer, "Fragments overlap, so the whole packet was dropped (RFC 5722).";
    FragmentDuplicate, "fragment_duplicate", Normal, "The fragment was received before.";
    FragmentHeaderChain, "fragment_header_chain", Peer, "The first fragment does not contain the whole header chain (RFC 7112).";
    FragmentMemory, "fragment_memory", Limit, "The memory limit for fragments was reached.";
    FragmentTimeout, "fragment_timeout", Normal, "Reassembly timed out: fragments are missing.";

    // ICMP.
    IcmpTruncated, "icmp_truncated", Peer, "The ICMP message is shorter than its type requires.";
    IcmpChecksum, "icmp_checksum", Peer, "The ICMP checksum is wrong.";
    IcmpIgnored, "icmp_ignored", Normal, "The ICMP message has a type that hosts ignore.";
    IcmpQuote, "icmp_quote", Peer, "The ICMP error quotes a packet that this host did not send (RFC 5927).";
    IcmpMtu, "icmp_mtu", Peer, "The ICMP error reports a path MTU under the minimum or not below the current value (RFC 8201 section 4).";
    IcmpBroadcast, "icmp_broadcast", Peer, "An echo request to a multicast or broadcast address was not answered.";

    MldMalformed, "mld_malformed", Peer, "The multicast listener discovery message is truncated or its sender may be off link (RFC 3810).";

    // Transport.
    ProtocolUnknown, "protocol_unknown", Normal, "The stack does not support the IP protocol; an ICMP error was returned.";
    UdpTruncated, "udp_truncated", Peer, "The packet is shorter than a UDP header.";
    UdpLength, "udp_length", Peer, "The UDP length is under 8 bytes or past the packet.";
    UdpChecksum, "udp_checksum", Peer, "The UDP checksum is wrong.";
    UdpChecksumUnfilled, "udp_checksum_unfilled", Fault, "The UDP checksum was left to checksum offload, on an interface that is not known to have senders on this machine (veth, netkit, tun, bridge and macvlan are): use --io packet, which learns the state of the checksum.";
    UdpChecksumMissing, "udp_checksum_missing", Peer, "A UDP datagram over IPv6 has no checksum (RFC 8200 section 8.1).";
    UdpPortZero, "udp_port_zero", Peer, "The UDP destination port is zero.";
    UdpNoSocket, "udp_no_socket", Normal, "No socket is bound to this UDP port; an ICMP error was returned.";
    SocketQueueFull, "socket_queue_full", Limit, "The socket's receive queue was full: the application reads too slowly.";
    SocketClosed, "socket_closed", Normal, "The socket was closed before this datagram was read.";
    TcpTruncated, "tcp_truncated", Peer, "The packet is shorter than a TCP header.";
    TcpHeaderLength, "tcp_header_length", Peer, "The TCP data offset is under 20 bytes or past the segment.";
    TcpOptions, "tcp_options", Peer, "A TCP option has an invalid length.";
    TcpChecksum, "tcp_checksum", Peer, "The TCP checksum is wrong.";
    TcpChecksumUnfilled, "tcp_checksum_unfilled", Fault, "The TCP checksum was left to checksum offload, on an interface that is not known to have senders on this machine (veth, netkit, tun, bridge and macvlan are): use --io packet, which learns the state of the checksum.";
    TcpPortZero, "tcp_port_zero", Peer, "A TCP port is zero.";
    TcpGroup, "tcp_group", Peer, "A TCP segment was sent to a multicast or broadcast address.";
    TcpNoSocket, "tcp_no_socket", Normal, "No TCP connection or listener matches the segment; a reset was returned.";
    TcpResetRateLimited, "tcp_reset_rate_limited", Limit, "No TCP connection or listener matches the segment, and no reset was returned because resets are rate-limited.";
    TcpFlags, "tcp_flags", Peer, "The flags of the TCP segment are invalid in the state of its connection.";
    TcpSequence, "tcp_sequence", Peer, "The TCP segment is outside the receive window.";
    TcpDuplicate, "tcp_duplicate", Normal, "All data of the TCP segment was received before.";
    TcpAckInvalid, "tcp_ack_invalid", Peer, "The TCP segment acknowledges data that was never sent, or its acknowledgement is too old (RFC 5961).";
    TcpReset, "tcp_reset", Peer, "A TCP reset was ignored: its sequence number is not exactly the next expected number (RFC 5961).";
    TcpPaws, "tcp_paws", Peer, "The timestamp of the TCP segment is older than that of an earlier segment (RFC 7323).";
    TcpTimestampMissing, "tcp_timestamp_missing", Peer, "The TCP segment has no timestamp, although the connection negotiated timestamps (RFC 7323).";
    TcpAcceptQueueFull, "tcp_accept_queue_full", Limit, "The listener's accept queue was full: the application accepts too slowly.";
    TcpTableFull, "tcp_table_full", Limit, "The limit on TCP connections was reached.";
    TcpMemory, "tcp_memory", Limit, "The memory limit for TCP data was reached, or a connection has too many gaps in its receive data.";
    TcpStalled, "tcp_stalled", Limit, "A TCP connection whose peer took no data was ended while memory for TCP data was short.";

    // Transmit.
    NoRoute, "no_route", Fault, "There is no route to the destination.";
    TransmitQueueFull, "transmit_queue_full", Limit, "The transmit queue was full: the stack produced frames faster than the device accepted them.";
    TransmitFailed, "transmit_failed", Fault, "The kernel or the NIC rejected the frame.";
    PacketTooBig, "packet_too_big", Normal, "The packet exceeds the path MTU and must not be fragmented.";
    IcmpRateLimited, "icmp_rate_limited", Normal, "An ICMP error was not sent because ICMP errors are rate-limited (RFC 4443 section 2.4).";
}

impl DropReason {
    /// Number of reasons in the table.
    pub const COUNT: usize = Self::ALL.len();

    /// Returns the reason with the counter name `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.name() == name)
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Packet counter for every drop reason.
///
/// The counters wrap around on overflow.
///
/// # Examples
/// ```
/// use tidegate_wire::{DropCounters, DropReason};
///
/// let mut drops = DropCounters::new();
/// drops.count(DropReason::UdpChecksum);
/// assert_eq!((drops.get(DropReason::UdpChecksum), drops.total()), (1, 1));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct DropCounters([u64; DropReason::COUNT]);

impl DropCounters {
    /// Creates counters that are all zero.
    pub const fn new() -> Self {
        Self([0; DropReason::COUNT])
    }

    /// Counts one packet under `reason`.
    #[inline]
    pub fn count(&mut self, reason: DropReason) {
        self.add(reason, 1);
    }

    /// Counts `packets` packets under `reason`.
    #[inline]
    pub fn add(&mut self, reason: DropReason, packets: u64) {
        let counter = &mut self.0[reason as usize];
        *counter = counter.wrapping_add(packets);
    }

    /// Adds every counter of `other` to the counter of the same reason.
    pub fn merge(&mut self, other: &DropCounters) {
        for (reason, packets) in other.iter() {
            self.add(reason, packets);
        }
    }

    /// Returns the number of packets dropped for `reason`.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Returns the number of packets dropped for any reason.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Iterates over all reasons with their counts, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|&reason| (reason, self.get(reason)))
    }

    /// Iterates over the reasons with a count above zero.
    pub fn nonzero(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        self.iter().filter(|&(_, packets)| packets > 0)
    }
}

impl Default for DropCounters {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for DropCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.nonzero().map(|(reason, n)| (reason.name(), n))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_reversible() {
        for &reason in DropReason::ALL {
            assert_eq!(DropReason::from_name(reason.name()), Some(reason));
            assert!(reason.sentence().ends_with('.'), "{reason}");
        }
    }

    #[test]
    fn merges_and_totals_counters() {
        let mut a = DropCounters::new();
        a.count(DropReason::UdpChecksum);
        let mut b = DropCounters::new();
        b.add(DropReason::UdpChecksum, 2);
        b.count(DropReason::NoRoute);
        a.merge(&b);
        assert_eq!(a.get(DropReason::UdpChecksum), 3);
        assert_eq!(a.total(), 4);
        assert_eq!(a.nonzero().count(), 2);
    }
}
