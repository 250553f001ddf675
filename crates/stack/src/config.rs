//! What a stack is told at its start.

use std::net::IpAddr;

use tidegate_wire::{IpCidr, MacAddr, Medium};

/// Who answers for the addresses of the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// The stack alone has the addresses: it answers ARP, neighbour
    /// solicitations and echo requests, sends ICMP errors and resolves
    /// neighbours itself.
    #[default]
    Own,
    /// The kernel has the same addresses and answers for them. The stack sends
    /// no ARP, neighbour discovery, echo replies or ICMP errors; it asks for
    /// neighbours with [`crate::Event::NeighbourWanted`] and is told them by
    /// [`crate::Stack::set_neighbour`].
    Shared,
}

/// A way to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The network; host bits are ignored.
    pub prefix: IpCidr,
    /// The router to hand packets to; `None` when the network is on the link.
    pub gateway: Option<IpAddr>,
}

/// How much the stack may use and how fast it may answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Entries of the neighbour cache.
    pub neighbours: usize,
    /// Frames that wait for one neighbour's hardware address.
    pub unresolved_frames: usize,
    /// Frames that wait for all neighbours together.
    pub unresolved_frames_total: usize,
    /// Memory for incomplete packets, bookkeeping included.
    pub fragment_bytes: usize,
    /// Packets that may be incomplete at one time.
    pub fragment_packets: usize,
    /// Fragments of one packet.
    pub fragments_per_packet: usize,
    /// How long a packet may be incomplete. RFC 8200 section 4.5 says 60
    /// seconds; RFC 1122 section 3.3.2 says 60 to 120.
    pub fragment_timeout_ns: u64,
    /// ICMP errors a second, to all destinations together.
    pub icmp_errors_pps: u32,
    /// ICMP errors a second to the destinations that share a hash bucket.
    pub icmp_errors_per_destination_pps: u32,
    /// Answers to echo requests a second.
    pub icmp_echo_pps: u32,
    /// Destinations with a path MTU under that of the interface.
    pub path_mtus: usize,
    /// How long a smaller path MTU is believed (RFC 8201 section 4 says at
    /// least 5 minutes, and proposes 10).
    pub path_mtu_timeout_ns: u64,
    /// Frames in the transmit queue.
    pub transmit_frames: usize,
    /// Sockets.
    pub sockets: usize,
    /// TCP connections, in whatever state.
    pub tcp_connections: usize,
    /// Connections of one listener that may be half open before it answers
    /// with SYN cookies (RFC 4987).
    pub tcp_half_open: usize,
    /// Memory for the data of all TCP connections together.
    pub tcp_buffer_bytes: usize,
    /// Connections that may be remembered after their end.
    pub tcp_time_waits: usize,
    /// How long they are: twice the time that a segment may be on its way
    /// (RFC 9293 section 3.4.2).
    pub tcp_time_wait_ns: u64,
    /// Resets a second that answer segments for no connection.
    pub tcp_resets_pps: u32,
    /// Datagrams in a socket's receive queue, unless its options say otherwise.
    pub socket_queue_packets: usize,
    /// Bytes in a socket's receive queue, unless its options say otherwise.
    pub socket_queue_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            neighbours: 1024,
            // A datagram of 64 KiB is 45 fragments on Ethernet.
            unresolved_frames: 64,
            unresolved_frames_total: 512,
            fragment_bytes: 4 << 20,
            fragment_packets: 1024,
            fragments_per_packet: 64,
            fragment_timeout_ns: 60_000_000_000,
            icmp_errors_pps: 1000,
            icmp_errors_per_destination_pps: 10,
            icmp_echo_pps: 10_000,
            path_mtus: 1024,
            path_mtu_timeout_ns: 600_000_000_000,
            transmit_frames: 4096,
            sockets: 65_536,
            tcp_connections: 1 << 20,
            tcp_half_open: 1024,
            tcp_buffer_bytes: 256 << 20,
            tcp_time_waits: 65_536,
            tcp_time_wait_ns: 60_000_000_000,
            tcp_resets_pps: 1000,
            socket_queue_packets: 4096,
            socket_queue_bytes: 8 << 20,
        }
    }
}

