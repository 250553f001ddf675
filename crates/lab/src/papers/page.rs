//! The page: one file of HTML with all charts, numbers and results, which loads nothing.

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Value, context};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;

use super::compare::FormerReport;
use super::entry::{Entry, Ratio, State};
use super::runs::RunResults;
use super::select::{Point, PointPlace};
use crate::LabError;
use crate::report::{Axis, Experiment, Panel, Picture, Provenance, Scale, Series, Stroke};

const TEMPLATE: &str = include_str!("page.html");
/// Width of a chart in pixels: that of a phone.
const CHART_WIDTH: u32 = 440;

/// Renders the page.
pub(super) fn render(
    entries: &[Entry<'_>],
    result: &Experiment,
    results: &RunResults,
    former: Option<&FormerReport>,
) -> Result<String, LabError> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_filter("data_uri", data_uri);
    let drawn: Result<Vec<Value>, LabError> =
        entries.iter().map(|entry| draw(entry, former)).collect();
    let runs: Vec<Value> = results
        .iter()
        .map(|(name, result)| {
            let json = result.to_string();
            let wall_seconds = result["wall_seconds"].as_f64().unwrap_or_default();
            let notes = Value::from(Serde(&result["notes"]));
            let (command, commit) = (result["command"].as_str(), result["commit"].as_str());
            let comparisons = Value::from(Serde(comparisons(result)));
            context!(name, json, wall_seconds, notes, command, commit, comparisons)
        })
        .collect();
    let provenance = Provenance::of_this_run(std::time::Duration::ZERO);
    let template = context! {
        entries => drawn?,
        papers => papers(entries),
        figures => Value::from(Serde(&result.figures)),
        notes => &result.notes,
        runs => runs,
        machine => provenance.machine.to_string(),
        commit => provenance.commit,
        date => provenance.date,
        compared_with => former.map(|former| former.commit.clone()),
    };
    let failed = LabError::io_other("cannot render the report's page");
    environment.render_named_str("page.html", TEMPLATE, template).map_err(failed)
}

