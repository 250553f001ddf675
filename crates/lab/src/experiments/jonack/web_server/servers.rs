//! Web servers under test, and the files that they serve.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use tempfile::TempDir;

use crate::error::LabError;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::{CoreAssignment, RunningService, StackKind, start_service};
use crate::testbed::flood::{FloodTestbed, PREFIX_BITS, Receiver, TIDEGATE_ADDRESS};
use crate::testbed::folder;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::web_client::WebFile;

/// Number of files.
pub(super) const FILE_COUNT: usize = 15;
/// Sizes of the smallest and the largest file in bytes; the others lie between them, evenly.
pub(super) const FILE_BYTES: (usize, usize) = (1 << 10, 5 << 10);
const HTTP_PORT: u16 = 80;

/// Ways of the kernel for the receive work of a server.
pub(super) const KERNEL_WAYS: [ReceiveWork; 4] =
    [ReceiveWork::Softirq, ReceiveWork::Timer, ReceiveWork::Thread, ReceiveWork::Steered];

/// Web server, and the stack that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WebServer {
    /// Debian's Apache, nginx.
    Packaged(Application, StackKind),
    /// `tidegate serve http`.
    Tidegate,
}

/// Running server.
pub(super) struct RunningServer {
    processes: Processes,
    pub(super) target: SocketAddr,
    pub(super) files: Vec<WebFile>,
}

enum Processes {
    Packaged(Box<RunningService>),
    Tidegate { process: ServerProcess, _folder: TempDir },
}

impl WebServer {
    /// Packaged programs on these ways of the kernel, then all servers on Tidegate. Apache serves
    /// from children, which a stack inside their parent cannot serve, so Apache attaches to a daemon.
    pub(super) fn all(kernel_ways: &[ReceiveWork]) -> Vec<Self> {
        let on_kernel = [Application::Apache, Application::Nginx].into_iter().flat_map(|program| {
            let way = move |&work| Self::Packaged(program, StackKind::Kernel(work));
            kernel_ways.iter().map(way)
        });
        let on_tidegate = [
            Self::Packaged(Application::Apache, StackKind::Attached),
            Self::Packaged(Application::Nginx, StackKind::Embedded),
            Self::Tidegate,
        ];
        on_kernel.chain(on_tidegate).collect()
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Packaged(program, stack) => format!("{}-{}", program.name(), stack.name()),
            Self::Tidegate => "tidegate-http".to_owned(),
        }
    }

    /// Way of the kernel; `None` on Tidegate.
    pub(super) fn kernel_way(self) -> Option<ReceiveWork> {
        match self {
            Self::Packaged(_, StackKind::Kernel(work)) => Some(work),
            _ => None,
        }
    }

    /// Receive work of the server's device.
    pub(super) fn receive_work(self) -> ReceiveWork {
        self.kernel_way().unwrap_or(ReceiveWork::Server)
    }

    /// Starts the server on its core, with admission control if it is on Tidegate.
    pub(super) fn start(self, testbed: &FloodTestbed) -> Result<RunningServer, LabError> {
        match self {
            Self::Packaged(program, stack) => {
                let core = testbed.server_core;
                let same_core = CoreAssignment { application: core, daemon: core };
                let flags: &[&str] = if stack.is_kernel() { &[] } else { &["--admission"] };
                let service = start_service(testbed, program, stack, same_core, flags)?;
                let files = write_files(service.folder())?;
                let target = service.target;
                Ok(RunningServer {
                    processes: Processes::Packaged(Box::new(service)),
                    target,
                    files,
                })
            }
            Self::Tidegate => start_tidegate(testbed),
        }
    }
}

fn start_tidegate(testbed: &FloodTestbed) -> Result<RunningServer, LabError> {
    testbed.prepare(Receiver::Server)?;
    let folder = folder::readable()?;
    let files = write_files(folder.path())?;
    let (end, core) = (&testbed.pair.b, testbed.server_core.to_string());
    let mut command = end.namespace.command_on_core(testbed.server_core, programs::tidegate()?);
    command.args(["serve", "http", "--json", "--admission", "--cpu", &core]);
    command.args(["--iface", &end.device]);
    command.args(["--address", &format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}")]);
    command.arg("--root").arg(folder.path());
    let mut process = ServerProcess::start("tidegate", &mut command)?;
    process.wait_for_first_line()?;
    let target = SocketAddr::new(TIDEGATE_ADDRESS.into(), HTTP_PORT);
    let processes = Processes::Tidegate { process, _folder: folder };
    Ok(RunningServer { processes, target, files })
}

impl RunningServer {
    pub(super) fn stop(self) {
        match self.processes {
            Processes::Packaged(service) => service.stop(),
            Processes::Tidegate { process, .. } => drop(process.stop()),
        }
    }
}

fn write_files(folder: &Path) -> Result<Vec<WebFile>, LabError> {
    let (smallest, largest) = FILE_BYTES;
    let write = |number: usize| {
        let bytes = smallest + (largest - smallest) * number / (FILE_COUNT - 1);
        let file = folder.join(number.to_string());
        fs::write(&file, vec![b'x'; bytes]).map_err(LabError::file(&file))?;
        Ok(WebFile { path: format!("/{number}"), bytes })
    };
    (0..FILE_COUNT).map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_one_to_five_kilobytes() {
        let folder = tempfile::tempdir().unwrap();
        let files = write_files(folder.path()).unwrap();
        assert_eq!((files.len(), files[0].bytes, files[14].bytes), (15, 1024, 5120));
        for WebFile { path, bytes } in files {
            let written = fs::metadata(folder.path().join(&path[1..])).unwrap();
            assert_eq!(written.len(), bytes as u64, "{path}");
        }
    }
}