/// What a stack is told at its start.
#[derive(Clone, Debug)]
pub struct Config {
    /// What frames begin with.
    pub medium: Medium,
    /// Our hardware address; ignored on [`Medium::Ip`].
    pub mac: MacAddr,
    /// The largest IP packet in bytes, link header not counted.
    pub mtu: usize,
    /// The VLAN that the interface is in: its number, 1 to 4094.
    pub vlan: Option<u16>,
    /// Our addresses, each with the network on the link.
    pub addresses: Vec<IpCidr>,
    /// The ways beyond the link.
    pub routes: Vec<Route>,
    /// Who answers for the addresses.
    pub ownership: Ownership,
    /// Whether packets for others are handed over to be forwarded
    /// ([`crate::Router`]) instead of dropped. Only with [`Ownership::Own`].
    pub forwarding: bool,
    /// Whether the port completes checksums: frames to send then carry
    /// `Checksum::Partial`.
    pub transmit_checksum: bool,
    /// The largest TCP payload that the port cuts into segments itself, in
    /// bytes; 0 when it cuts none. Only with [`Config::transmit_checksum`].
    pub segmentation_bytes: usize,
    /// Whether an IPv6 address is checked for being unique before it is used
    /// (RFC 4862 section 5.4). Only with [`Ownership::Own`] on Ethernet.
    pub duplicate_address_detection: bool,
    /// The hop limit (time to live) of packets sent.
    pub hop_limit: u8,
    /// How much may be used.
    pub limits: Limits,
    /// Keys every hash and every choice; from a good source of randomness in
    /// life, fixed in tests.
    pub seed: [u8; 16],
}

impl Config {
    /// An Ethernet interface with an MTU of 1500 and no addresses yet.
    pub fn ethernet(mac: MacAddr, seed: [u8; 16]) -> Self {
        Self {
            medium: Medium::Ethernet,
            mac,
            mtu: 1500,
            vlan: None,
            addresses: Vec::new(),
            routes: Vec::new(),
            ownership: Ownership::Own,
            forwarding: false,
            transmit_checksum: false,
            segmentation_bytes: 0,
            duplicate_address_detection: false,
            hop_limit: 64,
            limits: Limits::default(),
            seed,
        }
    }

    /// An interface without a link header, MTU 1500, no addresses yet.
    pub fn ip(seed: [u8; 16]) -> Self {
        Self { medium: Medium::Ip, ..Self::ethernet(MacAddr::UNSPECIFIED, seed) }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.medium == Medium::Ethernet && !self.mac.is_station() {
            return Err(ConfigError::Mac(self.mac));
        }
        let smallest = match self.addresses.iter().any(|a| a.address().is_ipv6()) {
            true => 1280,
            false => 68,
        };
        if !(smallest..=65_535).contains(&self.mtu) {
            return Err(ConfigError::Mtu { mtu: self.mtu, smallest });
        }
        if let Some(vlan) = self.vlan.filter(|id| !(1..=4094).contains(id)) {
            return Err(ConfigError::Vlan(vlan));
        }
        if self.forwarding && self.ownership == Ownership::Shared {
            return Err(ConfigError::ForwardShared);
        }
        for cidr in &self.addresses {
            let address = cidr.address();
            let broadcast = matches!(address, IpAddr::V4(a) if a.is_broadcast());
            if address.is_unspecified()
                || address.is_multicast()
                || address.is_loopback()
                || broadcast
            {
                return Err(ConfigError::Address(address));
            }
        }
        for route in &self.routes {
            if let Some(gateway) = route.gateway
                && gateway.is_ipv4() != route.prefix.address().is_ipv4()
            {
                return Err(ConfigError::Gateway { prefix: route.prefix, gateway });
            }
        }
        Ok(())
    }
}

/// What is wrong with a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The hardware address cannot be a station's.
    #[error("{0} is a group address or all zero; give the interface one such as 02:00:00:00:00:01")]
    Mac(MacAddr),
    /// The MTU is out of range.
    #[error("an MTU of {mtu} bytes is out of range: choose {smallest} to 65535 bytes")]
    Mtu {
        /// What was asked for.
        mtu: usize,
        /// The least that the addresses allow: 1280 with IPv6 (RFC 8200
        /// section 5), 68 without (RFC 791).
        smallest: usize,
    },
    /// The VLAN number is out of range.
    #[error("VLAN {0} does not exist: choose a number from 1 to 4094")]
    Vlan(u16),
    /// The kernel would forward the same packets.
    #[error("an address shared with the kernel cannot forward: give the router its own addresses")]
    ForwardShared,
    /// The address is none that an interface can have.
    #[error("{0} cannot be the address of an interface: give one host's own address")]
    Address(IpAddr),
    /// The gateway is of the other family.
    #[error("gateway {gateway} cannot lead to {prefix}: give a gateway of the same family")]
    Gateway {
        /// Where the route leads.
        prefix: IpCidr,
        /// The gateway it names.
        gateway: IpAddr,
    },
}
