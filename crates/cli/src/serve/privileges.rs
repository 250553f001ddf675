//! What a daemon that serves needs no more, it gives up.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};
use tidegate::host::HostPort;

use crate::host::{HostOptions, PortKind};

/// DPDK's driver of the kernel's interfaces.
const AF_PACKET: &str = "net_af_packet";

/// What a daemon keeps while it serves, for its whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept(CapabilitySet);

impl Kept {
    /// What this host needs once its port is open.
    pub(crate) fn of(host: &HostOptions) -> Self {
        // The times for which the card is left alone change with the load, and older
        // kernels let nobody else change the maps of a program.
        let xdp = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
        // A port that was closed for another daemon is opened again if that one fails.
        let again = CapabilitySet::NET_RAW | CapabilitySet::IPC_LOCK;
        let port = match host.port_kind() {
            PortKind::Own(HostPort::Xdp) => xdp | again,
            // It has packet sockets, and sets flags of the interface.
            PortKind::Own(HostPort::Dpdk(config)) if config.device.starts_with(AF_PACKET) => {
                CapabilitySet::NET_ADMIN | again
            }
            PortKind::Own(HostPort::Packet | HostPort::Tap | HostPort::Dpdk(_))
            | PortKind::Kernel => CapabilitySet::empty(),
        };
        let addresses = if host.is_shared() {
            // The kernel is asked for neighbours, and holds every port that moved,
            // also those below 1024.
            CapabilitySet::NET_ADMIN | CapabilitySet::NET_BIND_SERVICE
        } else {
            CapabilitySet::empty()
        };
        Self(port | addresses)
    }

    /// Gives up everything else, for the calling thread and those that it starts.
    pub(crate) fn give_up_the_rest(self) -> io::Result<()> {
        rustix::thread::set_no_new_privs(true)?;
        let has = rustix::thread::capabilities(None)?;
        rustix::thread::clear_ambient_capability_set()?;
        if has.effective.contains(CapabilitySet::SETPCAP) {
            for (_, capability) in CapabilitySet::all().iter_names() {
                // The kernel may know fewer than we do.
                let is_there = rustix::thread::capability_is_in_bounding_set(capability);
                if is_there.unwrap_or(false) && !self.0.contains(capability) {
                    rustix::thread::remove_capability_from_bounding_set(capability)?;
                }
            }
        }
        let kept = self.0 & has.permitted;
        let sets = CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        };
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }

    /// The names, as `capsh` and systemd know them.
    pub(crate) fn names(self) -> String {
        let names: Vec<String> =
            self.0.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
        if names.is_empty() { "no capability".to_owned() } else { names.join(" ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(value: &str) -> Kept {
        Kept::of(&toml::from_str(value).unwrap())
    }

    #[test]
    fn each_port_keeps_what_it_needs() {
        assert_eq!(host("port = 'packet'").names(), "no capability");
        assert_eq!(host("port = 'tap'").names(), "no capability");
        assert_eq!(host("port = 'dpdk:net_memif0'").names(), "no capability");
        assert_eq!(
            host("port = 'dpdk:net_af_packet0,iface=x'").names(),
            "CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK"
        );
        assert_eq!(host("").names(), "CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_BPF");
        assert_eq!(
            host("shared = true").names(),
            "CAP_NET_BIND_SERVICE CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_BPF"
        );
    }

    /// On a thread of its own, since it is for good.
    #[test]
    fn what_is_given_up_is_gone() {
        let left = std::thread::spawn(|| {
            host("port = 'packet'").give_up_the_rest().unwrap();
            (rustix::thread::capabilities(None).unwrap(), rustix::thread::no_new_privs().unwrap())
        });
        let (left, no_new) = left.join().unwrap();
        let none = CapabilitySet::empty();
        assert_eq!(left, CapabilitySets { effective: none, permitted: none, inheritable: none });
        assert!(no_new);
    }
}
