//! The one table of drop reasons.
//!
//! A packet leaves the data path only with a reason from this table. The table
//! makes the enum, the names of the metrics and the text of the manual, so a
//! reason that is not listed here cannot be counted, and a reason that is
//! listed here is always explained.

use core::fmt;

/// How much an operator should care about a drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Part of normal life on a network: nothing to do.
    Normal,
    /// Caused by what a peer sent: malformed, hostile or not for us.
    Peer,
    /// A limit of ours was reached: more memory, queue or CPU would help.
    Limit,
    /// Something on this host is wrong and somebody should look.
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
        /// Why a packet left the data path.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $(#[doc = $sentence] $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of the table.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)+];

            /// The name of the counter: lower case with underscores.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)+ }
            }

            /// How much an operator should care.
            pub const fn severity(self) -> Severity {
                match self { $(DropReason::$variant => Severity::$severity,)+ }
            }

            /// What happened, as one sentence.
            pub const fn sentence(self) -> &'static str {
                match self { $(DropReason::$variant => $sentence,)+ }
            }
        }
    };
}

drop_reasons! {
    // The port: before any header was read.
    PortRingFull, "port_ring_full", Limit, "The port's receive ring was full, so the kernel or card dropped the frame.";
    PortInvalidDescriptor, "port_invalid_descriptor", Fault, "The kernel refused or returned a descriptor that this port did not own.";
    PortFrameDamaged, "port_frame_damaged", Fault, "The card found the frame damaged, cut short or otherwise wrong: look at the cable, the transceiver and the other end.";
    FrameTooLong, "frame_too_long", Limit, "The frame is longer than the card or a buffer of the arena takes: lower the peer's MTU or turn off its segmentation offload.";
    NoBuffer, "no_buffer", Limit, "No free frame was left in the arena.";
    InputQueueFull, "input_queue_full", Limit, "The queue between receive work and protocol work was full: only modes `interrupt` and `moderated` have one.";
    FaultInjected, "fault_injected", Normal, "The fault injection wrapper dropped the frame on purpose.";
    NotSteered, "not_steered", Normal, "The frame was not for this host or for a port given to Tidegate.";

    // Admission: refused while not everything could be taken.
    AdmissionClassClosed, "admission_class_closed", Limit, "Nothing of the packet's class is let in: classes of a better rank need all that can be served.";
    AdmissionRate, "admission_rate", Limit, "The packet's class is at the rate that is left for it.";
    AdmissionSourceShare, "admission_source_share", Limit, "The packet's source has had its fair share of its class.";

    // Ethernet.
    EthernetTruncated, "ethernet_truncated", Peer, "The frame is shorter than an Ethernet header.";
    EthernetNotForUs, "ethernet_not_for_us", Normal, "The destination hardware address is neither ours nor a group we listen to.";
    EthernetSourceInvalid, "ethernet_source_invalid", Peer, "The source hardware address is a group address.";
    EtherTypeUnknown, "ethertype_unknown", Normal, "The EtherType is none that the stack speaks.";
    VlanTruncated, "vlan_truncated", Peer, "The frame ends inside its VLAN tag.";
    VlanNotForUs, "vlan_not_for_us", Normal, "The VLAN tag is not the one this interface is in, or there is more than one tag.";

    // ARP and neighbour discovery.
    ArpMalformed, "arp_malformed", Peer, "The ARP packet is truncated or not Ethernet and IPv4 (RFC 826).";
    ArpNotForUs, "arp_not_for_us", Normal, "The ARP packet asks for another host's address.";
    ArpConflict, "arp_conflict", Fault, "Another host claims an address of ours (RFC 5227).";
    ArpUnsolicited, "arp_unsolicited", Peer, "An ARP reply that nobody asked for was ignored.";
    ArpSenderInvalid, "arp_sender_invalid", Peer, "The ARP sender's hardware or protocol address cannot be a host's.";
    NdpMalformed, "ndp_malformed", Peer, "The neighbour discovery message breaks a rule of RFC 4861 section 7.1 or 6.1.";
    NdpHopLimit, "ndp_hop_limit", Peer, "The neighbour discovery message has a hop limit under 255, so it may come from off link.";
    NdpNotForUs, "ndp_not_for_us", Normal, "The neighbour discovery message asks for another host's address.";
    NdpConflict, "ndp_conflict", Fault, "Another host claims an IPv6 address of ours (RFC 4862 section 5.4).";
    NdpUnsolicited, "ndp_unsolicited", Peer, "A neighbour advertisement for an entry we never asked for was ignored.";
    NdpIgnored, "ndp_ignored", Normal, "A router advertisement or redirect was ignored: routes are configured, not learnt.";
    NeighbourTableFull, "neighbour_table_full", Limit, "The neighbour table is full of entries in use (RFC 6583).";
    NeighbourQueueFull, "neighbour_queue_full", Limit, "Too many packets wait for this neighbour's hardware address.";
    NeighbourUnreachable, "neighbour_unreachable", Normal, "The next hop did not answer address resolution.";

    // IPv4.
    Ipv4Truncated, "ipv4_truncated", Peer, "The frame is shorter than an IPv4 header.";
    Ipv4Version, "ipv4_version", Peer, "The version field of an IPv4 packet is not 4.";
    Ipv4HeaderLength, "ipv4_header_length", Peer, "The IPv4 header length is under 20 or past the packet.";
    Ipv4TotalLength, "ipv4_total_length", Peer, "The IPv4 total length is past the frame or shorter than the header.";
    Ipv4Checksum, "ipv4_checksum", Peer, "The IPv4 header checksum is wrong.";
    Ipv4Options, "ipv4_options", Peer, "An IPv4 option has an impossible length.";
    Ipv4SourceRoute, "ipv4_source_route", Peer, "The packet carries a source route, which is never followed (RFC 7126).";
    Ipv4SourceInvalid, "ipv4_source_invalid", Peer, "The IPv4 source address cannot be a host's: group, broadcast, loopback or our own.";
    Ipv4NotForUs, "ipv4_not_for_us", Normal, "The IPv4 destination is not an address of ours.";

    // IPv6.
    Ipv6Truncated, "ipv6_truncated", Peer, "The frame is shorter than an IPv6 header.";
    Ipv6Version, "ipv6_version", Peer, "The version field of an IPv6 packet is not 6.";
    Ipv6PayloadLength, "ipv6_payload_length", Peer, "The IPv6 payload length is past the frame.";
    Ipv6SourceInvalid, "ipv6_source_invalid", Peer, "The IPv6 source address cannot be a host's: group, loopback or our own.";
    Ipv6NotForUs, "ipv6_not_for_us", Normal, "The IPv6 destination is neither an address of ours nor a group we joined.";
    Ipv6ExtensionTruncated, "ipv6_extension_truncated", Peer, "An IPv6 extension header runs past the packet.";
    Ipv6ExtensionOrder, "ipv6_extension_order", Peer, "A hop-by-hop header is not first or stands twice (RFC 8200 section 4.1).";
    Ipv6ExtensionLimit, "ipv6_extension_limit", Peer, "The packet has more extension headers or options than any honest sender needs.";
    Ipv6OptionUnknown, "ipv6_option_unknown", Peer, "An unknown option asks for the packet to be discarded (RFC 8200 section 4.2).";
    Ipv6RoutingHeader, "ipv6_routing_header", Peer, "The packet carries a routing header with segments left (RFC 5095).";
    Ipv6NextHeaderUnknown, "ipv6_next_header_unknown", Peer, "The next header is unknown; the sender was told (RFC 8200 section 4).";
    Ipv6Jumbogram, "ipv6_jumbogram", Peer, "Jumbograms are not supported (RFC 2675).";

    // Forwarding.
    ForwardLinkGroup, "forward_link_group", Peer, "The packet was sent to a group or everybody on its link, so it was not forwarded (RFC 1812 section 5.3.4).";
    ForwardScope, "forward_scope", Peer, "An address of the packet has no meaning off its link, so it was not forwarded (RFC 1812 section 5.3.7, RFC 4291 section 2.5.6).";
    ForwardBroadcast, "forward_broadcast", Peer, "A broadcast to a network behind this router was not forwarded (RFC 2644).";
    HopLimitExceeded, "hop_limit_exceeded", Normal, "The time to live or hop limit ran out here; the sender was told.";
    ForwardQueueFull, "forward_queue_full", Limit, "The queue of packets to be forwarded was full.";
    ScreenQueueFull, "screen_queue_full", Limit, "The queue to the packet screen was full.";
    ScreenRefused, "screen_refused", Normal, "A rule of the packet screen refused the packet.";
    ScreenGone, "screen_gone", Fault, "The packet screen is not running or does not answer, and nothing passes without it: start `tidegate screen`.";

    // Fragments.
    FragmentInvalid, "fragment_invalid", Peer, "The fragment's offset or length is impossible.";
    FragmentTooBig, "fragment_too_big", Peer, "The fragments add up to more than 65,535 bytes.";
    FragmentOverlap, "fragment_overlap", Peer, "Fragments overlap, so the whole packet was dropped (RFC 5722).";
    FragmentDuplicate, "fragment_duplicate", Normal, "The same fragment had arrived before.";
    FragmentHeaderChain, "fragment_header_chain", Peer, "The first fragment does not hold the whole header chain (RFC 7112).";
    FragmentMemory, "fragment_memory", Limit, "The memory set aside for fragments is used up.";
    FragmentTimeout, "fragment_timeout", Normal, "The missing fragments did not arrive in time.";

    // ICMP.
    IcmpTruncated, "icmp_truncated", Peer, "The ICMP message is shorter than its type needs.";
    IcmpChecksum, "icmp_checksum", Peer, "The ICMP checksum is wrong.";
    IcmpIgnored, "icmp_ignored", Normal, "The ICMP message is of a type that hosts ignore.";
    IcmpQuote, "icmp_quote", Peer, "The ICMP error quotes a packet that we did not send (RFC 5927).";
    IcmpMtu, "icmp_mtu", Peer, "The ICMP error tells of a path MTU that is under the minimum or no smaller than the one in use (RFC 8201 section 4).";
    IcmpBroadcast, "icmp_broadcast", Peer, "An echo request to a group or broadcast address was not answered.";

    MldMalformed, "mld_malformed", Peer, "The multicast listener message is truncated or may come from off link (RFC 3810).";

    // Transport.
    ProtocolUnknown, "protocol_unknown", Normal, "No protocol above IP takes this packet; the sender was told.";
    UdpTruncated, "udp_truncated", Peer, "The packet is shorter than a UDP header.";
    UdpLength, "udp_length", Peer, "The UDP length is under 8 or past the packet.";
    UdpChecksum, "udp_checksum", Peer, "The UDP checksum is wrong.";
    UdpChecksumUnfilled, "udp_checksum_unfilled", Fault, "The UDP checksum was left unfilled by a sender on this machine: run `ethtool -K DEV tx off` on the peer's device.";
    UdpChecksumMissing, "udp_checksum_missing", Peer, "UDP over IPv6 came without a checksum (RFC 8200 section 8.1).";
    UdpPortZero, "udp_port_zero", Peer, "The UDP destination port is zero.";
    UdpNoSocket, "udp_no_socket", Normal, "No socket is bound to this UDP port; the sender was told.";
    SocketQueueFull, "socket_queue_full", Limit, "The socket's receive queue is full: the application reads too slowly.";
    SocketClosed, "socket_closed", Normal, "The socket was closed with this datagram unread.";
    TcpTruncated, "tcp_truncated", Peer, "The packet is shorter than a TCP header.";
    TcpHeaderLength, "tcp_header_length", Peer, "The TCP data offset is under 20 bytes or past the segment.";
    TcpOptions, "tcp_options", Peer, "A TCP option has an impossible length.";
    TcpChecksum, "tcp_checksum", Peer, "The TCP checksum is wrong.";
    TcpChecksumUnfilled, "tcp_checksum_unfilled", Fault, "The TCP checksum was left unfilled by a sender on this machine: run `ethtool -K DEV tx off` on the peer's device.";
    TcpPortZero, "tcp_port_zero", Peer, "A TCP port is zero.";
    TcpGroup, "tcp_group", Peer, "A TCP segment was sent to a group or to everybody on the link.";
    TcpNoSocket, "tcp_no_socket", Normal, "No socket has this TCP connection or port; the sender was told by a reset.";
    TcpFlags, "tcp_flags", Peer, "The flags of the TCP segment make no sense in the state of its connection.";
    TcpSequence, "tcp_sequence", Peer, "The TCP segment lies outside the receive window.";
    TcpDuplicate, "tcp_duplicate", Normal, "All of the TCP segment had arrived before.";
    TcpAckInvalid, "tcp_ack_invalid", Peer, "The TCP segment acknowledges what was never sent, or is far too old (RFC 5961).";
    TcpReset, "tcp_reset", Peer, "A TCP reset was ignored: its number is not exactly the next one (RFC 5961).";
    TcpPaws, "tcp_paws", Peer, "The time stamp of the TCP segment is older than that of an earlier one (RFC 7323).";
    TcpTimestampMissing, "tcp_timestamp_missing", Peer, "The TCP segment has no time stamp, though both sides agreed on them (RFC 7323).";
    TcpAcceptQueueFull, "tcp_accept_queue_full", Limit, "The listener's accept queue is full: the application accepts too slowly.";
    TcpTableFull, "tcp_table_full", Limit, "There are as many TCP connections as the limits allow.";
    TcpMemory, "tcp_memory", Limit, "The memory set aside for TCP data is used up, or a connection has too many gaps.";

    // Transmit.
    NoRoute, "no_route", Fault, "No route leads to the destination.";
    TransmitQueueFull, "transmit_queue_full", Limit, "The port did not take frames as fast as the stack made them.";
    TransmitFailed, "transmit_failed", Fault, "The kernel or card refused the frame.";
    PacketTooBig, "packet_too_big", Normal, "The packet is larger than the path's MTU and must not be fragmented.";
    IcmpRateLimited, "icmp_rate_limited", Normal, "An ICMP error was not sent because of its rate limit (RFC 4443 section 2.4).";
}

