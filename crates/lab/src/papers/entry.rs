//! Entries of the report: a table or figure of a paper, with the published points and those of today.

use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Value, json};

use super::plan::{Plan, PlannedEntry, Query};
use super::runs::RunResults;
use super::select::{self, Point, PointPlace};
use crate::LabError;
use crate::published::PublishedTables;
use crate::report::expressions;
use crate::stats::{median, round_to_thousandths};

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Measured here.
    Reproduced,
    /// Cannot be repeated.
    NotPossible,
    /// A result is missing.
    Missing,
}

impl State {
    pub(super) const ALL: [Self; 3] = [Self::Reproduced, Self::NotPossible, Self::Missing];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::NotPossible => "not_possible",
            Self::Missing => "missing",
        }
    }
}

/// A table or figure with its points.
#[derive(Debug)]
pub(super) struct Entry<'p> {
    pub(super) plan: &'p PlannedEntry,
    pub(super) state: State,
    /// Reason of a state other than reproduced.
    pub(super) reason: Option<String>,
    pub(super) published: Vec<Point>,
    pub(super) kernel: Vec<Point>,
    pub(super) tidegate: Vec<Point>,
    pub(super) simulated: Vec<Point>,
    /// The paper's claim holds here.
    pub(super) holds: Option<bool>,
    /// Finding, in a few words.
    pub(super) ours: String,
    pub(super) ratio: Option<Ratio>,
    /// Command lines and commits of the results.
    pub(super) commands: Vec<String>,
    pub(super) commits: Vec<String>,
}

/// Power by which the range of the points is widened to [`Ratio::lowest`] and [`Ratio::highest`]. A
/// point has few repetitions, whose range holds a further one in a third to two thirds of the cases.
const WIDENING: f64 = 2.0;
/// Changes of a shared machine by itself, as a factor: a ratio without repetitions varies, too.
pub(super) const MACHINE_CHANGE: f64 = 1.1;

/// Tidegate over the kernel at its best, or the inverse where less is better: above 1 Tidegate is
/// ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratio {
    /// Median of the places that both have.
    pub(super) median: f64,
    /// Range in which nine of ten ratios of other runs are expected.
    pub(super) lowest: f64,
    pub(super) highest: f64,
}

impl Ratio {
    /// Ratio whose places, within their spread, are between `low` and `high`.
    fn new(median: f64, low: f64, high: f64) -> Self {
        Self {
            median,
            lowest: median * (low / median).powf(WIDENING).min(1.0 / MACHINE_CHANGE),
            highest: median * (high / median).powf(WIDENING).max(MACHINE_CHANGE),
        }
    }
}

/// All entries of a plan.
pub(super) fn all<'p>(
    plan: &'p Plan,
    tables: &PublishedTables,
    results: &RunResults,
) -> Result<Vec<Entry<'p>>, LabError> {
    plan.entries.iter().map(|entry| Entry::new(entry, tables, results)).collect()
}

impl<'p> Entry<'p> {
    fn new(
        plan: &'p PlannedEntry,
        tables: &PublishedTables,
        results: &RunResults,
    ) -> Result<Self, LabError> {
        let points = |queries: &[Query]| -> Result<Vec<Point>, LabError> {
            let found: Result<Vec<_>, _> =
                queries.iter().map(|query| select::points(query, tables, results)).collect();
            Ok(found?.concat())
        };
        let (published, kernel, tidegate) =
            (points(&plan.published)?, points(&plan.kernel)?, points(&plan.tidegate)?);
        let simulated = points(&plan.simulated)?;
        let runs = plan.runs();
        let without_result: Vec<&str> =
            runs.iter().copied().filter(|run| results.get(run).is_none()).collect();
        let (state, reason) = if let Some(reason) = &plan.not_possible {
            (State::NotPossible, Some(reason.clone()))
        } else if !without_result.is_empty() {
            (State::Missing, Some(format!("no result of {}", without_result.join(", "))))
        } else if published.is_empty() || kernel.is_empty() || tidegate.is_empty() {
            (State::Missing, Some("the results have no rows of this entry".to_owned()))
        } else {
            (State::Reproduced, None)
        };
        let is_there = state == State::Reproduced;
        let (holds, ours) = if is_there { judge(plan, results) } else { (None, String::new()) };
        let ratio = if is_there && plan.has_ratio { ratio(plan, &kernel, &tidegate) } else { None };
        let of_runs = |key: &str| {
            let found = runs.iter().filter_map(|run| results.get(run)?[key].as_str());
            let mut found: Vec<String> = found.map(str::to_owned).collect();
            found.dedup();
            found
        };
        let (commands, commits) = (of_runs("command"), of_runs("commit"));
        Ok(Self {
            plan,
            state,
            reason,
            published,
            kernel,
            tidegate,
            simulated,
            holds,
            ours,
            ratio,
            commands,
            commits,
        })
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "id": self.plan.id,
            "publication": self.plan.paper,
            "source": self.plan.source,
            "title": self.plan.title,
            "claim": self.plan.claim,
            "differs": self.plan.differs,
            "state": self.state.name(),
            "reason": self.reason,
            "holds": self.holds,
            "ours": self.ours,
            "ratio": self.ratio.map(|ratio| round_to_thousandths(ratio.median)),
            "ratio_lowest": self.ratio.map(|ratio| round_to_thousandths(ratio.lowest)),
            "ratio_highest": self.ratio.map(|ratio| round_to_thousandths(ratio.highest)),
            "paper": self.published,
            "kernel": self.kernel,
            "tidegate": self.tidegate,
            "simulated": self.simulated,
            "command": self.commands.join("; "),
            "commit": self.commits.join("; "),
        })
    }
}

