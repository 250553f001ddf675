//! Line charts as SVG, for the pictures of the experiments.
//!
//! The output is a pure function of the input: the same data give the same bytes. The SVG has no
//! script and no font file. Its colours can be told apart on light and dark pages, also by
//! colour-blind readers.

use std::fmt::Write as _;

use crate::error::LabError;

/// Scale of an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Proportional, from zero or below.
    #[default]
    Linear,
    /// Logarithmic. Values that are not above zero are left out.
    Log,
}

/// One axis of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// Quantity on the axis.
    pub label: String,
    /// Unit, such as `packets/s`; empty without a unit.
    pub unit: String,
    /// Scale of the axis.
    pub scale: Scale,
    /// Largest value to show; `None` takes it from the data.
    pub max: Option<f64>,
}

impl Axis {
    /// A linear axis with its range from the data.
    pub fn new(label: impl Into<String>, unit: impl Into<String>) -> Self {
        Self { label: label.into(), unit: unit.into(), ..Self::default() }
    }

    /// The same axis with a logarithmic scale.
    #[must_use]
    pub fn log(self) -> Self {
        Self { scale: Scale::Log, ..self }
    }

    /// The same axis with the end `max`, independent of the data.
    #[must_use]
    pub fn up_to(self, max: f64) -> Self {
        Self { max: Some(max), ..self }
    }

    fn caption(&self) -> String {
        if self.unit.is_empty() {
            return self.label.clone();
        }
        format!("{} ({})", self.label, self.unit)
    }
}

/// Line style of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stroke {
    /// A line with a mark at each point: measured values.
    #[default]
    Solid,
    /// A dashed line without marks: a reference, or published values.
    Dashed,
    /// A broad line without marks: a period of time.
    Bar,
}

/// A named sequence of points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend. The same name has the same colour in all panels.
    pub name: String,
    /// The points, in drawing order. A point that is not finite interrupts the line.
    pub points: Vec<(f64, f64)>,
    /// Line style.
    pub stroke: Stroke,
}

impl Series {
    /// A measured series.
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: points.into_iter().collect(), stroke: Stroke::Solid }
    }

    /// A range of the horizontal axis at a given height.
    pub fn bar(name: impl Into<String>, range: (f64, f64), height: f64) -> Self {
        let points = vec![(range.0, height), (range.1, height)];
        Self { name: name.into(), points, stroke: Stroke::Bar }
    }

    /// The same series as a dashed line.
    #[must_use]
    pub fn dashed(self) -> Self {
        Self { stroke: Stroke::Dashed, ..self }
    }
}

/// A shaded range of the horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Start and end of the range.
    pub range: (f64, f64),
    /// Label of the range.
    pub label: String,
}

/// One coordinate system with its series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    /// The heading; may be empty.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
    /// Shaded ranges.
    pub spans: Vec<Span>,
}

/// A picture: panels side by side under one heading, with one legend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Picture {
    /// The heading.
    pub title: String,
    /// The panels, row by row.
    pub panels: Vec<Panel>,
}

/// Okabe and Ito's colours that contrast with both white and black, then three more.
const COLOURS: [&str; 10] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f7f7f",
    "#9467bd", "#bcbd22",
];
const PANEL_WIDTH: f64 = 460.0;
const PANEL_HEIGHT: f64 = 300.0;
/// Margins of a panel, for numbers and captions.
const MARGIN_LEFT: f64 = 64.0;
const MARGIN_RIGHT: f64 = 16.0;
const MARGIN_TOP: f64 = 30.0;
const MARGIN_BOTTOM: f64 = 48.0;
const HEADING_HEIGHT: f64 = 36.0;
const LEGEND_LINE_HEIGHT: f64 = 20.0;
/// Maximum width of a character in the legend.
const LEGEND_CHARACTER_WIDTH: f64 = 7.2;
/// Width of the line and the gaps around a name in the legend.
const LEGEND_KEY_WIDTH: f64 = 46.0;