impl DropReason {
    /// The number of reasons in the table.
    pub const COUNT: usize = Self::ALL.len();

    /// The reason with this counter name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.name() == name)
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A count of packets for every drop reason.
#[derive(Clone, PartialEq, Eq)]
pub struct DropCounters([u64; DropReason::COUNT]);

impl DropCounters {
    /// Counters that all stand at zero.
    pub const fn new() -> Self {
        Self([0; DropReason::COUNT])
    }

    /// Counts one packet.
    #[inline]
    pub fn count(&mut self, reason: DropReason) {
        self.add(reason, 1);
    }

    /// Counts `packets` packets.
    #[inline]
    pub fn add(&mut self, reason: DropReason, packets: u64) {
        let counter = &mut self.0[reason as usize];
        *counter = counter.wrapping_add(packets);
    }

    /// Adds every counter of `other`.
    pub fn merge(&mut self, other: &DropCounters) {
        for (reason, packets) in other.iter() {
            self.add(reason, packets);
        }
    }

    /// The packets dropped for this reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// The packets dropped for any reason.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Every reason with its count, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|&reason| (reason, self.get(reason)))
    }

    /// The reasons that were seen at least once.
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
    fn names_are_unique_and_find_their_reason() {
        for &reason in DropReason::ALL {
            assert_eq!(DropReason::from_name(reason.name()), Some(reason));
            assert!(reason.sentence().ends_with('.'), "{reason}");
        }
    }

    #[test]
    fn counters_add_up() {
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
