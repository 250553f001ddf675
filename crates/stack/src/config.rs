//! Configuration of a stack.

use std::net::IpAddr;

use tidegate_wire::{IpCidr, MacAddr, Medium};

/// Division of work between stack and kernel for the interface's addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressOwnership {
    /// The stack alone uses the addresses: it answers ARP, neighbour solicitations and echo
    /// requests, sends ICMP errors and resolves neighbours itself.
    #[default]
    Exclusive,
    /// The kernel has the same addresses and answers for them. The stack sends no ARP, neighbour
    /// discovery, echo replies or ICMP errors. It requests neighbour entries with
    /// [`crate::Event::NeighbourUnresolved`]; the caller supplies them by
    /// [`crate::Stack::set_neighbour`].
    Shared,
}

/// Route to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination network; host bits are ignored.
    pub prefix: IpCidr,
    /// Next-hop router; `None` when the network is on the link.
    pub gateway: Option<IpAddr>,
}

/// Limits on the memory that a stack uses and on the rate of its replies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Limits {
    /// Entries of the neighbour cache.
    pub neighbours: usize,
    /// Frames queued for one unresolved neighbour.
    pub unresolved_frames: usize,
    /// Frames queued for all unresolved neighbours together.
    pub unresolved_frames_total: usize,
    /// Memory for incomplete packets in bytes, bookkeeping included.
    pub fragment_bytes: usize,
    /// Incomplete packets at one time.
    pub fragment_packets: usize,
    /// Fragments per packet.
    pub fragments_per_packet: usize,
    /// Reassembly timeout in nanoseconds. RFC 8200 section 4.5 requires 60 seconds; RFC 1122
    /// section 3.3.2 recommends 60 to 120.
    pub fragment_timeout_ns: u64,
    /// ICMP errors per second, to all destinations together.
    pub icmp_errors_pps: u32,
    /// ICMP errors per second to the destinations that share a hash bucket.
    pub icmp_errors_per_destination_pps: u32,
    /// Echo replies per second.
    pub icmp_echo_pps: u32,
    /// Destinations with a path MTU below that of the interface.
    pub path_mtus: usize,
    /// Lifetime of a reduced path MTU in nanoseconds (RFC 8201 section 4: at least 5 minutes,
    /// recommended 10).
    pub path_mtu_timeout_ns: u64,
    /// Frames in the transmit queue.
    pub transmit_frames: usize,
    /// UDP sockets.
    pub sockets: usize,
    /// TCP connections, in any state.
    pub tcp_connections: usize,
    /// Half-open connections of one listener; beyond this limit the listener answers with SYN
    /// cookies (RFC 4987).
    pub tcp_half_open: usize,
    /// Buffer memory of all TCP connections together, in bytes.
    pub tcp_buffer_bytes: usize,
    /// Connections in TIME-WAIT.
    pub tcp_time_waits: usize,
    /// Duration of TIME-WAIT in nanoseconds: twice the maximum segment lifetime (RFC 9293
    /// section 3.4.2).
    pub tcp_time_wait_ns: u64,
    /// Resets per second in answer to segments that belong to no connection. A reset is no longer
    /// than the segment that it answers, so the default only bounds the work, as in the kernel.
    pub tcp_resets_pps: u32,
    /// Datagrams in a socket's receive queue, unless the socket's options set another limit.
    pub socket_queue_packets: usize,
    /// Bytes in a socket's receive queue, unless the socket's options set another limit.
    pub socket_queue_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            neighbours: 1024,
            // A datagram of 64 KiB has 45 fragments on Ethernet.
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
            tcp_resets_pps: 1_000_000,
            socket_queue_packets: 4096,
            socket_queue_bytes: 8 << 20,
        }
    }
}

impl Limits {
    /// Limits the entries of the neighbour cache.
    pub fn neighbours(self, neighbours: usize) -> Self {
        Self { neighbours, ..self }
    }

    /// Limits the frames queued for one unresolved neighbour.
    pub fn unresolved_frames(self, unresolved_frames: usize) -> Self {
        Self { unresolved_frames, ..self }
    }

    /// Limits the frames queued for all unresolved neighbours together.
    pub fn unresolved_frames_total(self, unresolved_frames_total: usize) -> Self {
        Self { unresolved_frames_total, ..self }
    }

    /// Limits the memory for incomplete packets in bytes.
    pub fn fragment_bytes(self, fragment_bytes: usize) -> Self {
        Self { fragment_bytes, ..self }
    }

    /// Limits the incomplete packets at one time.
    pub fn fragment_packets(self, fragment_packets: usize) -> Self {
        Self { fragment_packets, ..self }
    }

    /// Limits the fragments per packet.
    pub fn fragments_per_packet(self, fragments_per_packet: usize) -> Self {
        Self { fragments_per_packet, ..self }
    }

