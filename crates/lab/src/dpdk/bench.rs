//! Two cores, and wires of DPDK's between them that the kernel has no part in.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use tempfile::TempDir;

use crate::error::LabError;
use crate::livelock::subject::this_program;
use crate::load::{LinkKind, LoadConfig, TcpLoadConfig};
use crate::process::{Process, command_on_core};

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const PREFIX: u8 = 16;

/// What DPDK is told in every process: memory that every machine has.
pub(super) const MEMORY: &str = "--no-huge";

/// What joins two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// Shared memory, copied into and out of by either side.
    Memif,
    /// A virtual machine's card: the server has the host's side, vhost-user.
    VirtioUser,
}

impl Wire {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Memif => "memif",
            Self::VirtioUser => "virtio-user",
        }
    }
}

/// A device for either side of a wire.
pub(super) struct Ends {
    pub(super) server: String,
    pub(super) load: String,
}

/// Who does what, and where the wires are.
pub(super) struct Bench {
    pub(super) server_core: usize,
    pub(super) load_core: usize,
    folder: TempDir,
    wires: Cell<u32>,
}

impl Bench {
    pub(super) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder for files"))?;
        Ok(Self { server_core, load_core, folder, wires: Cell::new(0) })
    }

    /// Where files go.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A wire that nobody else has.
    pub(super) fn wire(&self, wire: Wire) -> Ends {
        let number = self.wires.replace(self.wires.get() + 1);
        let path = self.folder().join(format!("wire{number}"));
        let path = path.display();
        match wire {
            Wire::Memif => {
                let end =
                    |role| format!("net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
                Ends { server: end("server"), load: end("client") }
            }
            Wire::VirtioUser => Ends {
                server: format!("net_vhost0,iface={path},queues=1"),
                load: format!("net_virtio_user0,path={path}"),
            },
        }
    }

    /// Starts `serve` with these arguments on a device, and waits until it
    /// serves.
    pub(super) fn serve(&self, arguments: &[&str], device: &str) -> Result<Process, LabError> {
        let mut command = command_on_core(self.server_core, this_program()?);
        command.arg("serve").args(arguments).arg("--json");
        command.args(["--port", &format!("dpdk:{device} {MEMORY}")]);
        command.args(["--address", &format!("{SERVER}/{PREFIX}")]);
        command.args(["--cpu", &self.server_core.to_string()]);
        let mut process = Process::start("tidegate serve", &mut command)?;
        process.wait_for_line()?;
        Ok(process)
    }

    /// A load of datagrams from the core that makes load.
    pub(super) fn load_config(&self, device: &str, port: u16, seconds: f64) -> LoadConfig {
        LoadConfig {
            interface: Some(format!("{device} {MEMORY}")),
            source: Some(CLIENT.into()),
            seconds,
            warm_up_seconds: seconds / 4.0,
            core: Some(self.load_core),
            ..LoadConfig::new(LinkKind::Dpdk, SocketAddr::new(SERVER.into(), port))
        }
    }

    /// The same of streams.
    pub(super) fn tcp_load_config(&self, device: &str, port: u16, seconds: f64) -> TcpLoadConfig {
        TcpLoadConfig {
            interface: Some(format!("{device} {MEMORY}")),
            source: Some(CLIENT.into()),
            prefix: PREFIX,
            seconds,
            warm_up_seconds: seconds / 4.0,
            core: Some(self.load_core),
            ..TcpLoadConfig::new(LinkKind::Dpdk, SocketAddr::new(SERVER.into(), port))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_wires_are_the_same() {
        let bench = Bench::new(1, 0).unwrap();
        for wire in [Wire::Memif, Wire::VirtioUser] {
            let (first, second) = (bench.wire(wire), bench.wire(wire));
            assert_ne!(first.server, second.server);
            let path = |device: &str| device.rsplit_once("wire").unwrap().1[..1].to_owned();
            assert_eq!(path(&first.server), path(&first.load));
        }
    }
}
