//! Published numbers, from the tables in `data/papers`.

use crate::LabError;

const LEVELS: &str = include_str!("../../../../data/papers/jonack_load_levels.csv");
const LOSSES: &str = include_str!("../../../../data/papers/jonack_losses.csv");
const MLFRR: &str = include_str!("../../../../data/papers/jonack_mlfrr.csv");
const ROUTER: &str = include_str!("../../../../data/papers/mogul_router.csv");

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

/// Cells of a table, without comments and heading.
fn cells(text: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.skip(1).map(|line| line.split(',').collect())
}

fn changed_table_error(table: &str) -> LabError {
    LabError::Config(format!("crates/lab/data/papers/{table}.csv is damaged: a number is missing"))
}

fn kpps(cell: &str) -> Option<u64> {
    cell.parse::<u64>().ok().map(|kpps| kpps * 1000)
}

impl JonackTables {
    /// Reads the tables.
    ///
    /// # Errors
    /// If a change of a table made a number unreadable.
    pub(crate) fn read() -> Result<Self, LabError> {
        Self::parse().ok_or_else(|| changed_table_error("jonack_*"))
    }

    fn parse() -> Option<Self> {
        let levels = cells(LEVELS).map(|row| match row[..] {
            [name, rate] => Some(LoadLevel { name: name.to_owned(), pps: kpps(rate)? }),
            _ => None,
        });
        let losses = |server: &str, mechanism: &str| {
            let mut rows = cells(LOSSES);
            let row = rows.find(|row| row.starts_with(&[server, mechanism]))?;
            Some((kpps(row.get(2)?)?, kpps(row.get(3)?)?))
        };
        let servers = cells(MLFRR).map(|row| match row[..] {
            [name, mlfrr, livelock] => Some(PublishedServer {
                name: name.to_owned(),
                moderated_pps: losses(name, "moderated")?,
                napi_pps: losses(name, "napi")?,
                napi_mlfrr_pps: kpps(mlfrr)?,
                livelock_level: livelock.to_owned(),
            }),
            _ => None,
        });
        let (levels, servers) = (levels.collect::<Option<_>>()?, servers.collect::<Option<_>>()?);
        Some(Self { levels, servers })
    }
}

impl MogulTable {
    /// Reads the table.
    ///
    /// # Errors
    /// If a change of the table made a number unreadable.
    pub(crate) fn read() -> Result<Self, LabError> {
        Self::parse().ok_or_else(|| changed_table_error("mogul_router"))
    }

    fn parse() -> Option<Self> {
        let value = |name: &str| {
            let row = cells(ROUTER).find(|row| row.first() == Some(&name))?;
            row.get(1)?.parse::<f64>().ok()
        };
        Some(Self {
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
