//! `tidegate lab hostile`: attacks on a server, its host and its neighbours, none of which may
//! cost anybody else anything. Each attack has a file of its own.

mod interface_state;
mod left_behind;

use std::time::Duration;

use serde_json::Value;

use crate::{Experiment, LabError};

/// Configuration of the experiment.
#[derive(Clone, Copy, Debug)]
pub struct HostileConfig {
    /// Number of trials of each attack.
    pub trials: u64,
    /// Seed: the same seed attacks at the same moments.
    pub seed: u64,
    /// Time until the effects of an attack must be over.
    pub limit: Duration,
}

impl Default for HostileConfig {
    fn default() -> Self {
        Self { trials: 200, seed: 1, limit: Duration::from_secs(1) }
    }
}

/// Result of one attack.
struct AttackResult {
    /// Figures by name.
    figures: Vec<(&'static str, f64)>,
    /// Rows of the table.
    rows: Vec<Value>,
    /// Notes on the method, and on the first effects that were seen.
    notes: Vec<String>,
}

/// Function that runs one attack.
type Attack = fn(&HostileConfig) -> Result<AttackResult, LabError>;

/// The attacks, in the order in which they run.
const ATTACKS: [Attack; 1] = [left_behind::run];

/// Runs every attack.
///
/// # Errors
/// If namespaces cannot be created, or a server does not start.
pub fn run(config: &HostileConfig) -> Result<Experiment, LabError> {
    let mut result = Experiment::new("hostile");
    for attack in ATTACKS {
        let AttackResult { figures, rows, notes } = attack(config)?;
        figures.into_iter().for_each(|(name, value)| result.figure(name, value));
        result.rows.extend(rows);
        notes.into_iter().for_each(|note| result.note(note));
    }
    Ok(result)
}
