//! `tidegate serve nfs`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate::Limits;
use tidegate_apps::nfs::{Export, NfsLimits, NfsService, serve_nfs, serve_nfs_kernel};

use super::common::{ServerOptions, nonzero_port};
use super::limits::{set_connections, set_memory, set_timeout};
use crate::Failure;
use crate::config::{self, Section};
use crate::host::IoKind;
use crate::metrics::{NetSource, Readings, add_requests};
use crate::process::announce_server;
use crate::reload::ReloadPart;
use crate::report::ServeReport;
use crate::sandbox::warn_unless_accessible;

/// Port of NFS.
const DEFAULT_PORT: u16 = 2049;

/// Flags of `serve nfs`.
#[derive(Args)]
#[command(after_help = "Clients give the port for both protocols, as there is no port mapper:\n  \
                        mount -t nfs -o ro,vers=3,tcp,nolock,port=2049,mountport=2049 \
                        192.0.2.1:/ /mnt\n  \
                        nfs-ls 'nfs://192.0.2.1/?nfsport=2049&mountport=2049'")]
pub(crate) struct NfsCommand {
    #[command(flatten)]
    common: ServerOptions,
    #[command(flatten)]
    nfs: NfsOptions,
}

/// Section `[nfs]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NfsOptions {
    /// Directory to serve, read-only, with all that the server's user may read on its file system
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// TCP port to serve, for the file protocol and the mount protocol [default: 2049]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Maximum number of concurrent connections; one more ends the connection that has been silent
    /// longest, of the source that has most [default: 1024]
    #[arg(long, value_name = "COUNT")]
    connections: Option<usize>,
    /// Memory for replies that clients have not taken, in MiB, and as much for TCP's buffers. When
    /// it is used up, the connection that has taken nothing for longest ends [default: 64]
    #[arg(long, value_name = "MIB")]
    memory: Option<usize>,
    /// Timeout for silence, in seconds [default: 360]
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: Option<u64>,
    /// Timeout for the rest of a call, and for the client to take replies, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    progress_timeout: Option<u64>,
}

impl Section for NfsOptions {
    const NAME: &'static str = "nfs";
}

/// Minimum memory of a server in MiB: for some ten connections.
const MIN_MEMORY_MIB: usize = 4;

impl NfsOptions {
    /// Returns the limits of the server.
    fn limits(&self) -> Result<NfsLimits, Failure> {
        let mut limits = NfsLimits::default();
        set_connections(&mut limits.max_connections, self.connections)?;
        set_memory(&mut limits.memory_bytes, self.memory, MIN_MEMORY_MIB)?;
        set_timeout(&mut limits.idle_timeout, self.idle_timeout);
        set_timeout(&mut limits.progress_timeout, self.progress_timeout);
        Ok(limits)
    }

    fn directory(&self) -> Result<&Path, Failure> {
        self.directory.as_deref().ok_or_else(|| {
            "no directory to serve: give --directory, or directory in section [nfs]".into()
        })
    }
}

impl NfsCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, nfs } = self;
        let flags = nfs.clone();
        let options = config::merge_file(nfs, common.config.as_deref())?;
        let limits = options.limits()?;
        let port = nonzero_port(options.listen, DEFAULT_PORT)?;
        let directory = options.directory()?;
        let (json, cores) = (common.json, common.cores);
        let limits = limits.share_of(cores);
        let service = NfsService::new(directory, limits);
        let service = service.map_err(|error| directory_error(directory, &error))?;
        let service = Arc::new(service);
        let host = common.host_options()?;
        let part = settings_part(flags, common.config.clone(), &service, (cores, limits));
        if host.io_kind() == IoKind::Kernel {
            let startup = common.startup(&host)?;
            host.pin()?;
            let (stop, mut reload) = (startup.stop(), None);
            let addresses = host.kernel_addresses(port);
            let ready = || {
                let source = NetSource::new("nfs", "", Vec::new(), readings_of(&service));
                reload = Some(startup.finish(vec![part], &[], source).map_err(io::Error::other)?);
                warn_unless_accessible(directory);
                announce_server("nfs", &addresses, "kernel sockets")
            };
            serve_nfs_kernel(&addresses, &service, &stop, ready)?;
            return ServeReport::kernel("nfs", service.counters()).print(json);
        }
        let server = common.open_stream_server(
            "NFS",
            port,
            limits.tcp_options(),
            Limits::default().tcp_buffer_bytes(limits.memory_bytes),
        )?;
        let mut server = server.start("nfs", vec![part], readings_of(&service))?;
        warn_unless_accessible(directory);
        let stop = Arc::clone(&server.stop);
        server
            .run(|net, listeners| serve_nfs(net, listeners, &service, &stop))
            .map_err(|error| host.explain(error))?;
        ServeReport::tidegate("nfs", service.counters(), &server.nets).print(json)
    }
}

/// Checks section `[nfs]` of a file, with the directory that it names.
pub(crate) fn check_nfs(path: &Path) -> Result<(), Failure> {
    let options = config::merge_file(NfsOptions::default(), Some(path))?;
    nonzero_port(options.listen, DEFAULT_PORT)?;
    options.limits()?;
    if let Some(directory) = &options.directory {
        Export::open(directory).map_err(|error| directory_error(directory, &error))?;
    }
    Ok(())
}

/// Metrics of the file service.
fn readings_of(service: &Arc<NfsService>) -> impl Fn(&mut Readings) + Send + Sync + 'static {
    let service = Arc::clone(service);
    move |readings| add_requests(readings, service.counters())
}

fn directory_error(directory: &Path, error: &io::Error) -> Failure {
    format!("--directory {}: {error}", directory.display()).into()
}

/// Part of the reload that replaces directory and limits, of each core of the server. TCP's buffers
/// were sized at the start, so the memory can only become less.
fn settings_part(
    flags: NfsOptions,
    config: Option<PathBuf>,
    service: &Arc<NfsService>,
    (cores, started_with): (usize, NfsLimits),
) -> ReloadPart {
    let service = Arc::clone(service);
    Box::new(move || {
        let options = config::merge_file(flags.clone(), config.as_deref())?;
        let mut limits = options.limits()?.share_of(cores);
        let directory = options.directory()?;
        let export = Export::open(directory).map_err(|error| directory_error(directory, &error))?;
        let mut report = format!("serving {}", directory.display());
        if limits.memory_bytes > started_with.memory_bytes {
            limits.memory_bytes = started_with.memory_bytes;
            report += "; memory stays as it was: restart the server to raise it";
        }
        let service = Arc::clone(&service);
        Ok(Box::new(move || {
            service.replace_settings(export, limits);
            Ok(report)
        }))
    })
}