    /// Sets the reassembly timeout in nanoseconds.
    pub fn fragment_timeout_ns(self, fragment_timeout_ns: u64) -> Self {
        Self { fragment_timeout_ns, ..self }
    }

    /// Limits the ICMP errors per second, to all destinations together.
    pub fn icmp_errors_pps(self, icmp_errors_pps: u32) -> Self {
        Self { icmp_errors_pps, ..self }
    }

    /// Limits the ICMP errors per second to the destinations that share a hash bucket.
    pub fn icmp_errors_per_destination_pps(self, icmp_errors_per_destination_pps: u32) -> Self {
        Self { icmp_errors_per_destination_pps, ..self }
    }

    /// Limits the echo replies per second.
    pub fn icmp_echo_pps(self, icmp_echo_pps: u32) -> Self {
        Self { icmp_echo_pps, ..self }
    }

    /// Limits the destinations with a path MTU below that of the interface.
    pub fn path_mtus(self, path_mtus: usize) -> Self {
        Self { path_mtus, ..self }
    }

    /// Sets the lifetime of a reduced path MTU in nanoseconds.
    pub fn path_mtu_timeout_ns(self, path_mtu_timeout_ns: u64) -> Self {
        Self { path_mtu_timeout_ns, ..self }
    }

    /// Limits the frames in the transmit queue.
    pub fn transmit_frames(self, transmit_frames: usize) -> Self {
        Self { transmit_frames, ..self }
    }

    /// Limits the UDP sockets.
    pub fn sockets(self, sockets: usize) -> Self {
        Self { sockets, ..self }
    }

    /// Limits the TCP connections, in any state.
    pub fn tcp_connections(self, tcp_connections: usize) -> Self {
        Self { tcp_connections, ..self }
    }

    /// Limits the half-open connections of one listener.
    pub fn tcp_half_open(self, tcp_half_open: usize) -> Self {
        Self { tcp_half_open, ..self }
    }

    /// Limits the buffer memory of all TCP connections together, in bytes.
    pub fn tcp_buffer_bytes(self, tcp_buffer_bytes: usize) -> Self {
        Self { tcp_buffer_bytes, ..self }
    }

    /// Limits the connections in TIME-WAIT.
    pub fn tcp_time_waits(self, tcp_time_waits: usize) -> Self {
        Self { tcp_time_waits, ..self }
    }

    /// Sets the duration of TIME-WAIT in nanoseconds.
    pub fn tcp_time_wait_ns(self, tcp_time_wait_ns: u64) -> Self {
        Self { tcp_time_wait_ns, ..self }
    }

    /// Limits the resets per second in answer to segments that belong to no connection.
    pub fn tcp_resets_pps(self, tcp_resets_pps: u32) -> Self {
        Self { tcp_resets_pps, ..self }
    }

    /// Limits the datagrams in a socket's receive queue.
    pub fn socket_queue_packets(self, socket_queue_packets: usize) -> Self {
        Self { socket_queue_packets, ..self }
    }

    /// Limits the bytes in a socket's receive queue.
    pub fn socket_queue_bytes(self, socket_queue_bytes: usize) -> Self {
        Self { socket_queue_bytes, ..self }
    }
}

/// Configuration of a stack.
///
/// # Examples
/// ```
/// use tidegate_stack::{Config, Limits};
/// use tidegate_wire::MacAddr;
///
/// let seed = [7; 16]; // Use a secure random source.
/// let config = Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), seed)
///     .addresses(vec!["192.0.2.1/24".parse()?, "2001:db8::1/64".parse()?])
///     .limits(Limits::default().tcp_connections(10_000));
/// # assert_eq!(config.mtu, 1500);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
#[must_use]
pub struct Config {
    /// Link layer of the frames.
    pub medium: Medium,
    /// Hardware address of the interface; ignored on [`Medium::Ip`].
    pub mac: MacAddr,
    /// MTU: the largest IP packet in bytes, without the link header.
    pub mtu: usize,
    /// VLAN identifier of the interface, 1 to 4094; `None` for untagged frames.
    pub vlan: Option<u16>,
    /// Addresses of the interface, each with the prefix of its on-link network.
    pub addresses: Vec<IpCidr>,
    /// Routes beyond the link.
    pub routes: Vec<Route>,
    /// Owner of the addresses: the stack alone, or stack and kernel together.
    pub ownership: AddressOwnership,
    /// True to forward packets for other hosts by a [`crate::Router`] instead of dropping them.
    /// Requires [`AddressOwnership::Exclusive`].
    pub forwarding: bool,
    /// True if the device completes transport checksums: frames to send then carry
    /// `Checksum::Partial`.
    pub transmit_checksum: bool,
    /// Largest TCP payload in bytes that the device segments itself (TSO); 0 without TSO. Requires
    /// [`Config::transmit_checksum`].
    pub max_tso_bytes: usize,
    /// Hop limit (time to live) of sent packets.
    pub hop_limit: u8,
    /// Resource limits.
    pub limits: Limits,
    /// Seed of every hash key and random number. Use a secure random source; tests use a fixed
    /// seed.
    pub seed: [u8; 16],
}