const STYLE: &str = "\
.page{fill:#ffffff}\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px;fill:#24292f}\
.heading{font-size:16px;font-weight:600}\
.title{font-size:13px;font-weight:600}\
.grid{stroke:#d0d7de;stroke-width:1}\
.axis{stroke:#57606a;stroke-width:1}\
.span{fill:#57606a;fill-opacity:0.12}\
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}\
.dash{stroke-dasharray:6 4}\
@media (prefers-color-scheme:dark){\
.page{fill:#0d1117}text{fill:#e6edf3}.grid{stroke:#30363d}.axis{stroke:#8b949e}\
.span{fill:#8b949e;fill-opacity:0.2}}";

impl Picture {
    /// A picture with one panel.
    pub fn from_panel(panel: Panel) -> Self {
        let mut panel = panel;
        Self { title: std::mem::take(&mut panel.title), panels: vec![panel] }
    }

    /// Writes the picture to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &std::path::Path) -> Result<(), LabError> {
        std::fs::write(path, self.to_svg()).map_err(LabError::file(path))
    }

    /// The picture as an SVG document.
    pub fn to_svg(&self) -> String {
        let columns = if self.panels.len() > 1 { 2 } else { 1 };
        let rows = self.panels.len().div_ceil(columns).max(1);
        // A single panel is wider.
        let panel_width = if columns == 1 { 1.6 * PANEL_WIDTH } else { PANEL_WIDTH };
        let width = panel_width * columns as f64;
        let legend = Legend::new(&self.panels, width);
        let height = HEADING_HEIGHT + rows as f64 * PANEL_HEIGHT + legend.height();
        let mut svg = String::new();
        let _ = write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{width}\" \
             height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n<title>{}</title>\n\
             <style>{STYLE}</style>\n\
             <rect class=\"page\" width=\"{width}\" height=\"{height}\"/>\n",
            escape(&self.title)
        );
        text(&mut svg, "heading", (width / 2.0, 24.0), "middle", &self.title);
        for (at, panel) in self.panels.iter().enumerate() {
            let left = (at % columns) as f64 * panel_width;
            let top = HEADING_HEIGHT + (at / columns) as f64 * PANEL_HEIGHT;
            PanelLayout::new(panel, left, top, panel_width).draw(panel, &legend, &mut svg);
        }
        legend.draw(HEADING_HEIGHT + rows as f64 * PANEL_HEIGHT, &mut svg);
        svg.push_str("</svg>\n");
        svg
    }
}

/// Names of all series, each once, with their positions.
struct Legend {
    entries: Vec<(String, Stroke, f64, usize)>,
}

impl Legend {
    fn new(panels: &[Panel], width: f64) -> Self {
        let mut entries: Vec<(String, Stroke, f64, usize)> = Vec::new();
        let (mut x, mut line) = (MARGIN_LEFT, 0);
        for series in panels.iter().flat_map(|panel| &panel.series) {
            if entries.iter().any(|(name, ..)| *name == series.name) {
                continue;
            }
            let characters = series.name.chars().count() as f64;
            let needed = LEGEND_KEY_WIDTH + characters * LEGEND_CHARACTER_WIDTH;
            if x + needed > width && x > MARGIN_LEFT {
                (x, line) = (MARGIN_LEFT, line + 1);
            }
            entries.push((series.name.clone(), series.stroke, x, line));
            x += needed;
        }
        Self { entries }
    }

    fn height(&self) -> f64 {
        self.entries.last().map_or(8.0, |last| (last.3 + 1) as f64 * LEGEND_LINE_HEIGHT + 12.0)
    }

    fn colour(&self, name: &str) -> &'static str {
        let at = self.entries.iter().position(|(entry, ..)| entry == name).unwrap_or(0);
        COLOURS[at % COLOURS.len()]
    }

    fn draw(&self, top: f64, svg: &mut String) {
        for (name, stroke, x, line) in &self.entries {
            let y = top + *line as f64 * LEGEND_LINE_HEIGHT + 8.0;
            let points = [(*x, y), (x + 24.0, y)];
            polyline(svg, &points, self.colour(name), *stroke);
            if *stroke == Stroke::Solid {
                mark(svg, (x + 12.0, y), self.colour(name));
            }
            text(svg, "", (x + 30.0, y + 4.0), "start", name);
        }
    }
}

