//! `tidegate serve dns`.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate_apps::MessageLimits;
use tidegate_apps::dns::{DnsConfig, Server, ZoneSource};

use super::common::Common;
use crate::Failure;
use crate::config::{self, Section};

/// Flags of `serve dns`.
#[derive(Args)]
pub(crate) struct DnsCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    dns: DnsOptions,
}

/// Section `[dns]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct DnsOptions {
    /// A zone file, as FILE or as ORIGIN=FILE; may be given several times
    #[arg(long, value_name = "[ORIGIN=]FILE")]
    zone: Vec<String>,
    /// The UDP port to serve [default: 53]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// The largest answer in bytes, whatever the client offers [default: 1232]
    #[arg(long, value_name = "BYTES")]
    max_udp_bytes: Option<u16>,
    /// Serve no TCP
    #[arg(long)]
    no_tcp: bool,
    /// TCP connections at the same time; one more ends the longest idle [default: 1024]
    #[arg(long, value_name = "COUNT")]
    tcp_connections: Option<usize>,
    /// TCP connections of one address at the same time [default: 64]
    #[arg(long, value_name = "COUNT")]
    tcp_per_address: Option<usize>,
    /// How long a TCP connection may be idle [default: 10]
    #[arg(long, value_name = "SECONDS")]
    tcp_idle_timeout: Option<u64>,
}

impl DnsOptions {
    /// What TCP connections may cost; `None` when there are none.
    fn streams(&self) -> Option<MessageLimits> {
        let defaults = MessageLimits::default();
        let seconds = |seconds: u64| Duration::from_secs(seconds.max(1));
        (!self.no_tcp).then(|| MessageLimits {
            connections: self.tcp_connections.unwrap_or(defaults.connections).max(1),
            per_address: self.tcp_per_address.unwrap_or(defaults.per_address).max(1),
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
        let options = config::over(dns, common.config.as_deref())?;
        let server = load_zones(&options)?;
        let port = options.listen.unwrap_or(53);
        common.serve("dns", port, server, options.streams())
    }
}

fn load_zones(options: &DnsOptions) -> Result<Server, Failure> {
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
    let server = Server::load(&config)?;
    for warning in server.warnings() {
        eprintln!("{warning}");
    }
    let (zones, names) = (server.zone_count(), server.name_count());
    eprintln!("loaded {names} names in {zones} zones in {:.2} s", began.elapsed().as_secs_f64());
    Ok(server)
}

/// `ORIGIN=FILE`, or `FILE` alone when the file says its origin itself.
fn zone_source(text: &str) -> ZoneSource {
    match text.split_once('=') {
        Some((origin, path)) => ZoneSource { origin: Some(origin.to_owned()), path: path.into() },
        None => ZoneSource { origin: None, path: text.into() },
    }
}
