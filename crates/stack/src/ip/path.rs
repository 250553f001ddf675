//! Path cache: everything needed to send to a destination.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_wire::MacAddr;

use crate::fast_path::family::Family;
use crate::fast_path::template::HeaderTemplate;
use crate::random::HashKey;

/// Path to a destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// Destination address.
    pub(crate) destination: IpAddr,
    /// Preferred source address.
    pub(crate) source: IpAddr,
    /// First router, or the destination itself.
    pub(crate) next_hop: IpAddr,
    /// Hardware address of the next hop; `None` while unresolved.
    pub(crate) mac: Option<MacAddr>,
    /// The path leads to this host: frames are looped back.
    pub(crate) is_loopback: bool,
    /// Path MTU in bytes.
    pub(crate) mtu: u16,
    /// Path MTU for TCP segments: by reports about segments only.
    pub(crate) segment_mtu: u16,
    /// Routers on the path must fragment: its MTU is below the minimum that this host uses.
    pub(crate) routers_fragment: bool,
    /// Precomputed headers for the fast path.
    pub(crate) template: HeaderTemplate,
    /// Longest frame for the fast path in bytes; 0 without a template.
    pub(crate) max_plain_frame_bytes: usize,
    /// Time in nanoseconds until which the entry is valid.
    pub(crate) valid_until_ns: u64,
}

const PATH_SLOTS: usize = 256;

/// Recently used paths in a direct-mapped table.
///
/// Collisions only make lookups slower, so no limit is needed, and filling the table gains a peer
/// nothing.
pub(crate) struct PathCache {
    slots: Box<[(u32, Path); PATH_SLOTS]>,
    generation: u32,
    key: HashKey,
}

impl PathCache {
    pub(crate) fn new(key: HashKey) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let none = Path {
            destination: nowhere,
            source: nowhere,
            next_hop: nowhere,
            mac: None,
            is_loopback: false,
            mtu: 0,
            segment_mtu: 0,
            routers_fragment: false,
            template: HeaderTemplate::NONE,
            max_plain_frame_bytes: 0,
            valid_until_ns: 0,
        };
        Self { slots: Box::new([(0, none); PATH_SLOTS]), generation: 1, key }
    }

    /// Looks up the path to `destination`; `None` unless cached and valid.
    #[inline(always)]
    pub(crate) fn get(&self, now_ns: u64, destination: IpAddr) -> Option<&Path> {
        let (generation, path) = &self.slots[self.slot(destination)];
        let is_valid = *generation == self.generation
            && now_ns < path.valid_until_ns
            && path.destination == destination;
        is_valid.then_some(path)
    }

    /// Headers for datagrams with `len` bytes of payload to `destination`, if the fast path
    /// applies.
    #[inline(always)]
    pub(crate) fn template<F: Family>(
        &self,
        now_ns: u64,
        destination: F::Address,
        len: usize,
    ) -> Option<&HeaderTemplate> {
        let path = self.get(now_ns, destination.into())?;
        (len + F::UDP_HEADERS_BYTES <= path.max_plain_frame_bytes).then_some(&path.template)
    }

    /// Stores a path.
    pub(crate) fn insert(&mut self, path: Path) {
        self.slots[self.slot(path.destination)] = (self.generation, path);
    }

    /// Invalidates all paths, after a change of neighbours, addresses or path MTUs.
    pub(crate) fn invalidate(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.slots.iter_mut().for_each(|slot| slot.0 = 0);
            self.generation = 1;
        }
    }

    #[inline]
    fn slot(&self, destination: IpAddr) -> usize {
        self.key.hash_address(destination) as usize % PATH_SLOTS
    }
}