/// Mapping of the values of an axis to the page.
struct AxisLayout {
    scale: Scale,
    low: f64,
    high: f64,
    /// Positions of `low` and `high`, in pixels.
    pixels: (f64, f64),
    ticks: Vec<f64>,
}

impl AxisLayout {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, pixels: (f64, f64)) -> Self {
        let usable =
            |value: &f64| value.is_finite() && (axis.scale == Scale::Linear || *value > 0.0);
        let (low, high) = values
            .filter(usable)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
        let high = axis.max.filter(usable).unwrap_or(high);
        let (low, high, ticks) = match axis.scale {
            Scale::Linear => linear_ticks(low.min(0.0), high, axis.max.is_some()),
            Scale::Log => log_ticks(low, high),
        };
        Self { scale: axis.scale, low, high, pixels, ticks }
    }

    /// Position of a value in pixels; `None` if the axis cannot show it.
    fn position(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        // Positions slightly outside are cut off by the panel's clip path.
        let share = if share.is_finite() { share.clamp(-0.5, 1.5) } else { return None };
        Some(self.pixels.0 + share * (self.pixels.1 - self.pixels.0))
    }
}

/// Start, end and ticks of a linear axis from zero or below to the largest value: about six steps
/// of 1, 2 or 5 times a power of ten. `exact` keeps the largest value as the end of the axis.
fn linear_ticks(low: f64, high: f64, exact: bool) -> (f64, f64, Vec<f64>) {
    let high = if high > low { high } else { low + 1.0 };
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = step.into_iter().find(|step| *step >= rough * 0.999).unwrap_or(10.0 * power);
    let first = (low / step).floor();
    let last = (high / step - 1e-9).ceil();
    let ticks: Vec<f64> =
        (0..=(last - first) as u32).map(|n| (first + f64::from(n)) * step).collect();
    if exact {
        let ticks = ticks.into_iter().filter(|tick| *tick <= high * (1.0 + 1e-9)).collect();
        return (first * step, high, ticks);
    }
    (first * step, last * step, ticks)
}

/// Start, end and ticks of a logarithmic axis: powers of ten around the values, with 2 and 5
/// between them if they are few.
fn log_ticks(low: f64, high: f64) -> (f64, f64, Vec<f64>) {
    let mut first = low.log10().floor() as i32;
    let mut last = high.log10().ceil() as i32;
    if first == last {
        (first, last) = (first - 1, last + 1);
    }
    let between: &[f64] = if last - first <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let mut ticks: Vec<f64> = (first..last)
        .flat_map(|power| between.iter().map(move |factor| factor * 10f64.powi(power)))
        .collect();
    ticks.push(10f64.powi(last));
    (10f64.powi(first), 10f64.powi(last), ticks)
}

/// Formats a number for an axis: short, with a suffix from thousands on.
fn tick_text(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, " G"),
        v if v >= 1e6 => (value / 1e6, " M"),
        v if v >= 1e3 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    // Enough digits for a step of 1, 2 or 5 times a power of ten.
    let text = format!("{scaled:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let text = if text.is_empty() || text == "-0" { "0" } else { text };
    format!("{text}{suffix}")
}

/// Coordinate system of one panel on the page.
struct PanelLayout {
    x: AxisLayout,
    y: AxisLayout,
}

impl PanelLayout {
    fn new(panel: &Panel, left: f64, top: f64, width: f64) -> Self {
        let points = || panel.series.iter().flat_map(|series| series.points.iter().copied());
        let page_x = (left + MARGIN_LEFT, left + width - MARGIN_RIGHT);
        let page_y = (top + PANEL_HEIGHT - MARGIN_BOTTOM, top + MARGIN_TOP);
        Self {
            x: AxisLayout::new(&panel.x, points().map(|(x, _)| x), page_x),
            y: AxisLayout::new(&panel.y, points().map(|(_, y)| y), page_y),
        }
    }