/// Values of the entry's expressions over the results. A result without a figure of an expression, such
/// as a floor that no load reached, leaves the claim open and says so.
fn judge(plan: &PlannedEntry, results: &RunResults) -> (Option<bool>, String) {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    expressions::add(&mut environment);
    let context = results.context();
    let evaluate = |text: &str| environment.compile_expression(text)?.eval(&context);
    let holds = evaluate(&plan.holds).ok().map(|holds| holds.is_true());
    let ours = evaluate(&plan.ours);
    (holds, ours.map_or_else(|error| format!("not judged: {error}"), |ours| ours.to_string()))
}

/// Ratio at the places that both have.
fn ratio(plan: &PlannedEntry, kernel: &[Point], tidegate: &[Point]) -> Option<Ratio> {
    let best = |points: &[Point], place: &PointPlace| {
        let values = points.iter().filter(|point| point.x == *place).filter_map(Spread::of);
        if plan.repeats {
            return Spread::of_repeats(values);
        }
        values.reduce(|best, other| {
            let is_better = match plan.less_is_better {
                true => other.middle < best.middle,
                false => other.middle > best.middle,
            };
            if is_better { other } else { best }
        })
    };
    let mut places: Vec<&PointPlace> = Vec::new();
    for point in tidegate {
        if !places.contains(&&point.x) {
            places.push(&point.x);
        }
    }
    let ratios: Vec<Spread> = places
        .into_iter()
        .filter_map(|place| best(tidegate, place).zip(best(kernel, place)))
        .map(|(own, other)| if plan.less_is_better { other.over(&own) } else { own.over(&other) })
        .collect();
    let mut medians: Vec<f64> = ratios.iter().map(|ratio| ratio.middle).collect();
    medians.sort_by(f64::total_cmp);
    let low = ratios.iter().map(|ratio| ratio.low).reduce(f64::min)?;
    let high = ratios.iter().map(|ratio| ratio.high).reduce(f64::max)?;
    Some(Ratio::new(median(&medians), low, high))
}

/// A value above zero with its spread.
struct Spread {
    low: f64,
    middle: f64,
    high: f64,
}

impl Spread {
    fn of(point: &Point) -> Option<Self> {
        let middle = point.y.filter(|y| *y > 0.0)?;
        let end = |end: Option<f64>| end.filter(|end| *end > 0.0).unwrap_or(middle);
        Some(Self { low: end(point.low).min(middle), middle, high: end(point.high).max(middle) })
    }

    /// The median of repetitions, with the lowest and the highest.
    fn of_repeats(repeats: impl Iterator<Item = Self>) -> Option<Self> {
        let repeats: Vec<Self> = repeats.collect();
        let middle = median(repeats.iter().map(|one| one.middle));
        let low = repeats.iter().map(|one| one.low).reduce(f64::min)?;
        let high = repeats.iter().map(|one| one.high).reduce(f64::max)?;
        Some(Self { low, middle, high })
    }

