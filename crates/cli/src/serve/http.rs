//! `tidegate serve http`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate::{Limits, Net, NetCounters};
use tidegate_apps::ServeCounters;
use tidegate_apps::http::{
    AccessLog, DocumentRoot, HttpLimits, HttpRequests, HttpSettings, Service, serve_http,
    serve_http_kernel,
};
use tidegate_apps::requests::SessionSecret;
use tidegate_apps::work::Work;

use super::common::{ServerOptions, nonzero_port, random_bytes};
use super::limits::{set_connections, set_memory, set_timeout};
use crate::Failure;
use crate::config::{self, Section};
use crate::host::IoKind;
use crate::metrics::{NetSource, Readings, add_http, add_requests, table};
use crate::process::announce_server;
use crate::reload::ReloadPart;
use crate::report::ServeReport;
use crate::sandbox::warn_unless_accessible;

/// Flags of `serve http`.
#[derive(Args)]
pub(crate) struct HttpCommand {
    #[command(flatten)]
    common: ServerOptions,
    #[command(flatten)]
    http: HttpOptions,
}

/// Section `[http]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct HttpOptions {
    /// Folder with the files to serve [default: none, only /api/status and /api/echo]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// TCP port to serve [default: 80]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Maximum number of concurrent connections, further bounded by the hard limit of file
    /// descriptors; one more ends a stalled connection, or waits to be accepted [default: 65536]
    #[arg(long, value_name = "COUNT")]
    connections: Option<usize>,
    /// Memory of all connections together, with all that waits in their buffers, in MiB. When it
    /// is used up, stalled connections of the address that holds most end first [default: 192]
    #[arg(long, value_name = "MIB")]
    memory: Option<usize>,
    /// Maximum send buffer of one connection, in KiB; smaller while memory is scarce, and 16
    /// before the client has taken data [default: 1024]
    #[arg(long, value_name = "KIB")]
    send_buffer: Option<u32>,
    /// Timeout for the head of a request, from its first byte, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    header_timeout: Option<u64>,
    /// Timeout for each 16 KiB of a request body, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    body_timeout: Option<u64>,
    /// Time that a client has to take each 16 KiB of a response, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    write_timeout: Option<u64>,
    /// Timeout for silence before a request, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: Option<u64>,
    /// Append a line for each request to this file, in the combined log format. SIGHUP opens the file
    /// anew. No request waits for the disk: lines that it cannot take are lost and counted
    #[arg(long, value_name = "FILE")]
    access_log: Option<PathBuf>,
    /// Approximate work before each response, in nanoseconds, in place of an application's work;
    /// calibrated once at the start [default: 0]
    #[arg(long, value_name = "NANOSECONDS")]
    work_ns: Option<u64>,
}

impl Section for HttpOptions {
    const NAME: &'static str = "http";
}

/// Minimum memory of a server in MiB: for some hundred connections.
const MIN_MEMORY_MIB: usize = 8;

impl HttpOptions {
    /// Returns the limits of the server.
    fn limits(&self) -> Result<HttpLimits, Failure> {
        let mut limits = HttpLimits::default();
        set_connections(&mut limits.max_connections, self.connections)?;
        set_memory(&mut limits.memory_bytes, self.memory, MIN_MEMORY_MIB)?;
        if let Some(kib) = self.send_buffer {
            limits.max_send_buffer_bytes = kib.saturating_mul(1 << 10);
        }
        set_timeout(&mut limits.header_timeout, self.header_timeout);
        set_timeout(&mut limits.body_timeout, self.body_timeout);
        set_timeout(&mut limits.write_timeout, self.write_timeout);
        set_timeout(&mut limits.idle_timeout, self.idle_timeout);
        Ok(limits)
    }

    /// Iterations of the work before each response, calibrated on the processor of this thread.
    fn work_iterations(&self) -> u64 {
        let began = Instant::now();
        Work::iterations_for(self.work_ns.unwrap_or(0), || began.elapsed().as_nanos() as u64)
    }
}

impl HttpCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, http } = self;
        let flags = http.clone();
        let options = config::merge_file(http, common.config.as_deref())?;
        let port = nonzero_port(options.listen, 80)?;
        let host = common.host_options()?;
        let on_kernel = host.io_kind() == IoKind::Kernel;
        let source = SettingsSource {
            flags,
            config: common.config.clone(),
            secret: SessionSecret::new(random_bytes()),
            cores: if on_kernel { 1 } else { common.cores },
        };
        let (_, settings) = source.read()?;
        let root = options.root.as_deref();
        // Opened by the user that starts the server, before its thread is pinned.
        let access_log = options.access_log.as_deref().map(open_access_log).transpose()?;
        let at_root = |error| root_error(root, &error);
        if on_kernel {
            let startup = common.startup(&host)?;
            host.pin()?;
            let service = Service::new(root, || json!({ "port": "kernel" })).map_err(at_root)?;
            let service = service.with_work(options.work_iterations());
            let service = Arc::new(service.with_access_log(access_log));
            let part = settings_part(source, &service, settings.limits.memory_bytes);
            let (stop, mut reload) = (startup.stop(), None);
            let addresses = host.kernel_addresses(port);
            let ready = || {
                let source = NetSource::new("http", "", Vec::new(), readings_of(&service));
                reload = Some(startup.finish(vec![part], &[], source).map_err(io::Error::other)?);
                root.inspect(|root| warn_unless_accessible(root));
                announce_server("http", &addresses, "kernel sockets")
            };
            serve_http_kernel(&addresses, &service, settings, &stop, ready)?;
            return ServeReport::kernel("http", &served(&service)).print(common.json);
        }
        let json = common.json;
        let limits = settings.limits;
        // Reports an error of --root before the interface is touched.
        Service::new(root, || Value::Null).map_err(at_root)?;
        let server = common.open_stream_server(
            "HTTP",
            port,
            limits.tcp_options(),
            Limits::default().tcp_buffer_bytes(limits.tcp_buffer_bytes()),
        )?;
        let nets = server.nets.clone();
        let service = Service::new(root, move || status(&nets)).map_err(at_root)?;
        let service = service.with_work(options.work_iterations());
        let service = Arc::new(service.with_access_log(access_log));
        let part = settings_part(source, &service, limits.memory_bytes);
        let mut server = server.start("http", vec![part], readings_of(&service))?;
        root.inspect(|root| warn_unless_accessible(root));
        let stop = Arc::clone(&server.stop);
        server
            .run(|net, listeners| serve_http(net, listeners, &service, settings.clone(), &stop))
            .map_err(|error| host.explain(error))?;
        ServeReport::tidegate("http", &served(&service), &server.nets).print(json)
    }
}