    fn draw(&self, panel: &Panel, legend: &Legend, svg: &mut String) {
        let ((left, right), (bottom, top)) = (self.x.pixels, self.y.pixels);
        text(svg, "title", ((left + right) / 2.0, top - 10.0), "middle", &panel.title);
        for span in &panel.spans {
            self.draw_span(span, svg);
        }
        for tick in &self.y.ticks {
            let Some(y) = self.y.position(*tick) else { continue };
            line(svg, "grid", (left, y), (right, y));
            text(svg, "", (left - 6.0, y + 4.0), "end", &tick_text(*tick));
        }
        for tick in &self.x.ticks {
            let Some(x) = self.x.position(*tick) else { continue };
            line(svg, "axis", (x, bottom), (x, bottom + 4.0));
            text(svg, "", (x, bottom + 18.0), "middle", &tick_text(*tick));
        }
        line(svg, "axis", (left, bottom), (right, bottom));
        line(svg, "axis", (left, bottom), (left, top));
        let middle = ((left + right) / 2.0, bottom + 36.0);
        text(svg, "", middle, "middle", &panel.x.caption());
        let (x, y) = (left - 50.0, (top + bottom) / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 {x:.1} {y:.1})\">{}</text>",
            escape(&panel.y.caption())
        );
        self.draw_series(panel, legend, svg);
    }

    fn draw_span(&self, span: &Span, svg: &mut String) {
        let (Some(from), Some(to)) = (self.x.position(span.range.0), self.x.position(span.range.1))
        else {
            return;
        };
        let (bottom, top) = self.y.pixels;
        let _ = writeln!(
            svg,
            "<rect class=\"span\" x=\"{from:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            (to - from).max(0.0),
            bottom - top
        );
        text(svg, "", ((from + to) / 2.0, top + 14.0), "middle", &span.label);
    }

    fn draw_series(&self, panel: &Panel, legend: &Legend, svg: &mut String) {
        let ((left, right), (bottom, top)) = (self.x.pixels, self.y.pixels);
        // The id contains the position, so that panels do not share one.
        let clip = format!("c{left:.0}-{top:.0}");
        let _ = writeln!(
            svg,
            "<clipPath id=\"{clip}\"><rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
             height=\"{:.1}\"/></clipPath>\n<g clip-path=\"url(#{clip})\">",
            left - 4.0,
            top - 4.0,
            right - left + 8.0,
            bottom - top + 8.0
        );
        for series in &panel.series {
            let colour = legend.colour(&series.name);
            let positions =
                series.points.iter().map(|(x, y)| self.x.position(*x).zip(self.y.position(*y)));
            let positions: Vec<Option<(f64, f64)>> = positions.collect();
            for segment in positions.split(Option::is_none) {
                let segment: Vec<(f64, f64)> = segment.iter().flatten().copied().collect();
                polyline(svg, &segment, colour, series.stroke);
            }
            if series.stroke == Stroke::Solid {
                positions.iter().flatten().for_each(|position| mark(svg, *position, colour));
            }
        }
        svg.push_str("</g>\n");
    }
}

fn text(svg: &mut String, class: &str, (x, y): (f64, f64), anchor: &str, content: &str) {
    if content.is_empty() {
        return;
    }
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(
        svg,
        "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(content)
    );
}

fn line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn polyline(svg: &mut String, points: &[(f64, f64)], colour: &str, stroke: Stroke) {
    if points.len() < 2 {
        return;
    }
    let dash = if stroke == Stroke::Dashed { " dash" } else { "" };
    let broad = match stroke {
        Stroke::Bar => " style=\"stroke-width:12;stroke-linecap:butt\"",
        _ => "",
    };
    let _ = write!(svg, "<polyline class=\"line{dash}\"{broad} stroke=\"{colour}\" points=\"");
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(svg, "{}{x:.1},{y:.1}", if at == 0 { "" } else { " " });
    }
    svg.push_str("\"/>\n");
}