/// Names of the papers, in the order of their entries.
fn papers(entries: &[Entry<'_>]) -> Vec<String> {
    let mut papers: Vec<String> = entries.iter().map(|entry| entry.plan.paper.clone()).collect();
    papers.dedup();
    papers
}

/// Comparisons of a result with the kernel: figure, value, the kernel's best way, all its ways.
fn comparisons(result: &serde_json::Value) -> Vec<serde_json::Value> {
    let all = result["comparisons"].as_array().into_iter().flatten();
    let shown = |one: &serde_json::Value| {
        let figure = one["figure"].as_str()?;
        let rows = one["kernel_rows"].as_object()?;
        let ways = rows.iter().map(|(way, rate)| {
            format!("{way} {}", tidegate_load::format_number(rate.as_f64().unwrap_or_default()))
        });
        let value = result["figures"][figure].as_f64().map(tidegate_load::format_number);
        let ways = ways.collect::<Vec<String>>().join(", ");
        Some(json!({"figure": figure, "value": value, "best": one["kernel_best"], "ways": ways}))
    };
    all.filter_map(shown).collect()
}

/// JSON text as an address that a browser saves as a file.
fn data_uri(json: &str) -> String {
    format!("data:application/json;charset=utf-8,{}", utf8_percent_encode(json, NON_ALPHANUMERIC))
}

fn draw(entry: &Entry<'_>, former: Option<&FormerReport>) -> Result<Value, LabError> {
    let is_shown = entry.state == State::Reproduced;
    let mut charts = vec![chart(entry, "published", &[("", &entry.published)])?];
    if is_shown {
        let here = [("kernel: ", &entry.kernel), ("Tidegate: ", &entry.tidegate)];
        charts.push(chart(entry, "here", &here)?);
        charts.push(chart(entry, "simulated", &[("", &entry.simulated)])?);
    }
    let texts = entry.published.iter().filter(|point| point.text.is_some());
    let texts: Vec<_> = texts
        .map(|point| json!({"series": point.series, "x": name_of(&point.x), "text": point.text}))
        .collect();
    let mut drawn = entry.to_json();
    let json = drawn.to_string();
    drawn["ratio"] = json!(entry.ratio.map(|ratio| format!("{:.2}", ratio.median)));
    let spread = |ratio: Ratio| format!("{:.2} to {:.2}", ratio.lowest, ratio.highest);
    drawn["spread"] = json!(entry.ratio.map(spread));
    let change = former.and_then(|former| former.change(entry));
    drawn["change"] = json!(change.map(|change| format!("{change:.2}")));
    drawn["is_slower"] = json!(former.is_some_and(|former| former.is_slower(entry)));
    drawn["charts"] = json!(charts.into_iter().flatten().collect::<Vec<String>>());
    drawn["texts"] = json!(texts);
    drawn["commands"] = json!(entry.commands);
    drawn["commits"] = json!(entry.commits);
    drawn["json"] = json!(json);
    drawn["numbers"] = json!(if is_shown { numbers(entry) } else { Vec::new() });
    Ok(Value::from(Serde(drawn)))
}

fn name_of(place: &PointPlace) -> String {
    match place {
        PointPlace::Number(number) => tidegate_load::format_number(*number),
        PointPlace::Name(name) => name.clone(),
    }
}

/// Rows of the table of numbers: side, series, place, value.
fn numbers(entry: &Entry<'_>) -> Vec<[String; 4]> {
    let sides = [
        ("paper", &entry.published),
        ("kernel", &entry.kernel),
        ("Tidegate", &entry.tidegate),
        ("simulator", &entry.simulated),
    ];
    let row = |side: &str, point: &Point| {
        let value = point
            .y
            .map_or_else(|| point.text.clone().unwrap_or_default(), tidegate_load::format_number);
        [side.to_owned(), point.series.clone(), name_of(&point.x), value]
    };
    sides
        .iter()
        .flat_map(|(side, points)| points.iter().map(move |point| row(side, point)))
        .collect()
}

/// A chart of one side, if it has numbers.
fn chart(
    entry: &Entry<'_>,
    title: &str,
    sides: &[(&str, &Vec<Point>)],
) -> Result<Option<String>, LabError> {
    let plan = entry.plan;
    let points = || sides.iter().flat_map(|(side, points)| points.iter().map(move |p| (side, p)));
    let mut names: Vec<String> = Vec::new();
    let numbers = || points().filter(|(_, point)| point.y.is_some());
    let is_named = numbers().any(|(_, point)| matches!(point.x, PointPlace::Name(_)));
    for (_, point) in numbers() {
        let name = name_of(&point.x);
        if is_named && !names.contains(&name) {
            names.push(name);
        }
    }
    let mut series: Vec<Series> = Vec::new();
    for (side, point) in numbers() {
        let Some(y) = point.y else { continue };
        let x = match &point.x {
            PointPlace::Number(number) if !is_named => *number,
            place => names.iter().position(|name| *name == name_of(place)).unwrap_or(0) as f64,
        };
        let name = format!("{side}{}", point.series);
        let at = series.iter().position(|one| one.name == name).unwrap_or_else(|| {
            series.push(Series::new(name, []));
            series.len() - 1
        });
        series[at].points.push((x, y));
        series[at].spreads.push((point.low.unwrap_or(y), point.high.unwrap_or(y)));
    }
    if series.is_empty() {
        return Ok(None);
    }
    for one in &mut series {
        one.stroke = if is_named { Stroke::Marks } else { Stroke::Solid };
    }
    let scale = |is_log: bool| if is_log { Scale::Log } else { Scale::Linear };
    let axis = |label: &str, is_log| Axis {
        label: label.to_owned(),
        scale: scale(is_log),
        ..Axis::default()
    };
    let x = Axis { names, ..axis(&plan.x, plan.log_x && !is_named) };
    let y = axis(&plan.y, plan.log_y);
    let panel = Panel { title: String::new(), x, y, series, spans: Vec::new() };
    let title = format!("{}, {title}", plan.source);
    let picture = Picture { title, panels: vec![panel] };
    picture.to_svg_of_width(CHART_WIDTH).map(Some)
}
