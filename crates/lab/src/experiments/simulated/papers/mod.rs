//! `tidegate lab papers-livelock`: the machines of two papers in the simulator.
//!
//! The costs of the processing steps are fitted to one half of the published numbers, and judged
//! by the other half.

mod jonack;
mod mogul;
mod tables;

use serde_json::json;

use crate::report::plot::Picture;
use crate::stats::round_to_hundredths;
use crate::{Experiment, LabError};

/// A published number beside the simulated number.
struct Comparison {
    machine: String,
    case: String,
    /// `fitted` or `judged`: the half of the published numbers.
    half: &'static str,
    published: String,
    simulated: String,
    agreement: Agreement,
}

/// Agreement of the published and the simulated value.
enum Agreement {
    /// For two rates: the difference in percent of the published rate.
    Rate { error_percent: f64 },
    /// For two statements: true if they agree.
    Statement { holds: bool },
}

impl Comparison {
    fn rate(
        machine: &str,
        case: String,
        half: &'static str,
        published: f64,
        simulated: f64,
    ) -> Self {
        Self {
            machine: machine.to_owned(),
            case,
            half,
            published: format!("{published:.0}"),
            simulated: format!("{simulated:.0}"),
            agreement: Agreement::Rate { error_percent: (simulated / published - 1.0) * 100.0 },
        }
    }

    fn equal_text(
        machine: &str,
        case: String,
        half: &'static str,
        published: &str,
        simulated: &str,
    ) -> Self {
        let holds = published == simulated;
        Self::statement(machine, case, half, published.to_owned(), simulated.to_owned(), holds)
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
        Self {
            machine,
            case,
            half,
            published,
            simulated,
            agreement: Agreement::Statement { holds },
        }
    }
}

impl Comparison {
    /// Error of the simulated number in percent of the published one, also of numbers that are
    /// judged as statements; `None` for words.
    fn error_percent(&self) -> Option<f64> {
        if let Agreement::Rate { error_percent } = self.agreement {
            return Some(error_percent);
        }
        let number = |text: &str| text.parse::<f64>().ok();
        let (published, simulated) = (number(&self.published)?, number(&self.simulated)?);
        (published > 0.0).then(|| (simulated / published - 1.0) * 100.0)
    }
}

/// Smallest value in a range for which a monotonic condition holds, to a thousandth of the range;
/// the upper end if it never holds.
fn min_where(
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

/// Simulates the machines of both papers.
///
/// # Errors
/// If a table of published numbers is damaged.
pub fn run() -> Result<Experiment, LabError> {
    let mut result = Experiment::new("papers-livelock");
    let (mut comparisons, mut panels) = mogul::run(&mut result)?;
    let (jonack_comparisons, jonack_panels) = jonack::run(&mut result)?;
    comparisons.extend(jonack_comparisons);
    panels.extend(jonack_panels);
    let rows: Vec<_> = comparisons
        .iter()
        .map(|comparison| {
            let mut row = json!({
                "machine": comparison.machine,
                "case": comparison.case,
                "half": comparison.half,
                "published": comparison.published,
                "simulated": comparison.simulated,
            });
            if let Some(error_percent) = comparison.error_percent() {
                row["error_percent"] = json!(round_to_hundredths(error_percent));
            }
            if let Agreement::Statement { holds } = comparison.agreement {
                row["holds"] = json!(holds);
            }
            row
        })
        .collect();
    result.rows.splice(0..0, rows);
    figures(&mut result, &comparisons);
    result.columns =
        vec!["machine", "case", "half", "published", "simulated", "error_percent", "holds"];
    result.columns.extend(["level", "offered_pps", "received_pps", "flow_mbps", "system_percent"]);
    result.picture = Some(Picture { title: "The papers' machines, simulated".to_owned(), panels });
    Ok(result)
}

fn figures(result: &mut Experiment, comparisons: &[Comparison]) {
    let held_out = || comparisons.iter().filter(|judged| judged.half == "judged");
    let errors = held_out().filter_map(|judged| match judged.agreement {
        Agreement::Rate { error_percent } if judged.case.contains("MLFRR") => {
            Some(error_percent.abs())
        }
        _ => None,
    });
    result.figure("mlfrr_error_max_percent", round_to_hundredths(errors.fold(0.0, f64::max)));
    let count_wrong = |words: &str, all: bool| {
        let fits = |judged: &&Comparison| all || judged.half == "judged";
        let cases = comparisons.iter().filter(fits).filter(|judged| judged.case.contains(words));
        cases
            .filter(|judged| matches!(judged.agreement, Agreement::Statement { holds: false }))
            .count()
    };
    result.figure("livelock_levels_wrong", count_wrong("livelock", true) as f64);
    let errors = comparisons.iter().filter_map(Comparison::error_percent).map(f64::abs);
    result.figure("error_max_percent", round_to_hundredths(errors.fold(0.0, f64::max)));
    result.figure("loss_levels_wrong", count_wrong("lossless level", false) as f64);
    result.figure("shapes_wrong", count_wrong("shape", false) as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulation_matches_the_published_numbers_not_fitted() {
        let result = run().unwrap();
        assert!(result.figures["mlfrr_error_max_percent"] <= 10.0, "{result}");
        assert_eq!(result.figures["livelock_levels_wrong"], 0.0, "{result}");
        assert_eq!(result.figures["shapes_wrong"], 0.0, "{result}");
        // Every number has its error.
        let judged_numbers = result.rows.iter().filter(|row| {
            let case = row["case"].as_str().unwrap_or_default();
            case.contains("lossless level") && row["error_percent"].is_number()
        });
        assert!(judged_numbers.count() > 0, "{result}");
        assert!(result.figures["error_max_percent"] >= result.figures["mlfrr_error_max_percent"]);
    }

    #[test]
    fn simulation_repeats() {
        let run = || {
            let mut result = Experiment::new("papers-livelock");
            mogul::run(&mut result).unwrap();
            serde_json::to_string(&result).unwrap()
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn numbers_have_errors_and_names_have_none() {
        let text = |published: &str, simulated: &str| {
            Comparison::equal_text("SS1", "level".into(), "judged", published, simulated)
        };
        assert_eq!(text("200", "100").error_percent(), Some(-50.0));
        assert_eq!(text("N4", "N6").error_percent(), None);
    }

    #[test]
    fn min_where_finds_the_threshold() {
        let found = min_where(0.0, 10.0, |x| Ok(x >= 3.3)).unwrap();
        assert!((3.3..3.303).contains(&found), "{found}");
    }
}
