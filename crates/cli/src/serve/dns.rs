//! `tidegate serve dns`.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate_apps::MessageLimits;
use tidegate_apps::dns::{DnsConfig, DnsServer, ZoneSource};

use super::common::ServerOptions;
use crate::Failure;
use crate::config::{self, Section};

/// Flags of `serve dns`.
#[derive(Args)]
pub(crate) struct DnsCommand {
    #[command(flatten)]
    common: ServerOptions,
    #[command(flatten)]
    dns: DnsOptions,
}

/// Section `[dns]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct DnsOptions {
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
}

impl DnsOptions {
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

impl Section for DnsOptions {
    const NAME: &'static str = "dns";
}

impl DnsCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, dns } = self;
        let options = config::merge_file(dns, common.config.as_deref())?;
        let server = load_zones(&options)?;
        let port = options.listen.unwrap_or(53);
        common.serve("dns", port, server, options.stream_limits())
    }
}

fn load_zones(options: &DnsOptions) -> Result<DnsServer, Failure> {
    if options.zone.is_empty() {
        return Err("no zone to serve: give --zone ORIGIN=FILE".into());
    }
    let mut config = DnsConfig {
        zones: options.zone.iter().map(|zone| zone_source(zone)).collect(),
        hash_seed: RandomState::new().hash_one(std::process::id()),
        ..DnsConfig::default()
    };
    if let Some(bytes) = options.max_udp_bytes {
        config.max_udp_bytes = bytes.into();
    }
    let began = Instant::now();
    let server = DnsServer::load(&config)?;
    for warning in server.warnings() {
        eprintln!("{warning}");
    }
    let (zones, names) = (server.zone_count(), server.name_count());
    eprintln!("loaded {names} names in {zones} zones in {:.2} s", began.elapsed().as_secs_f64());
    Ok(server)
}

/// Parses `ORIGIN=FILE`, or `FILE` alone when the file sets its origin itself.
fn zone_source(text: &str) -> ZoneSource {
    match text.split_once('=') {
        Some((origin, path)) => ZoneSource { origin: Some(origin.to_owned()), path: path.into() },
        None => ZoneSource { origin: None, path: text.into() },
    }
}