    fn over(&self, other: &Self) -> Self {
        Self {
            low: self.low / other.high,
            middle: self.middle / other.middle,
            high: self.high / other.low,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(less_is_better: bool) -> PlannedEntry {
        let query = |run: Option<&str>, table: Option<&str>, y: &str| Query {
            table: table.map(str::to_owned),
            run: run.map(str::to_owned),
            each: None,
            filter: "true".to_owned(),
            series: "'s'".to_owned(),
            x: "threads".to_owned(),
            y: y.to_owned(),
            low: None,
            high: None,
        };
        PlannedEntry {
            id: "rivera-2.1".to_owned(),
            paper: "Rivera 2013".to_owned(),
            source: "Table 2.1".to_owned(),
            title: "Concurrent reads".to_owned(),
            claim: "scales".to_owned(),
            differs: "cores".to_owned(),
            x: "threads".to_owned(),
            y: "reads".to_owned(),
            log_x: false,
            log_y: false,
            less_is_better,
            has_ratio: true,
            repeats: false,
            not_possible: None,
            holds: "concurrent_reads.figures.scaling > 1.5".to_owned(),
            ours: "fixed(concurrent_reads.figures.scaling) ~ ' times'".to_owned(),
            published: vec![query(None, Some("rivera_concurrent_reads"), "seconds")],
            kernel: vec![query(Some("concurrent-reads"), None, "kernel")],
            tidegate: vec![query(Some("concurrent-reads"), None, "tidegate")],
            simulated: Vec::new(),
        }
    }

    fn results() -> RunResults {
        let rows = json!([
            {"threads": 1, "kernel": 10.0, "tidegate": 20.0},
            {"threads": 2, "kernel": 10.0, "tidegate": 5.0},
            {"threads": 4, "kernel": 10.0, "tidegate": 40.0},
        ]);
        let result = json!({"figures": {"scaling": 1.75}, "rows": rows, "commit": "abc",
            "command": "tidegate lab concurrent-reads"});
        RunResults::of([("concurrent-reads", result)])
    }

    #[test]
    fn entry_has_points_of_all_three_and_a_judgement() {
        let tables = PublishedTables::read().unwrap();
        let (plan, results) = (entry(false), results());
        let made = Entry::new(&plan, &tables, &results).unwrap();
        assert_eq!(made.state, State::Reproduced);
        assert_eq!((made.published.len(), made.kernel.len(), made.tidegate.len()), (48, 3, 3));
        assert_eq!((made.holds, made.ours.as_str()), (Some(true), "1.75 times"));
        assert_eq!(made.ratio, Some(Ratio { median: 2.0, lowest: 0.125, highest: 8.0 }));
        assert_eq!((made.to_json()["commit"].as_str(), made.commands.len()), (Some("abc"), 1));
        let mut plan = entry(true);
        let made = Entry::new(&plan, &tables, &results).unwrap();
        assert_eq!(made.ratio, Some(Ratio { median: 0.5, lowest: 0.125, highest: 8.0 }));
        plan.has_ratio = false;
        assert_eq!(Entry::new(&plan, &tables, &results).unwrap().ratio, None);
    }

    #[test]
    fn repetitions_of_a_place_are_its_median_and_its_spread() {
        let tables = PublishedTables::read().unwrap();
        let mut plan = entry(false);
        plan.repeats = true;
        let queries = plan.kernel.iter_mut().chain(&mut plan.tidegate);
        queries.for_each(|query| query.x = "'here'".to_owned());
        let made = Entry::new(&plan, &tables, &results()).unwrap();
        assert_eq!(made.ratio, Some(Ratio { median: 2.0, lowest: 0.125, highest: 8.0 }));
        let rows = json!([{"threads": 1, "kernel": 8.0, "tidegate": 20.0},
            {"threads": 1, "kernel": 16.0, "tidegate": 24.0}]);
        let results = RunResults::of([("concurrent-reads", json!({"rows": rows}))]);
        let made = Entry::new(&plan, &tables, &results).unwrap();
        assert_eq!(made.ratio, Some(Ratio::new(22.0 / 12.0, 1.25, 3.0)));
        let single = Ratio::new(3.0, 3.0, 3.0);
        assert!(single.lowest < 2.8 && single.highest > 3.2, "a tenth at least: {single:?}");
    }

    #[test]
    fn claim_without_its_figure_stays_open() {
        let tables = PublishedTables::read().unwrap();
        let mut plan = entry(false);
        plan.holds = "concurrent_reads.figures.other > 1".to_owned();
        plan.ours = "fixed(concurrent_reads.figures.other)".to_owned();
        let results = results();
        let made = Entry::new(&plan, &tables, &results).unwrap();
        assert_eq!((made.state, made.holds), (State::Reproduced, None));
        assert!(made.ours.starts_with("not judged: "), "{}", made.ours);
    }

    #[test]
    fn entry_without_results_is_missing_and_says_of_which() {
        let tables = PublishedTables::read().unwrap();
        let mut plan = entry(false);
        let none = RunResults::of([]);
        let missing = Entry::new(&plan, &tables, &none).unwrap();
        assert_eq!(missing.state, State::Missing);
        assert_eq!(missing.reason.as_deref(), Some("no result of concurrent-reads"));
        plan.not_possible = Some("no device".to_owned());
        assert_eq!(Entry::new(&plan, &tables, &none).unwrap().state, State::NotPossible);
    }
}
