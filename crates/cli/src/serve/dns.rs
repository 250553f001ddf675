//! `tidegate serve dns`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate_apps::MessageLimits;
use tidegate_apps::dns::{
    CookieSecret, DnsConfig, DnsReloader, DnsServer, QueryLog, RateLimit, ServerIdentity,
    ZoneSource,
};
use tidegate_apps::requests::RequestPolicy;

use super::common::{ServerOptions, nonzero_port, random_bytes, random_u64};
use crate::Failure;
use crate::config::{self, Section};
use crate::metrics::{Readings, table};
use crate::reload::ReloadPart;

/// Flags of `serve dns`.
#[derive(Args)]
pub(crate) struct DnsCommand {
    #[command(flatten)]
    common: ServerOptions,
    #[command(flatten)]
    dns: DnsOptions,
    /// Check the zone files and the configuration, print the first error, and exit
    #[arg(long)]
    check: bool,
}

/// Section `[dns]`.
#[derive(Args, Clone, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DnsOptions {
    /// Zone file, as FILE or ORIGIN=FILE; may be repeated
    #[arg(long, value_name = "[ORIGIN=]FILE")]
    zone: Vec<String>,
    /// UDP and TCP port to serve [default: 53]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Maximum UDP response size in bytes, whatever the client offers [default: 1232]
    #[arg(long, value_name = "BYTES")]
    max_udp_bytes: Option<u16>,
    /// Do not serve TCP
    #[arg(long)]
    no_tcp: bool,
    /// Maximum number of concurrent TCP connections; a further connection closes the one idle
    /// longest [default: 1024]
    #[arg(long, value_name = "COUNT")]
    tcp_connections: Option<usize>,
    /// Maximum number of concurrent TCP connections per client address [default: 64]
    #[arg(long, value_name = "COUNT")]
    tcp_per_address: Option<usize>,
    /// Idle timeout of a TCP connection, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS")]
    tcp_idle_timeout: Option<u64>,
    /// Maximum number of equal responses over UDP per second to one network (an IPv4 /24 or IPv6
    /// /64), in units of 512 bytes; 0 for no limit. Clients with a valid cookie have no limit
    /// [default: 200]
    #[arg(long, value_name = "RESPONSES")]
    rate_limit: Option<u32>,
    /// Answer every N-th response over the limit with a truncated one, after which a client uses
    /// TCP; 0 drops all [default: 2]
    #[arg(long, value_name = "N")]
    rate_limit_slip: Option<u32>,
    /// Do not use DNS cookies (RFC 7873)
    #[arg(long)]
    no_cookies: bool,
    /// File with the secrets of DNS cookies, 32 hexadecimal digits a line: the first makes new
    /// cookies, all are accepted (RFC 9018). Servers of one address need the same
    /// [default: one random secret]
    #[arg(long, value_name = "FILE")]
    cookie_secrets: Option<PathBuf>,
    /// Identity of this server: answers id.server and hostname.bind in class CH, and NSID
    /// [default: none]
    #[arg(long, value_name = "TEXT")]
    identity: Option<String>,
    /// Do not answer version.bind and version.server in class CH
    #[arg(long)]
    hide_version: bool,
    /// Log all queries and answers as dnstap: to a receiver that listens on this Unix socket, or in
    /// this new file. After a rename SIGHUP begins a file anew. No query waits: messages that are
    /// not taken in time are lost and counted
    #[arg(long, value_name = "PATH")]
    dnstap: Option<PathBuf>,
}

/// Version that `version.bind` tells.
const VERSION: &str = concat!("tidegate ", env!("CARGO_PKG_VERSION"));

impl DnsOptions {
    /// Returns the UDP and TCP port.
    fn port(&self) -> Result<u16, Failure> {
        nonzero_port(self.listen, 53)
    }

    /// Returns the configuration of the server. Reads the file of the cookie secrets.
    fn server_config(
        &self,
        seeds: Seeds,
        requests: Option<RequestPolicy>,
    ) -> Result<DnsConfig, Failure> {
        if self.zone.is_empty() {
            return Err("no zone to serve: give --zone ORIGIN=FILE".into());
        }
        let mut config = DnsConfig {
            zones: self.zone.iter().map(|zone| zone_source(zone)).collect(),
            hash_seed: seeds.hash,
            requests,
            ..DnsConfig::default()
        };
        if let Some(bytes) = self.max_udp_bytes {
            config.max_udp_bytes = bytes.into();
        }
        let defaults = RateLimit::default();
        let limit = RateLimit {
            responses_per_second: self.rate_limit.unwrap_or(defaults.responses_per_second),
            slip: self.rate_limit_slip.unwrap_or(defaults.slip),
        };
        config.rate_limit = (limit.responses_per_second > 0).then_some(limit);
        config.cookie_secrets = match &self.cookie_secrets {
            _ if self.no_cookies => Vec::new(),
            Some(path) => read_cookie_secrets(path)?,
            None => vec![seeds.cookie],
        };
        let version = (!self.hide_version).then_some(VERSION);
        config.identity =
            ServerIdentity::new(version, self.identity.as_deref()).ok_or_else(|| {
                format!("--identity: give at most {} bytes", ServerIdentity::MAX_BYTES)
            })?;
        Ok(config)
    }

