//! Two hosts and a router between them, each in its own network namespace.

use crate::error::LabError;
use crate::testbed::netns::{Namespace, VethConfig, VethEnd, VethPair};

/// IPv4 address of the left host.
pub const LEFT_V4: &str = "10.7.1.1";
/// IPv6 address of the left host.
pub const LEFT_V6: &str = "fd07:1::1";
/// IPv4 address of the right host.
pub const RIGHT_V4: &str = "10.7.2.1";
/// IPv6 address of the right host.
pub const RIGHT_V6: &str = "fd07:2::1";
/// IPv4 and IPv6 address of the router on the left.
pub const ROUTER_LEFT: [&str; 2] = ["10.7.1.254", "fd07:1::fe"];
/// IPv4 and IPv6 address of the router on the right.
pub const ROUTER_RIGHT: [&str; 2] = ["10.7.2.254", "fd07:2::fe"];

/// Two kernel hosts, and a namespace between them with a device to each host.
///
/// The router answers for the addresses of these devices.
pub struct RouterTestbed {
    /// Left host.
    pub left: VethEnd,
    /// Right host.
    pub right: VethEnd,
    /// Namespace of the router.
    pub router: Namespace,
    /// Name of the router's left device.
    pub left_device: String,
    /// MAC address of the left device.
    pub left_mac: [u8; 6],
    /// Name of the router's right device.
    pub right_device: String,
    /// MAC address of the right device.
    pub right_mac: [u8; 6],
    _other: Namespace,
}

impl RouterTestbed {
    /// Creates the namespaces. The router is the default gateway of both hosts.
    ///
    /// # Errors
    /// As [`VethPair::new`].
    pub fn new() -> Result<Self, LabError> {
        Self::with_queues(1)
    }

    /// As [`RouterTestbed::new`], with as many queues of each device.
    ///
    /// # Errors
    /// As [`VethPair::with_queues`].
    pub fn with_queues(queues: usize) -> Result<Self, LabError> {
        Self::with_pairs(|config| VethPair::with_queues(config, queues))
    }

    /// As [`RouterTestbed::new`], with offloads off: the devices carry the frames of a physical
    /// link.
    ///
    /// # Errors
    /// As [`VethPair::as_on_a_wire`].
    pub fn as_on_a_wire() -> Result<Self, LabError> {
        Self::with_pairs(VethPair::as_on_a_wire)
    }

    fn with_pairs(
        new_pair: impl Fn(&VethConfig) -> Result<VethPair, LabError>,
    ) -> Result<Self, LabError> {
        let pair = |v4: &str, v6: &str| {
            let a = vec![format!("{v4}/24"), format!("{v6}/64")];
            new_pair(&VethConfig { a, b: Vec::new() })
        };
        let (left, right) = (pair(LEFT_V4, LEFT_V6)?, pair(RIGHT_V4, RIGHT_V6)?);
        let (near, far) = (left.b, right.b);
        far.namespace.ip(&["link", "set", &far.device, "netns", near.namespace.name()])?;
        near.namespace.ip(&["link", "set", &far.device, "addrgenmode", "none"])?;
        near.namespace.ip(&["link", "set", &far.device, "up"])?;
        let testbed = Self {
            left: left.a,
            right: right.a,
            router: near.namespace,
            left_device: near.device,
            left_mac: near.mac,
            right_device: far.device,
            right_mac: far.mac,
            _other: far.namespace,
        };
        for (host, [v4, v6]) in [(&testbed.left, ROUTER_LEFT), (&testbed.right, ROUTER_RIGHT)] {
            host.namespace.ip(&["route", "add", "default", "via", v4])?;
            host.namespace.ip(&["-6", "route", "add", "default", "via", v6])?;
        }
        Ok(testbed)
    }

    /// Flags of `tidegate route` for both devices, with this kind of I/O. For `dpdk`, the devices
    /// are DPDK's packet-socket devices (`net_af_packet`).
    pub fn device_flags(&self, kind: &str) -> [String; 4] {
        let device = |number: usize, name: &str| match kind {
            "dpdk" => format!("net_af_packet{number},iface={name}"),
            _ => name.to_owned(),
        };
        let interface =
            |device: String, [v4, v6]: [&str; 2]| format!("{kind}:{device},{v4}/24,{v6}/64");
        [
            "--io".into(),
            interface(device(0, &self.left_device), ROUTER_LEFT),
            "--io".into(),
            interface(device(1, &self.right_device), ROUTER_RIGHT),
        ]
    }
}
