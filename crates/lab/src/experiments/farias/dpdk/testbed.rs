//! Testbed of two cores, joined by DPDK devices without the kernel's network stack.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use tempfile::TempDir;
use tidegate_load::{LinkKind, LoadConfig, TcpLoadConfig};

use crate::error::LabError;
use crate::testbed::folder;
use crate::testbed::process::{ServerProcess, command_on_core};
use crate::testbed::programs;

const SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const PREFIX_BITS: u8 = 16;

/// Memory flag of DPDK's EAL in every process: ordinary memory, which every machine has.
pub(super) const EAL_MEMORY_FLAG: &str = "--no-huge";

/// Kind of wire between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WireKind {
    /// memif: shared memory; each side copies frames into and out of it.
    Memif,
    /// virtio-user: a virtual machine's NIC; the server has the host's side, vhost-user.
    VirtioUser,
}

impl WireKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Memif => "memif",
            Self::VirtioUser => "virtio-user",
        }
    }
}

/// Devices at the two ends of a wire.
pub(super) struct WireDevices {
    pub(super) server: String,
    pub(super) load: String,
}

/// Testbed: the cores of server and load generator, and the folder of the wires' sockets.
pub(super) struct DpdkTestbed {
    pub(super) server_core: usize,
    pub(super) load_core: usize,
    folder: TempDir,
    wire_count: Cell<u32>,
}

impl DpdkTestbed {
    pub(super) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let folder = folder::private()?;
        Ok(Self { server_core, load_core, folder, wire_count: Cell::new(0) })
    }

    /// Folder for files.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Creates device strings for a new wire with a socket path of its own.
    pub(super) fn new_wire(&self, wire: WireKind) -> WireDevices {
        let number = self.wire_count.replace(self.wire_count.get() + 1);
        let path = self.folder().join(format!("wire{number}"));
        let path = path.display();
        match wire {
            WireKind::Memif => {
                let end =
                    |role| format!("net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
                WireDevices { server: end("server"), load: end("client") }
            }
            WireKind::VirtioUser => WireDevices {
                server: format!("net_vhost0,iface={path},queues=1"),
                load: format!("net_virtio_user0,path={path}"),
            },
        }
    }

    /// Starts `tidegate daemon` with these arguments on a device, and waits until the server is
    /// ready.
    pub(super) fn start_service(
        &self,
        arguments: &[&str],
        device: &str,
    ) -> Result<ServerProcess, LabError> {
        let mut command = command_on_core(self.server_core, programs::tidegate()?);
        command.arg("serve").args(arguments).arg("--json");
        command.args(["--io", &format!("dpdk:{device} {EAL_MEMORY_FLAG}")]);
        command.args(["--address", &format!("{SERVER_ADDRESS}/{PREFIX_BITS}")]);
        command.args(["--cpu", &self.server_core.to_string()]);
        let mut process = ServerProcess::start("tidegate serve", &mut command)?;
        process.wait_for_first_line()?;
        Ok(process)
    }

    /// Configuration of a UDP load from the load generator's core.
    pub(super) fn load_config(&self, device: &str, port: u16, seconds: f64) -> LoadConfig {
        LoadConfig {
            interface: Some(format!("{device} {EAL_MEMORY_FLAG}")),
            source: Some(CLIENT_ADDRESS.into()),
            seconds,
            warm_up_seconds: seconds / 4.0,
            core: Some(self.load_core),
            ..LoadConfig::new(LinkKind::Dpdk, SocketAddr::new(SERVER_ADDRESS.into(), port))
        }
    }

    /// Configuration of a TCP load from the load generator's core.
    pub(super) fn tcp_load_config(&self, device: &str, port: u16, seconds: f64) -> TcpLoadConfig {
        TcpLoadConfig {
            interface: Some(format!("{device} {EAL_MEMORY_FLAG}")),
            source: Some(CLIENT_ADDRESS.into()),
            prefix_len: PREFIX_BITS,
            seconds,
            warm_up_seconds: seconds / 4.0,
            core: Some(self.load_core),
            ..TcpLoadConfig::new(LinkKind::Dpdk, SocketAddr::new(SERVER_ADDRESS.into(), port))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wires_have_distinct_paths() {
        let testbed = DpdkTestbed::new(1, 0).unwrap();
        for wire in [WireKind::Memif, WireKind::VirtioUser] {
            let (first, second) = (testbed.new_wire(wire), testbed.new_wire(wire));
            assert_ne!(first.server, second.server);
            let path = |device: &str| device.rsplit_once("wire").unwrap().1[..1].to_owned();
            assert_eq!(path(&first.server), path(&first.load));
        }
    }
}