    /// Opens the log of queries, if any.
    fn open_log(&self) -> Result<Option<QueryLog>, Failure> {
        let Some(path) = &self.dnstap else { return Ok(None) };
        let version = (!self.hide_version).then_some(VERSION);
        let log = QueryLog::open(path, self.identity.as_deref(), version);
        let explain = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                format!(
                    "--dnstap {}: the file exists: rename it, since a log cannot be continued",
                    path.display()
                )
            }
            _ => format!("--dnstap {}: {error}", path.display()),
        };
        Ok(Some(log.map_err(explain)?))
    }

    /// Returns the limits for TCP connections; `None` with `--no-tcp`.
    fn stream_limits(&self) -> Option<MessageLimits> {
        let defaults = MessageLimits::default();
        let seconds = |seconds: u64| Duration::from_secs(seconds.max(1));
        (!self.no_tcp).then(|| MessageLimits {
            max_connections: self.tcp_connections.unwrap_or(defaults.max_connections).max(1),
            max_per_address: self.tcp_per_address.unwrap_or(defaults.max_per_address).max(1),
            idle_timeout: self.tcp_idle_timeout.map_or(defaults.idle_timeout, seconds),
        })
    }
}

/// Reads a file of cookie secrets: a line of 32 hexadecimal digits each.
fn read_cookie_secrets(path: &Path) -> Result<Vec<CookieSecret>, Failure> {
    let at = |problem: &str| format!("--cookie-secrets {}: {problem}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| at(&error.to_string()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let secrets = lines.map(|(index, line)| {
        CookieSecret::from_hex(line.trim())
            .ok_or_else(|| at(&format!("line {}: expected 32 hexadecimal digits", index + 1)))
    });
    let secrets = secrets.collect::<Result<Vec<_>, _>>()?;
    if secrets.is_empty() {
        return Err(at("the file has no secret: give one line of 32 hexadecimal digits").into());
    }
    Ok(secrets)
}

impl Section for DnsOptions {
    const NAME: &'static str = "dns";
}

impl DnsCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, dns, check } = self;
        let options = config::merge_file(dns.clone(), common.config.as_deref())?;
        let seeds = Seeds { hash: random_u64(), cookie: CookieSecret::new(random_bytes()) };
        let began = Instant::now();
        let threads = common.thread_count();
        let requests = read_requests(common.config.as_deref(), threads)?;
        let server = DnsServer::load(&options.server_config(seeds, requests)?)?;
        for warning in server.warnings() {
            tracing::warn!("{warning}");
        }
        let (zones, names) = (server.zone_count(), server.name_count());
        tracing::info!(
            "loaded {names} names in {zones} zones in {:.2} s",
            began.elapsed().as_secs_f64()
        );
        if check {
            common.check()?;
            return Ok(());
        }
        let port = options.port()?;
        let config = common.config.clone();
        // Opened by the user that starts the server.
        let log = options.open_log()?;
        let part = zones_part(dns, (config, threads), seeds, port, server.reloader());
        let log_part = log.clone().map(log_part);
        let parts = [part].into_iter().chain(log_part).collect();
        let server = server.with_log(log.clone());
        let readings = move |readings: &mut Readings| {
            if let Some(log) = &log {
                readings.add(&table::DNS_LOG_LOST, [], log.lost_messages());
            }
        };
        common.serve("dns", port, server, options.stream_limits(), parts, readings)
    }
}

/// Secrets that stay the same over a reload.
#[derive(Clone, Copy)]
struct Seeds {
    hash: u64,
    cookie: CookieSecret,
}

/// Checks section `[dns]` of a file, with the zones that it names.
pub(crate) fn check_dns(path: &Path) -> Result<(), Failure> {
    let options = config::merge_file(DnsOptions::default(), Some(path))?;
    options.port()?;
    if options.zone.is_empty() {
        // The flags may name the zones.
        return Ok(());
    }
    let seeds = Seeds { hash: random_u64(), cookie: CookieSecret::new(random_bytes()) };
    DnsServer::load(&options.server_config(seeds, None)?)?;
    Ok(())
}

/// Returns the classes of requests for each of so many threads.
fn read_requests(config: Option<&Path>, threads: usize) -> Result<Option<RequestPolicy>, Failure> {
    Ok(config::requests(config)?.map(|policy| policy.share_of(threads)))
}

/// Part of the reload that replaces the zones and the settings of section `[dns]`.
fn zones_part(
    flags: DnsOptions,
    (config, threads): (Option<PathBuf>, usize),
    seeds: Seeds,
    port: u16,
    reloader: DnsReloader,
) -> ReloadPart {
    Box::new(move || {
        let options = config::merge_file(flags.clone(), config.as_deref())?;
        let requests = read_requests(config.as_deref(), threads)?;
        let loaded = reloader.load(&options.server_config(seeds, requests)?)?;
        for warning in loaded.warnings() {
            tracing::warn!("{warning}");
        }
        let (zones, names) = (loaded.zone_count(), loaded.name_count());
        let mut report = format!("{names} names in {zones} zones");
        if options.port()? != port {
            report += "; the port has changed: restart the server to apply it";
        }
        let reloader = reloader.clone();
        Ok(Box::new(move || {
            reloader.publish(loaded);
            Ok(report)
        }))
    })
}

/// Part of the reload that begins the log of queries anew after it was renamed.
fn log_part(log: QueryLog) -> ReloadPart {
    Box::new(move || {
        let log = log.clone();
        Ok(Box::new(move || {
            log.reopen()?;
            Ok("query log".to_owned())
        }))
    })
}

/// Parses `ORIGIN=FILE`, or `FILE` alone when the file sets its origin itself.
fn zone_source(text: &str) -> ZoneSource {
    match text.split_once('=') {
        Some((origin, path)) => ZoneSource { origin: Some(origin.to_owned()), path: path.into() },
        None => ZoneSource { origin: None, path: text.into() },
    }
}
