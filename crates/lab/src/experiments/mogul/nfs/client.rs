//! Clients of an NFS server by libnfs: the program `clients/libnfs.c`, which is built when it is
//! needed.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::servers::{FILE_NAME, NfsAddress};
use crate::error::LabError;
use crate::testbed::flood::{FloodTestbed, GoodputMeter};
use crate::testbed::folder;
use crate::testbed::netns::run_to_end;
use crate::testbed::process::ServerProcess;

/// Source of the program.
const SOURCE: &str = include_str!("../../../../clients/libnfs.c");

/// Header of libnfs, by which it is found.
const HEADER: &str = "/usr/include/nfsc/libnfs.h";

/// Connections, and calls under way on each.
pub(super) const CONNECTIONS: u32 = 4;
pub(super) const OUTSTANDING: u32 = 8;

/// Program of the clients, in a folder of its own.
pub(super) struct ClientProgram {
    folder: TempDir,
}

impl ClientProgram {
    /// Builds the program.
    ///
    /// # Errors
    /// If libnfs or a compiler is not installed.
    pub(super) fn build() -> Result<Self, LabError> {
        if !Path::new(HEADER).exists() {
            let program = "libnfs".to_owned();
            return Err(LabError::Missing { program, package: "libnfs-dev" });
        }
        let folder = folder::private()?;
        let source = folder.path().join("libnfs.c");
        fs::write(&source, SOURCE).map_err(LabError::file(&source))?;
        let program = Self { folder };
        let mut compiler = Command::new("cc");
        compiler.args(["-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-o"]).arg(program.path());
        run_to_end(compiler.arg(&source).arg("-lnfs"), "gcc")?;
        Ok(program)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("libnfs")
    }

    /// Starts the clients on the load's core. They make `rate` calls a second, as far as answers
    /// come.
    ///
    /// # Errors
    /// If a client cannot mount the server.
    pub(super) fn start(
        &self,
        testbed: &FloodTestbed,
        address: &NfsAddress,
        rate: f64,
    ) -> Result<Clients, LabError> {
        let counters = self.folder.path().join("counters");
        // Of the clients before.
        let _ = fs::remove_file(&counters);
        let mut command = testbed.pair.a.namespace.command_on_core(testbed.load_core, self.path());
        command.arg(address.url(FILE_NAME)).arg(&counters);
        command.args([CONNECTIONS.to_string(), OUTSTANDING.to_string(), rate.to_string()]);
        let mut process = ServerProcess::start("libnfs", &mut command)?;
        process.wait_for_first_line()?;
        Ok(Clients { process, meter: GoodputMeter::CounterFile(counters) })
    }
}

/// Running clients, and the meter of answered calls.
pub(super) struct Clients {
    pub(super) process: ServerProcess,
    pub(super) meter: GoodputMeter,
}

impl NfsAddress {
    /// Name of a file for libnfs, which takes only paths with a directory.
    fn url(&self, file: &str) -> String {
        let Self { address, port, mount_port, directory } = self;
        let address: &Ipv4Addr = address;
        format!("nfs://{address}{directory}/./{file}?nfsport={port}&mountport={mount_port}")
    }
}