impl Config {
    /// Configuration of an Ethernet interface with an MTU of 1500 bytes and no addresses.
    pub fn ethernet(mac: MacAddr, seed: [u8; 16]) -> Self {
        Self {
            medium: Medium::Ethernet,
            mac,
            mtu: 1500,
            vlan: None,
            addresses: Vec::new(),
            routes: Vec::new(),
            ownership: AddressOwnership::Exclusive,
            forwarding: false,
            transmit_checksum: false,
            max_tso_bytes: 0,
            hop_limit: 64,
            limits: Limits::default(),
            seed,
        }
    }

    /// Configuration of an interface without a link header, MTU 1500 bytes, no addresses.
    pub fn ip(seed: [u8; 16]) -> Self {
        Self { medium: Medium::Ip, ..Self::ethernet(MacAddr::UNSPECIFIED, seed) }
    }

    /// Sets the link layer of the frames.
    pub fn medium(self, medium: Medium) -> Self {
        Self { medium, ..self }
    }

    /// Sets the hardware address of the interface.
    pub fn mac(self, mac: MacAddr) -> Self {
        Self { mac, ..self }
    }

    /// Sets the largest IP packet in bytes, without the link header.
    pub fn mtu(self, mtu: usize) -> Self {
        Self { mtu, ..self }
    }

    /// Sets the VLAN identifier, 1 to 4094; `None` for untagged frames.
    pub fn vlan(self, vlan: impl Into<Option<u16>>) -> Self {
        Self { vlan: vlan.into(), ..self }
    }

    /// Sets the addresses of the interface.
    pub fn addresses(self, addresses: Vec<IpCidr>) -> Self {
        Self { addresses, ..self }
    }

    /// Sets the routes beyond the link.
    pub fn routes(self, routes: Vec<Route>) -> Self {
        Self { routes, ..self }
    }

    /// Sets the owner of the addresses.
    pub fn ownership(self, ownership: AddressOwnership) -> Self {
        Self { ownership, ..self }
    }

    /// Sets whether packets for other hosts are forwarded.
    pub fn forwarding(self, forwarding: bool) -> Self {
        Self { forwarding, ..self }
    }

    /// Sets whether the device completes transport checksums.
    pub fn transmit_checksum(self, transmit_checksum: bool) -> Self {
        Self { transmit_checksum, ..self }
    }

    /// Sets the largest TCP payload in bytes that the device segments; 0 without TSO.
    pub fn max_tso_bytes(self, max_tso_bytes: usize) -> Self {
        Self { max_tso_bytes, ..self }
    }

    /// Sets the hop limit of sent packets.
    pub fn hop_limit(self, hop_limit: u8) -> Self {
        Self { hop_limit, ..self }
    }

    /// Sets the resource limits.
    pub fn limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Sets the seed of every hash key and random number.
    pub fn seed(self, seed: [u8; 16]) -> Self {
        Self { seed, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.medium == Medium::Ethernet && !self.mac.is_valid_unicast() {
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
        if self.forwarding && self.ownership == AddressOwnership::Shared {
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

/// Error in a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The hardware address is a group address or all zero.
    #[error(
        "{0} is a group address or all zero: set a unicast MAC address such as 02:00:00:00:00:01"
    )]
    Mac(MacAddr),
    /// The MTU is out of range.
    #[error("an MTU of {mtu} bytes is out of range: set {smallest} to 65535 bytes")]
    Mtu {
        /// The configured MTU in bytes.
        mtu: usize,
        /// The minimum for the configured addresses: 1280 bytes with IPv6 (RFC 8200 section 5), 68
        /// without (RFC 791).
        smallest: usize,
    },
    /// The VLAN identifier is out of range.
    #[error("VLAN identifier {0} is out of range: set 1 to 4094")]
    Vlan(u16),
    /// Forwarding on addresses that are shared with the kernel: the kernel would forward the same
    /// packets.
    #[error(
        "forwarding is not possible on addresses shared with the kernel: give the router its own"
    )]
    ForwardShared,
    /// The address is unspecified, multicast, loopback or broadcast.
    #[error("{0} is not a valid interface address: set a unicast address")]
    Address(IpAddr),
    /// Prefix and gateway are of different families.
    #[error(
        "gateway {gateway} of route {prefix} is of another address family: set one of the same"
    )]
    Gateway {
        /// Destination of the route.
        prefix: IpCidr,
        /// Gateway of the route.
        gateway: IpAddr,
    },
}
