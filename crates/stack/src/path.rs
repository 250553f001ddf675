//! What is known about the way to a destination, kept close at hand.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::MacAddr;

use crate::chance::HashKey;
use crate::fast_path::{HEADERS_V4_BYTES, HEADERS_V6_BYTES, Template};

/// The way to a destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// Where it leads.
    pub(crate) destination: IpAddr,
    /// The best of our addresses to send from.
    pub(crate) source: IpAddr,
    /// The router or the destination itself.
    pub(crate) next_hop: IpAddr,
    /// Its hardware address; `None` while it is being asked for.
    pub(crate) mac: Option<MacAddr>,
    /// It leads to ourselves: frames come back in.
    pub(crate) loops: bool,
    /// The largest packet that fits through.
    pub(crate) mtu: usize,
    /// Routers on the way have to fragment: it is narrower than our least.
    pub(crate) routers_fragment: bool,
    /// Headers made ready, where the short way can be taken.
    pub(crate) template: Template,
    /// The longest frame that can go the short way; 0 without a template.
    pub(crate) plain_bytes: usize,
    /// When to look everything up again.
    pub(crate) valid_until_ns: u64,
}

const SLOTS: usize = 256;

/// The paths used last, in a table where each destination has one place.
///
/// A table that others push out of is only slower, so no limit is needed and
/// no peer gains anything by filling it.
pub(crate) struct Paths {
    slots: Box<[(u32, Path); SLOTS]>,
    generation: u32,
    key: HashKey,
}

impl Paths {
    pub(crate) fn new(key: HashKey) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let none = Path {
            destination: nowhere,
            source: nowhere,
            next_hop: nowhere,
            mac: None,
            loops: false,
            mtu: 0,
            routers_fragment: false,
            template: Template::NONE,
            plain_bytes: 0,
            valid_until_ns: 0,
        };
        Self { slots: Box::new([(0, none); SLOTS]), generation: 1, key }
    }

    /// The path to `destination`, if it is here and still right.
    #[inline(always)]
    pub(crate) fn get(&self, now_ns: u64, destination: IpAddr) -> Option<&Path> {
        let (generation, path) = &self.slots[self.slot(destination)];
        let right = *generation == self.generation
            && now_ns < path.valid_until_ns
            && path.destination == destination;
        right.then_some(path)
    }

    /// The headers for datagrams of `len` bytes to `destination`, if they can go
    /// the short way.
    #[inline(always)]
    pub(crate) fn plain_v4(
        &self,
        now_ns: u64,
        destination: Ipv4Addr,
        len: usize,
    ) -> Option<&Template> {
        let path = self.get(now_ns, destination.into())?;
        (len + HEADERS_V4_BYTES <= path.plain_bytes).then_some(&path.template)
    }

    /// As [`Paths::plain_v4`].
    #[inline(always)]
    pub(crate) fn plain_v6(
        &self,
        now_ns: u64,
        destination: Ipv6Addr,
        len: usize,
    ) -> Option<&Template> {
        let path = self.get(now_ns, destination.into())?;
        (len + HEADERS_V6_BYTES <= path.plain_bytes).then_some(&path.template)
    }

    /// Keeps a path.
    pub(crate) fn put(&mut self, path: Path) {
        self.slots[self.slot(path.destination)] = (self.generation, path);
    }

    /// Forgets every path: something that they were made from has changed.
    pub(crate) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.slots.iter_mut().for_each(|slot| slot.0 = 0);
            self.generation = 1;
        }
    }

    #[inline]
    fn slot(&self, destination: IpAddr) -> usize {
        self.key.address(destination) as usize % SLOTS
    }
}
