//! Published numbers that the simulator is fitted to and judged by.

use std::collections::HashMap;

use serde::Deserialize;

use crate::LabError;
use crate::published;

/// A load level.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoadLevel {
    pub(crate) name: String,
    pub(crate) pps: u64,
}

/// Published results of a server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PublishedServer {
    pub(crate) name: String,
    /// Highest load without losses and lowest load with losses, under interrupt moderation.
    pub(crate) moderated_pps: (u64, u64),
    /// The same two loads under NAPI.
    pub(crate) napi_pps: (u64, u64),
    /// Maximum loss-free receive rate under NAPI.
    pub(crate) napi_mlfrr_pps: u64,
    /// Livelock level under interrupt moderation.
    pub(crate) livelock_level: String,
}

/// Jonack and Murta's load levels and servers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JonackTables {
    pub(crate) levels: Vec<LoadLevel>,
    pub(crate) servers: Vec<PublishedServer>,
}

/// Mogul and Ramakrishnan's router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MogulTable {
    /// Peak of the unmodified kernel.
    pub(crate) peak_pps: f64,
    /// Peak of the unmodified kernel with the filter.
    pub(crate) filter_peak_pps: f64,
    /// Load at which the unmodified kernel with the filter delivers nothing.
    pub(crate) filter_livelock_pps: u64,
    /// Maximum packet rate of the network.
    pub(crate) ethernet_pps: u64,
    /// CPU share of an application while no packets arrive, in percent.
    pub(crate) idle_user_percent: f64,
    /// The modified kernel's rate at saturation.
    pub(crate) polled_pps: f64,
    /// Loss of small quotas compared with the best, with the filter, in percent.
    pub(crate) small_quota_loss_percent: f64,
}

#[derive(Deserialize)]
struct LevelRow {
    level: String,
    kpps: u64,
}

#[derive(Deserialize)]
struct LossRow {
    server: String,
    mechanism: String,
    last_lossless_kpps: u64,
    first_lossy_kpps: u64,
}

#[derive(Deserialize)]
struct MlfrrRow {
    server: String,
    napi_mlfrr_kpps: u64,
    moderated_livelock_level: String,
}

#[derive(Deserialize)]
struct RouterRow {
    name: String,
    value: f64,
}

fn missing(what: &str) -> LabError {
    LabError::Config(format!("crates/lab/data/papers has no {what}: restore the tables"))
}

impl JonackTables {
    /// Reads the tables.
    ///
    /// # Errors
    /// If a change of a table made a number unreadable.
    pub(crate) fn read() -> Result<Self, LabError> {
        let levels = published::rows("jonack_load_levels")?;
        let levels = levels
            .into_iter()
            .map(|row: LevelRow| LoadLevel { name: row.level, pps: row.kpps * 1000 });
        let losses: Vec<LossRow> = published::rows("jonack_losses")?;
        let losses = |server: &str, mechanism: &str| {
            let is_wanted = |row: &&LossRow| row.server == server && row.mechanism == mechanism;
            let row = losses.iter().find(is_wanted);
            row.map(|row| (row.last_lossless_kpps * 1000, row.first_lossy_kpps * 1000))
                .ok_or_else(|| missing(&format!("losses of {server}, {mechanism}")))
        };
        let server = |row: MlfrrRow| {
            Ok(PublishedServer {
                moderated_pps: losses(&row.server, "moderated")?,
                napi_pps: losses(&row.server, "napi")?,
                napi_mlfrr_pps: row.napi_mlfrr_kpps * 1000,
                livelock_level: row.moderated_livelock_level,
                name: row.server,
            })
        };
        let servers = published::rows("jonack_mlfrr")?.into_iter().map(server);
        Ok(Self { levels: levels.collect(), servers: servers.collect::<Result<_, LabError>>()? })
    }
}

impl MogulTable {
    /// Reads the table.
    ///
    /// # Errors
    /// If a change of the table made a number unreadable.
    pub(crate) fn read() -> Result<Self, LabError> {
        let rows = published::rows("mogul_router")?.into_iter();
        let values: HashMap<String, f64> =
            rows.map(|row: RouterRow| (row.name, row.value)).collect();
        let value = |name: &str| values.get(name).copied().ok_or_else(|| missing(name));
        Ok(Self {
            peak_pps: value("unmodified_peak_pps")?,
            filter_peak_pps: value("unmodified_screen_peak_pps")?,
            filter_livelock_pps: value("unmodified_screen_livelock_pps")? as u64,
            ethernet_pps: value("ethernet_max_pps")? as u64,
            idle_user_percent: value("idle_user_percent")?,
            polled_pps: value("polled_mlfrr_pps")?,
            small_quota_loss_percent: value("small_quota_loss_percent")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_published_tables() {
        let jonack = JonackTables::read().unwrap();
        assert_eq!((jonack.levels.len(), jonack.servers.len()), (8, 3));
        assert_eq!(jonack.levels[7], LoadLevel { name: "N8".into(), pps: 875_000 });
        assert_eq!(jonack.servers[2].moderated_pps, (639_000, 875_000));
        for server in &jonack.servers {
            let (lossless, lossy) = server.napi_pps;
            assert!((lossless..lossy).contains(&server.napi_mlfrr_pps), "section 4.1 says so");
        }
        assert_eq!(MogulTable::read().unwrap().ethernet_pps, 14_880);
    }
}