fn mark(svg: &mut String, (x, y): (f64, f64), colour: &str) {
    let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{colour}\"/>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel() -> Panel {
        Panel {
            title: "work <0.5 us>".into(),
            x: Axis::new("offered load", "packets/s"),
            y: Axis::new("goodput", "packets/s"),
            series: vec![
                Series::new("kernel", [(1e5, 1e5), (4e5, 3.96e5), (8e5, 2e5), (1.1e6, 1.84e5)]),
                Series::new("polled & feedback", [(1e5, 1e5), (8e5, 8e5), (1.1e6, 8.4e5)]),
                Series::new("all that was offered", [(0.0, 0.0), (1.1e6, 1.1e6)]).dashed(),
            ],
            spans: vec![Span { range: (4e5, 6e5), label: "here".into() }],
        }
    }

    fn picture() -> Picture {
        let log = Panel {
            title: "in decades".into(),
            x: Axis::new("offered load", "").log(),
            y: Axis::new("share", "%").up_to(100.0),
            series: vec![
                Series::new("kernel", [(0.1, 100.0), (1.0, f64::NAN), (10.0, 12.5)]),
                Series::new("new", [(0.1, 20.0), (10.0, 40.0), (100.0, 90.0)]),
            ],
            spans: Vec::new(),
        };
        Picture { title: "Goodput against offered load".into(), panels: vec![panel(), log] }
    }

    /// `TIDEGATE_BLESS=1 cargo test` rewrites the golden file; check the picture afterwards.
    #[test]
    fn renders_the_golden_svg() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/plot.svg");
        let svg = picture().to_svg();
        if std::env::var_os("TIDEGATE_BLESS").is_some() {
            std::fs::write(path, &svg).unwrap();
        }
        assert_eq!(svg, std::fs::read_to_string(path).unwrap());
    }

    #[test]
    fn series_name_has_one_colour_and_one_legend_entry() {
        let svg = picture().to_svg();
        assert_eq!(svg.matches(">kernel</text>").count(), 1);
        let legend = Legend::new(&picture().panels, 900.0);
        assert_eq!(legend.entries.len(), 4);
        assert_ne!(legend.colour("kernel"), legend.colour("new"));
        assert!(!svg.contains("polled & feedback") && svg.contains("polled &amp; feedback"));
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(
            linear_ticks(0.0, 1.1e6, false),
            (0.0, 1.2e6, vec![0.0, 2e5, 4e5, 6e5, 8e5, 1e6, 1.2e6])
        );
        assert_eq!(linear_ticks(0.0, 100.0, true).2, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(linear_ticks(-3.0, 5.0, false).0, -4.0);
        assert_eq!(linear_ticks(0.0, 0.0, false).1, 1.0);
        assert_eq!(log_ticks(0.1, 100.0).2, [0.1, 1.0, 10.0, 100.0]);
        assert_eq!(log_ticks(2.0, 40.0).2, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let texts = [0.0, -0.0, 0.25, 1500.0, 2e6, 3e9].map(tick_text);
        assert_eq!(texts, ["0", "0", "0.25", "1.5 k", "2 M", "3 G"]);
    }

    #[test]
    fn values_off_the_scale_interrupt_the_line() {
        let broken = Panel {
            series: vec![Series::new("s", [(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)])],
            ..Panel::default()
        };
        let svg = Picture::from_panel(broken).to_svg();
        assert_eq!(svg.matches("<circle").count(), 3 + 1, "three points and the legend");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        for values in [vec![], vec![(f64::INFINITY, -1.0)], vec![(0.0, 0.0)]] {
            for axis in [Axis::new("a", "b"), Axis::new("a", "b").log()] {
                let series = vec![Series::new("s", values.clone())];
                let panel = Panel { x: axis.clone(), y: axis, series, ..Panel::default() };
                let svg = Picture::from_panel(panel).to_svg();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
        assert!(Picture::default().to_svg().ends_with("</svg>\n"));
    }
}