/// Flags and configuration file from which the settings are read, at the start and at SIGHUP.
struct SettingsSource {
    flags: HttpOptions,
    config: Option<PathBuf>,
    /// Secret of the sessions, the same over a reload.
    secret: SessionSecret,
    /// Cores that serve together.
    cores: usize,
}

impl SettingsSource {
    /// Returns the options, and the settings of each core.
    fn read(&self) -> Result<(HttpOptions, HttpSettings), Failure> {
        let options = config::merge_file(self.flags.clone(), self.config.as_deref())?;
        let limits = options.limits()?.share_of(self.cores);
        let policy = config::requests(self.config.as_deref())?;
        let requests = policy.map(|policy| HttpRequests {
            policy: policy.share_of(self.cores),
            secret: self.secret,
        });
        Ok((options, HttpSettings { limits, requests }))
    }
}

/// Checks section `[http]` of a file, with the folder that it names.
pub(crate) fn check_http(path: &Path) -> Result<(), Failure> {
    let options = config::merge_file(HttpOptions::default(), Some(path))?;
    nonzero_port(options.listen, 80)?;
    options.limits()?;
    let root = options.root.as_deref();
    root.map(DocumentRoot::open).transpose().map_err(|error| root_error(root, &error))?;
    Ok(())
}

fn open_access_log(path: &Path) -> Result<AccessLog, Failure> {
    Ok(AccessLog::open(path)
        .map_err(|error| format!("--access-log {}: {error}", path.display()))?)
}

fn root_error(root: Option<&Path>, error: &io::Error) -> Failure {
    match root {
        Some(root) => format!("--root {}: {error}", root.display()).into(),
        None => error.to_string().into(),
    }
}

/// Part of the reload that replaces document root and settings, of each core of the server. The
/// buffers of TCP were sized for `max_memory_bytes` on each at the start, so the memory can only
/// become less.
fn settings_part(
    source: SettingsSource,
    service: &Arc<Service>,
    max_memory_bytes: usize,
) -> ReloadPart {
    let service = Arc::clone(service);
    Box::new(move || {
        let (options, mut settings) = source.read()?;
        let root = options.root.as_deref();
        let document_root =
            root.map(DocumentRoot::open).transpose().map_err(|error| root_error(root, &error))?;
        let shown = root.map_or_else(|| "no files".to_owned(), |root| root.display().to_string());
        let mut report = format!("serving {shown}");
        if settings.limits.memory_bytes > max_memory_bytes {
            settings.limits.memory_bytes = max_memory_bytes;
            report += "; memory stays as it was: restart the server to raise it";
        }
        let service = Arc::clone(&service);
        Ok(Box::new(move || {
            service.replace_settings(document_root, settings);
            if let Some(Err(error)) = service.access_log().map(AccessLog::reopen) {
                report += &format!("; the access log could not be opened anew: {error}");
            }
            Ok(report)
        }))
    })
}

/// Stack section of `/api/status`.
fn status(nets: &[Net]) -> Value {
    let cores: Vec<NetCounters> = nets.iter().map(Net::counters).collect();
    let sum = |of: fn(&NetCounters) -> u64| cores.iter().map(of).sum::<u64>();
    json!({
        "port": nets[0].capabilities().kind,
        "received_frames": sum(|core| core.device.received),
        "transmitted_frames": sum(|core| core.device.transmitted),
        "dropped": sum(|core| core.drops().total()),
        "sleeps": sum(|core| core.engine.sleeps),
    })
}

/// Metrics of the HTTP service.
fn readings_of(service: &Arc<Service>) -> impl Fn(&mut Readings) + Send + Sync + 'static {
    let service = Arc::clone(service);
    move |readings| {
        add_requests(readings, &served(&service));
        add_http(readings, service.counters());
        if let Some(log) = service.access_log() {
            readings.add(&table::HTTP_LOG_LOST, [], log.lost_lines());
        }
    }
}

/// Converts the counters of the HTTP service to those of the other servers.
fn served(service: &Service) -> ServeCounters {
    let served = ServeCounters::new();
    let answers = service.counters().total_responses();
    served.requests.store(answers, std::sync::atomic::Ordering::Relaxed);
    served.replies.store(answers, std::sync::atomic::Ordering::Relaxed);
    served
}
