//! `tidegate lab hostile`: attacks on a server, its host and its neighbours, none of which may
//! cost anybody else anything. Each attack has a file of its own.

mod attacker;
mod interface_state;
mod left_behind;
mod neighbour;

use std::time::Duration;

use serde_json::Value;

pub use attacker::{Attack, AttackerConfig, run_attacker};

use crate::report::Progress;
use crate::{Experiment, LabError};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct HostileConfig {
    /// Number of trials of each way to end a server.
    pub trials: u64,
    /// Seed: the same seed attacks at the same moments.
    pub seed: u64,
    /// Time until the effects of an attack must be over.
    pub limit: Duration,
    /// Duration in seconds of the load beside each attached attacker.
    pub seconds: f64,
    /// Number of repetitions of that load.
    pub repeats: usize,
    /// Parts to run; empty for all.
    pub parts: Vec<HostilePart>,
    /// Command that starts the daemon under attack; `None` is this program's.
    pub daemon: Option<String>,
}

/// Part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostilePart {
    /// Servers that are killed and stopped.
    LeftBehind,
    /// Attached attackers beside an honest server.
    Neighbour,
}

impl HostilePart {
    /// All parts, in the order in which they run.
    pub const ALL: [Self; 2] = [Self::LeftBehind, Self::Neighbour];

    /// Name of the part on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeftBehind => "left-behind",
            Self::Neighbour => "neighbour",
        }
    }

    fn run(self, config: &HostileConfig, progress: &Progress) -> Result<AttackResult, LabError> {
        match self {
            Self::LeftBehind => left_behind::run(config, progress),
            Self::Neighbour => neighbour::run(config, progress),
        }
    }

    /// Steps of the part: a trial, or the loads without and beside an attacker.
    fn steps(self, config: &HostileConfig) -> usize {
        match self {
            Self::LeftBehind => left_behind::Ending::ALL.len() * config.trials as usize,
            // The harmless attacker is the reference of the others.
            Self::Neighbour => (Attack::ALL.len() - 1) * config.repeats,
        }
    }
}

impl Default for HostileConfig {
    fn default() -> Self {
        Self {
            trials: 200,
            seed: 1,
            limit: Duration::from_secs(1),
            seconds: 3.0,
            repeats: 5,
            parts: Vec::new(),
            daemon: None,
        }
    }
}

impl HostileConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { trials: 10, seconds: 1.0, repeats: 1, ..self }
    }
}

/// Result of one part.
struct AttackResult {
    /// Figures by name.
    figures: Vec<(&'static str, f64)>,
    /// Rows of the table.
    rows: Vec<Value>,
    /// Notes on the method, and on the first effects that were seen.
    notes: Vec<String>,
}

/// Runs the parts of the experiment.
///
/// # Errors
/// If namespaces cannot be created, or a server does not start.
pub fn run(config: &HostileConfig) -> Result<Experiment, LabError> {
    let mut result = Experiment::new("hostile");
    let parts = HostilePart::ALL.into_iter();
    let parts = parts.filter(|part| config.parts.is_empty() || config.parts.contains(part));
    let progress = Progress::new(parts.clone().map(|part| part.steps(config)).sum());
    for part in parts {
        let AttackResult { figures, rows, notes } = part.run(config, &progress)?;
        figures.into_iter().for_each(|(name, value)| result.figure(name, value));
        result.rows.extend(rows);
        notes.into_iter().for_each(|note| result.note(note));
    }
    Ok(result)
}
