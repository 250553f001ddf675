//! Dropping of the privileges that the daemon does not need once it serves.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};
use tidegate::host::HostDevice;

use crate::host::{HostOptions, IoKind};
use crate::sandbox::drop_from_bounding_set;

/// Name of DPDK's driver for kernel interfaces.
const AF_PACKET: &str = "net_af_packet";

/// Capabilities that the daemon keeps for its whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptCapabilities(CapabilitySet);

impl KeptCapabilities {
    /// Returns the capabilities that this host configuration needs once its device is open.
    pub(crate) fn for_host(host: &HostOptions) -> Self {
        // The interrupt deferral times of the device change with the load, and older kernels let
        // no other process change the maps of an XDP program.
        let xdp = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
        // A device closed for an upgrade is opened again if the new daemon fails.
        let reopen = CapabilitySet::NET_RAW | CapabilitySet::IPC_LOCK;
        let device = match host.io_kind() {
            // A NIC's driver in the kernel refuses requests of a process whose rights have changed
            // since it opened the device.
            IoKind::Device(HostDevice::Rdma(_)) => return Self(CapabilitySet::all()),
            IoKind::Device(HostDevice::Auto | HostDevice::Xdp) => xdp | reopen,
            // The ports that it diverts change.
            IoKind::Device(HostDevice::Packet) if host.is_shared() => xdp | reopen,
            // This DPDK driver has packet sockets, and sets flags of the interface.
            IoKind::Device(HostDevice::Dpdk(config)) if config.device.starts_with(AF_PACKET) => {
                CapabilitySet::NET_ADMIN | reopen
            }
            IoKind::Device(HostDevice::Packet | HostDevice::Tap | HostDevice::Dpdk(_))
            | IoKind::Kernel => CapabilitySet::empty(),
        };
        let addresses = if host.is_shared() {
            // Neighbours are resolved by the kernel, and each redirected port is bound there,
            // also ports below 1024.
            CapabilitySet::NET_ADMIN | CapabilitySet::NET_BIND_SERVICE
        } else {
            CapabilitySet::empty()
        };
        // Beside CPU-bound threads the priority of a network core changes with the load.
        Self(device | addresses | CapabilitySet::SYS_NICE)
    }

    /// Drops all other capabilities, for the calling thread and the threads that it starts.
    pub(crate) fn drop_all_others(self) -> io::Result<()> {
        rustix::thread::set_no_new_privs(true)?;
        if self.0.is_all() {
            return Ok(());
        }
        let has = rustix::thread::capabilities(None)?;
        rustix::thread::clear_ambient_capability_set()?;
        if has.effective.contains(CapabilitySet::SETPCAP) {
            drop_from_bounding_set(CapabilitySet::all() - self.0)?;
        }
        let kept = self.0 & has.permitted;
        let sets = CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        };
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }

    /// Returns the names, as `capsh` and systemd write them.
    pub(crate) fn names(self) -> String {
        if self.0.is_all() {
            return "all capabilities".to_owned();
        }
        let names: Vec<String> =
            self.0.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
        if names.is_empty() { "no capability".to_owned() } else { names.join(" ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_for(value: &str) -> KeptCapabilities {
        KeptCapabilities::for_host(&toml::from_str(value).unwrap())
    }

    #[test]
    fn keeps_required_capabilities_of_each_device() {
        assert_eq!(kept_for("io = 'packet'").names(), "CAP_SYS_NICE");
        assert_eq!(kept_for("io = 'packet'\nshared = true"), kept_for("io = 'xdp'\nshared = true"));
        assert_eq!(kept_for("port = 'tap'").names(), "CAP_SYS_NICE");
        assert_eq!(kept_for("port = 'dpdk:net_memif0'").names(), "CAP_SYS_NICE");
        assert_eq!(kept_for("io = 'rdma:rxe0'").names(), "all capabilities");
        assert_eq!(
            kept_for("port = 'dpdk:net_af_packet0,iface=x'").names(),
            "CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_SYS_NICE"
        );
        assert_eq!(
            kept_for("").names(),
            "CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_SYS_NICE CAP_BPF"
        );
        assert_eq!(
            kept_for("shared = true").names(),
            "CAP_NET_BIND_SERVICE CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_SYS_NICE CAP_BPF"
        );
    }

    /// Runs on its own thread, because dropped capabilities cannot be regained.
    #[test]
    fn dropped_capabilities_are_gone() {
        let remaining = std::thread::spawn(|| {
            kept_for("io = 'packet'").drop_all_others().unwrap();
            (rustix::thread::capabilities(None).unwrap(), rustix::thread::no_new_privs().unwrap())
        });
        let (remaining, no_new) = remaining.join().unwrap();
        let kept = remaining.permitted;
        assert!(CapabilitySet::SYS_NICE.contains(kept), "{kept:?}");
        let inheritable = CapabilitySet::empty();
        assert_eq!(remaining, CapabilitySets { effective: kept, permitted: kept, inheritable });
        assert!(no_new);
    }
}
