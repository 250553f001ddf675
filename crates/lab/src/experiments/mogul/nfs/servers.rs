//! NFS servers under test.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::error::LabError;
use crate::testbed::flood::{
    FloodTestbed, KERNEL_ADDRESS, LOAD_ADDRESS, PREFIX_BITS, Receiver, TIDEGATE_ADDRESS,
};
use crate::testbed::folder;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;

/// File that clients read, and its size: in the page cache after the first reads.
pub(super) const FILE_NAME: &str = "file";
const FILE_BYTES: usize = 16 << 20;

const NFS_PORT: u16 = 2049;
const GANESHA_MOUNT_PORT: u16 = 20_048;

/// Runs the port mapper and the program of the arguments, both with a `/run` of their own, until the
/// program ends or SIGTERM comes.
const GANESHA_SCRIPT: &str = r#"
mount -t tmpfs tmpfs /run && mkdir /run/rpcbind || exit
rpcbind -f >/dev/null 2>&1 &
mapper=$!
until [ -S /run/rpcbind.sock ]; do sleep 0.05; done
"$@" >/dev/null 2>&1 &
server=$!
trap 'kill $server $mapper' TERM
wait $server
kill $mapper 2>/dev/null
wait
"#;

/// Time limit for one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// NFS server, and the stack that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NfsServer {
    /// `tidegate serve nfs`.
    Tidegate { admission: bool },
    /// The same on kernel sockets.
    Kernel(ReceiveWork),
    /// Debian's nfs-ganesha on the kernel.
    Ganesha(ReceiveWork),
}

/// Address of a server for clients.
pub(super) struct NfsAddress {
    pub(super) address: Ipv4Addr,
    pub(super) port: u16,
    pub(super) mount_port: u16,
    /// Path of the export.
    pub(super) directory: String,
}

/// Running server.
pub(super) struct RunningServer {
    pub(super) process: ServerProcess,
    pub(super) address: NfsAddress,
    _folder: TempDir,
}

impl NfsServer {
    pub(super) fn name(self) -> String {
        match self {
            Self::Tidegate { admission: false } => "tidegate".to_owned(),
            Self::Tidegate { admission: true } => "tidegate-admission".to_owned(),
            Self::Kernel(work) => work.kernel_name().to_owned(),
            Self::Ganesha(work) => format!("ganesha-{}", work.kernel_name()),
        }
    }

    pub(super) fn address(self) -> Ipv4Addr {
        match self {
            Self::Tidegate { .. } => TIDEGATE_ADDRESS,
            Self::Kernel(_) | Self::Ganesha(_) => KERNEL_ADDRESS,
        }
    }

    pub(super) fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Tidegate { .. } => ReceiveWork::Server,
            Self::Kernel(work) | Self::Ganesha(work) => work,
        }
    }

    /// True on a way of the kernel in which the server's core receives, as on a host whose flood
    /// comes from elsewhere. In softirqs the sender's core receives, which slows down the flood.
    pub(super) fn is_compared_kernel(self) -> bool {
        matches!(self, Self::Kernel(work) if work != ReceiveWork::Softirq)
    }

    /// Starts the server on its core, with a file to read.
    pub(super) fn start(self, testbed: &FloodTestbed) -> Result<RunningServer, LabError> {
        let folder = folder::readable()?;
        let file = folder.path().join(FILE_NAME);
        let bytes: Vec<u8> = (0..FILE_BYTES).map(|n| (n % 251) as u8).collect();
        fs::write(&file, bytes).map_err(LabError::file(&file))?;
        let on_kernel = self.receive_work() != ReceiveWork::Server;
        testbed.prepare(if on_kernel { Receiver::Kernel } else { Receiver::Server })?;
        match self {
            Self::Ganesha(_) => self.start_ganesha(testbed, folder),
            _ => self.start_tidegate(testbed, folder),
        }
    }

    fn start_tidegate(
        self,
        testbed: &FloodTestbed,
        folder: TempDir,
    ) -> Result<RunningServer, LabError> {
        let (end, core) = (&testbed.pair.b, testbed.server_core.to_string());
        let mut command = end.namespace.command_on_core(testbed.server_core, programs::tidegate()?);
        command.args(["serve", "nfs", "--json", "--cpu", &core, "--directory"]).arg(folder.path());
        match self {
            Self::Tidegate { admission } => {
                let address = format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}");
                // For the replies to the flood's sources.
                let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
                command.args(["--iface", &end.device, "--address", &address, "--route", &route]);
                command.args(admission.then_some("--admission"));
            }
            _ => drop(command.args(["--io", "kernel"])),
        }
        let mut process = ServerProcess::start("tidegate", &mut command)?;
        process.wait_for_first_line()?;
        let address = NfsAddress {
            address: self.address(),
            port: NFS_PORT,
            mount_port: NFS_PORT,
            directory: String::new(),
        };
        Ok(RunningServer { process, address, _folder: folder })
    }

    /// Ganesha registers with a port mapper, which clients do not ask.
    fn start_ganesha(
        self,
        testbed: &FloodTestbed,
        folder: TempDir,
    ) -> Result<RunningServer, LabError> {
        let root = folder.path().display().to_string();
        let config = folder.path().join("ganesha.conf");
        fs::write(&config, ganesha_config(&root)).map_err(LabError::file(&config))?;
        let end = &testbed.pair.b;
        let mut command = end.namespace.command_on_core(testbed.server_core, "unshare");
        command.args(["--mount", "sh", "-c", GANESHA_SCRIPT, "sh"]);
        command.args(["ganesha.nfsd", "-F", "-N", "NIV_CRIT"]);
        for (flag, file) in [("-f", "ganesha.conf"), ("-L", "log"), ("-p", "pid")] {
            command.arg(flag).arg(folder.path().join(file));
        }
        let mut process = ServerProcess::start("ganesha.nfsd", &mut command)?;
        let target = SocketAddr::from((self.address(), NFS_PORT));
        let connects = || TcpStream::connect_timeout(&target, CONNECT_TIMEOUT).is_ok();
        let client = &testbed.pair.a.namespace;
        process.wait_until(|| client.enter(connects).unwrap_or(false))?;
        let address = NfsAddress {
            address: self.address(),
            port: NFS_PORT,
            mount_port: GANESHA_MOUNT_PORT,
            directory: root,
        };
        Ok(RunningServer { process, address, _folder: folder })
    }
}

fn ganesha_config(root: &str) -> String {
    format!(
        "NFS_CORE_PARAM {{ NFS_Protocols = 3; NFS_Port = {NFS_PORT}; MNT_Port = \
         {GANESHA_MOUNT_PORT}; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; \
         Plugins_Dir = /usr/lib/x86_64-linux-gnu/ganesha; }}\n\
         NFS_KRB5 {{ Active_krb5 = false; }}\n\
         NFSV4 {{ RecoveryBackend = fs; RecoveryRoot = {root}; }}\n\
         EXPORT {{ Export_Id = 1; Path = {root}; Pseudo = /; Access_Type = RO; Protocols = 3; \
         Transports = TCP; SecType = sys; FSAL {{ Name = VFS; }} }}\n"
    )
}

/// True if nfs-ganesha and the port mapper are installed.
pub(super) fn has_ganesha() -> bool {
    let is_found = |name: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("command -v {name} >/dev/null")]);
        shell.status().is_ok_and(|status| status.success())
    };
    is_found("ganesha.nfsd") && is_found("rpcbind")
}
