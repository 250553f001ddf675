//! Two hosts and a router between them, each in a namespace of its own.

use crate::error::LabError;
use crate::netns::{End, Namespace, VethConfig, VethPair};

/// The host on the left.
pub const LEFT_V4: &str = "10.7.1.1";
/// The host on the left, in IPv6.
pub const LEFT_V6: &str = "fd07:1::1";
/// The host on the right.
pub const RIGHT_V4: &str = "10.7.2.1";
/// The host on the right, in IPv6.
pub const RIGHT_V6: &str = "fd07:2::1";
/// The router's addresses on the left.
pub const ROUTER_LEFT: [&str; 2] = ["10.7.1.254", "fd07:1::fe"];
/// The router's addresses on the right.
pub const ROUTER_RIGHT: [&str; 2] = ["10.7.2.254", "fd07:2::fe"];

/// Two kernel hosts, and a namespace between them with a device to each, whose
/// addresses are the router's to answer for. Offloads are off: what goes over
/// the devices are the frames that would go over a wire.
pub struct RouterSite {
    /// The host on the left.
    pub left: End,
    /// The host on the right.
    pub right: End,
    /// Where the router runs.
    pub router: Namespace,
    /// The router's device to the left.
    pub left_device: String,
    /// Its hardware address.
    pub left_mac: [u8; 6],
    /// The router's device to the right.
    pub right_device: String,
    /// Its hardware address.
    pub right_mac: [u8; 6],
    _other: Namespace,
}

impl RouterSite {
    /// Makes the namespaces. The hosts know the router as their gateway.
    ///
    /// # Errors
    /// As [`VethPair::new`].
    pub fn new() -> Result<Self, LabError> {
        let pair = |v4: &str, v6: &str| {
            let a = vec![format!("{v4}/24"), format!("{v6}/64")];
            VethPair::new(&VethConfig { a, b: Vec::new() })
        };
        let (left, right) = (pair(LEFT_V4, LEFT_V6)?, pair(RIGHT_V4, RIGHT_V6)?);
        let (near, far) = (left.b, right.b);
        far.namespace.ip(&["link", "set", &far.device, "netns", near.namespace.name()])?;
        near.namespace.ip(&["link", "set", &far.device, "addrgenmode", "none"])?;
        near.namespace.ip(&["link", "set", &far.device, "up"])?;
        let site = Self {
            left: left.a,
            right: right.a,
            router: near.namespace,
            left_device: near.device,
            left_mac: near.mac,
            right_device: far.device,
            right_mac: far.mac,
            _other: far.namespace,
        };
        for (host, [v4, v6]) in [(&site.left, ROUTER_LEFT), (&site.right, ROUTER_RIGHT)] {
            host.namespace.ip(&["route", "add", "default", "via", v4])?;
            host.namespace.ip(&["-6", "route", "add", "default", "via", v6])?;
        }
        Ok(site)
    }

    /// The flags of `tidegate route` for both ports, of this kind. Of DPDK's
    /// devices it is the one on packet sockets.
    pub fn port_flags(&self, kind: &str) -> [String; 4] {
        let device = |number: usize, name: &str| match kind {
            "dpdk" => format!("net_af_packet{number},iface={name}"),
            _ => name.to_owned(),
        };
        let port = |device: String, [v4, v6]: [&str; 2]| format!("{kind}:{device},{v4}/24,{v6}/64");
        [
            "--port".into(),
            port(device(0, &self.left_device), ROUTER_LEFT),
            "--port".into(),
            port(device(1, &self.right_device), ROUTER_RIGHT),
        ]
    }
}
