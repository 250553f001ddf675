//! `tidegate lab papers-livelock`: the papers' own machines in the simulator.
//!
//! What their steps cost is fitted on one half of the published numbers, and
//! judged on the other half.

mod jonack;
mod mogul;
mod tables;

use serde_json::json;

use crate::plot::Picture;
use crate::sweep::hundredths;
use crate::{Experiment, LabError};

/// A published number beside the simulated one.
struct Judged {
    machine: String,
    case: String,
    /// `fitted`, or `judged`.
    half: &'static str,
    published: String,
    simulated: String,
    verdict: Verdict,
}

/// How well they agree.
enum Verdict {
    /// Two rates: their difference in percent of the published one.
    Rate { error_percent: f64 },
    /// Two statements: the same, or not.
    Statement { holds: bool },
}

impl Judged {
    fn rate(machine: &str, case: String, half: &'static str, published: f64, got: f64) -> Self {
        Self {
            machine: machine.to_owned(),
            case,
            half,
            published: format!("{published:.0}"),
            simulated: format!("{got:.0}"),
            verdict: Verdict::Rate { error_percent: (got / published - 1.0) * 100.0 },
        }
    }

    fn same(machine: &str, case: String, half: &'static str, published: &str, got: &str) -> Self {
        let holds = published == got;
        Self::statement(machine, case, half, published.to_owned(), got.to_owned(), holds)
    }

    fn statement(
        machine: &str,
        case: String,
        half: &'static str,
        published: String,
        simulated: String,
        holds: bool,
    ) -> Self {
        let machine = machine.to_owned();
        Self { machine, case, half, published, simulated, verdict: Verdict::Statement { holds } }
    }
}

/// The least value in a range that a rising condition holds for, to a
/// thousandth of the range; the upper end if it never holds.
fn least_that(
    mut low: f64,
    mut high: f64,
    mut holds: impl FnMut(f64) -> Result<bool, LabError>,
) -> Result<f64, LabError> {
    for _ in 0..12 {
        let middle = (low + high) / 2.0;
        if holds(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(high)
}

/// Runs both papers' machines.
///
/// # Errors
/// When a table of published numbers is damaged.
pub fn run() -> Result<Experiment, LabError> {
    let mut result = Experiment::new("papers-livelock");
    let (mut judged, mut panels) = mogul::run(&mut result)?;
    let (of_jonack, more) = jonack::run(&mut result)?;
    judged.extend(of_jonack);
    panels.extend(more);
    let rows: Vec<_> = judged
        .iter()
        .map(|judged| {
            let mut row = json!({
                "machine": judged.machine,
                "case": judged.case,
                "half": judged.half,
                "published": judged.published,
                "simulated": judged.simulated,
            });
            match judged.verdict {
                Verdict::Rate { error_percent } => {
                    row["error_percent"] = json!(hundredths(error_percent));
                }
                Verdict::Statement { holds } => row["holds"] = json!(holds),
            }
            row
        })
        .collect();
    result.rows.splice(0..0, rows);
    figures(&mut result, &judged);
    result.columns =
        vec!["machine", "case", "half", "published", "simulated", "error_percent", "holds"];
    result.columns.extend(["level", "offered_pps", "received_pps", "flow_mbps", "system_percent"]);
    result.picture = Some(Picture { title: "The papers' machines, simulated".to_owned(), panels });
    Ok(result)
}

fn figures(result: &mut Experiment, judged: &[Judged]) {
    let unseen = || judged.iter().filter(|judged| judged.half == "judged");
    let errors = unseen().filter_map(|judged| match judged.verdict {
        Verdict::Rate { error_percent } if judged.case.contains("MLFRR") => {
            Some(error_percent.abs())
        }
        _ => None,
    });
    result.figure("mlfrr_error_max_percent", hundredths(errors.fold(0.0, f64::max)));
    let wrong = |words: &str, all: bool| {
        let fits = |judged: &&Judged| all || judged.half == "judged";
        let cases = judged.iter().filter(fits).filter(|judged| judged.case.contains(words));
        cases.filter(|judged| matches!(judged.verdict, Verdict::Statement { holds: false })).count()
    };
    result.figure("livelock_levels_wrong", wrong("livelock", true) as f64);
    result.figure("loss_levels_wrong", wrong("lossless level", false) as f64);
    result.figure("shapes_wrong", wrong("shape", false) as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_are_met_on_the_half_that_was_not_fitted() {
        let result = run().unwrap();
        assert!(result.figures["mlfrr_error_max_percent"] <= 10.0, "{result}");
        assert_eq!(result.figures["livelock_levels_wrong"], 0.0, "{result}");
        assert_eq!(result.figures["shapes_wrong"], 0.0, "{result}");
        let text = serde_json::to_string(&result).unwrap();
        assert_eq!(text, serde_json::to_string(&run().unwrap()).unwrap(), "it repeats");
    }

    #[test]
    fn the_search_finds_where_a_condition_begins_to_hold() {
        let found = least_that(0.0, 10.0, |x| Ok(x >= 3.3)).unwrap();
        assert!((3.3..3.303).contains(&found), "{found}");
    }
}
