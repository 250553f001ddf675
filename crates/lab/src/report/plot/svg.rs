//! Drawing of pictures as SVG.
//!
//! The output is a pure function of the input: the same data give the same bytes. The SVG has no
//! script and no font file. Its colours can be told apart on light and dark pages, also by
//! colour-blind readers.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Axis, Panel, Picture, Scale, Series, Span, Stroke};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = DrawingAreaErrorKind<std::io::Error>;

/// Okabe and Ito's colours that contrast with both white and black, then three more.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x8c, 0x6d, 0x5a),
    RGBColor(0x7f, 0x7f, 0x7f),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0xbc, 0xbd, 0x22),
];
const PAGE: RGBColor = RGBColor(0xff, 0xff, 0xff);
const GRID: RGBColor = RGBColor(0xd0, 0xd7, 0xde);
const AXIS: RGBColor = RGBColor(0x57, 0x60, 0x6a);
const TEXT: RGBColor = RGBColor(0x24, 0x29, 0x2f);
const SPAN_OPACITY: f64 = 0.12;
/// Colours of a dark page in place of those above.
const DARK_STYLE: &str = "<style>@media (prefers-color-scheme:dark){\
    rect[fill=\"#FFFFFF\"]{fill:#0d1117}text{fill:#e6edf3}\
    [stroke=\"#D0D7DE\"]{stroke:#30363d}[stroke=\"#57606A\"]{stroke:#8b949e}}</style>";

const FONT: &str = "system-ui,-apple-system,'Segoe UI',Roboto,sans-serif";
/// Sizes of fonts: in SVG plotters writes them smaller by a factor of 1.24.
const TEXT_SIZE: u32 = 15;
const TITLE_SIZE: u32 = 16;
const HEADING_SIZE: u32 = 20;
const PANEL_WIDTH: u32 = 460;
/// A single panel is wider.
const SINGLE_PANEL_WIDTH: u32 = 736;
const PANEL_HEIGHT: u32 = 300;
const HEADING_HEIGHT: u32 = 36;
/// Height of the numbers and the caption below a panel.
const PLACES_HEIGHT: u32 = 42;
/// Maximum width of a character at a place of the horizontal axis.
const PLACE_CHARACTER_WIDTH: u32 = 7;
const LEFT_MARGIN: i32 = 64;
const LEGEND_LINE_HEIGHT: i32 = 20;
/// Maximum width of a character in the legend.
const LEGEND_CHARACTER_WIDTH: f64 = 7.2;
/// Width of the line and the gaps around a name in the legend.
const LEGEND_KEY_WIDTH: f64 = 46.0;
const MARK_RADIUS: i32 = 3;
const BAR_WIDTH: u32 = 12;
/// Width of the ends of a spread.
const SPREAD_WIDTH: u32 = 6;

/// Width of a panel on a page that has room for the picture.
pub(super) fn default_width(picture: &Picture) -> u32 {
    if picture.panels.len() > 1 { PANEL_WIDTH } else { SINGLE_PANEL_WIDTH }
}

/// Draws a picture as an SVG document with panels of this width.
pub(super) fn draw(picture: &Picture, panel_width: u32) -> Result<String, DrawError> {
    let columns = if picture.panels.len() > 1 { 2 } else { 1 };
    let rows = picture.panels.len().div_ceil(columns);
    let width = panel_width * columns as u32;
    let legend = Legend::new(&picture.panels, width);
    let heights = picture.panels.iter().map(|panel| places_height(&panel.x, panel_width));
    let places_height = heights.max().unwrap_or(PLACES_HEIGHT);
    let panel_height = PANEL_HEIGHT - PLACES_HEIGHT + places_height;
    let legend_top = HEADING_HEIGHT + rows as u32 * panel_height;
    let mut svg = String::new();
    {
        let backend = SVGBackend::with_string(&mut svg, (width, legend_top + legend.height()));
        let page = backend.into_drawing_area();
        page.fill(&PAGE)?;
        let heading = text_style(HEADING_SIZE, HPos::Center);
        page.draw_text(&picture.title, &heading, (width as i32 / 2, 18))?;
        let (top, bottom) = page.split_vertically(legend_top);
        let (_, panels) = top.split_vertically(HEADING_HEIGHT);
        let areas = panels.split_evenly((rows.max(1), columns));
        for (panel, area) in picture.panels.iter().zip(&areas) {
            draw_panel(panel, &legend, places_height, area)?;
        }
        legend.draw(&bottom)?;
        page.present()?;
    }
    let head = svg.find('>').map_or(0, |end| end + 1);
    svg.insert_str(head, DARK_STYLE);
    Ok(svg)
}

fn text_style(size: u32, horizontal: HPos) -> TextStyle<'static> {
    let style = (FONT, size).into_font().color(&TEXT);
    style.pos(Pos::new(horizontal, VPos::Center))
}

/// Names of all series, each once, with their positions: x in pixels, and a line.
struct Legend {
    entries: Vec<(String, Stroke, i32, i32)>,
}

impl Legend {
    fn new(panels: &[Panel], width: u32) -> Self {
        let mut entries: Vec<(String, Stroke, i32, i32)> = Vec::new();
        let (mut x, mut line) = (LEFT_MARGIN, 0);
        for series in panels.iter().flat_map(|panel| &panel.series) {
            if entries.iter().any(|(name, ..)| *name == series.name) {
                continue;
            }
            let characters = series.name.chars().count() as f64;
            let needed = (LEGEND_KEY_WIDTH + characters * LEGEND_CHARACTER_WIDTH) as i32;
            if x + needed > width as i32 && x > LEFT_MARGIN {
                (x, line) = (LEFT_MARGIN, line + 1);
            }
            entries.push((series.name.clone(), series.stroke, x, line));
            x += needed;
        }
        Self { entries }
    }

    fn height(&self) -> u32 {
        let lines = self.entries.last().map_or(0, |(.., line)| line + 1);
        (lines * LEGEND_LINE_HEIGHT + 20) as u32
    }

    fn colour(&self, name: &str) -> RGBColor {
        let at = self.entries.iter().position(|(entry, ..)| entry == name).unwrap_or(0);
        COLOURS[at % COLOURS.len()]
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), DrawError> {
        for (name, stroke, x, line) in &self.entries {
            let (y, colour) = (line * LEGEND_LINE_HEIGHT + 16, self.colour(name));
            let key = [(*x, y), (x + 24, y)];
            match stroke {
                Stroke::Dashed => {
                    for part in [*x, x + 10, x + 20] {
                        let dash = vec![(part, y), (part + 6, y)];
                        area.draw(&PathElement::new(dash, line_style(colour, *stroke)))?;
                    }
                }
                Stroke::Marks => {}
                _ => area.draw(&PathElement::new(key, line_style(colour, *stroke)))?,
            }
            if matches!(stroke, Stroke::Solid | Stroke::Marks) {
                area.draw(&Circle::new((x + 12, y), MARK_RADIUS, colour.filled()))?;
            }
            area.draw_text(name, &text_style(TEXT_SIZE, HPos::Left), (x + 30, y))?;
        }
        Ok(())
    }
}

fn line_style(colour: RGBColor, stroke: Stroke) -> ShapeStyle {
    colour.stroke_width(if stroke == Stroke::Bar { BAR_WIDTH } else { 2 })
}

/// True for a value that the axis can show.
fn is_usable(axis: &Axis, value: f64) -> bool {
    value.is_finite() && (axis.scale == Scale::Linear || value > 0.0)
}

/// Ends of an axis: zero or below and a little more than the largest value, or the powers of ten
/// around the values.
fn range_of(axis: &Axis, values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values
        .filter(|value| is_usable(axis, *value))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
    if !axis.names.is_empty() {
        return -0.5..axis.names.len() as f64 - 0.5;
    }
    let max = axis.max.filter(|max| is_usable(axis, *max));
    match axis.scale {
        Scale::Linear => {
            let low = low.min(0.0);
            let high = max.unwrap_or(high + (high - low) * 0.05);
            low..if high > low { high } else { low + 1.0 }
        }
        Scale::Log => {
            let (first, last) = (low.log10().floor(), max.unwrap_or(high).log10().ceil());
            10f64.powf(first)..10f64.powf(if last > first { last } else { first + 1.0 })
        }
    }
}

/// Height of the places of an axis and its caption: names too long to stand side by side are
/// written from top to bottom.
fn places_height(axis: &Axis, panel_width: u32) -> u32 {
    let width = |name: &String| PLACE_CHARACTER_WIDTH * name.chars().count() as u32;
    let place_width = (panel_width - LEFT_MARGIN as u32) / axis.names.len().max(1) as u32;
    let longest = axis.names.iter().map(width).max().unwrap_or(0);
    if longest < place_width { PLACES_HEIGHT } else { PLACES_HEIGHT + longest }
}

fn draw_panel(
    panel: &Panel,
    legend: &Legend,
    places_height: u32,
    area: &Area<'_>,
) -> Result<(), DrawError> {
    let points = || panel.series.iter().flat_map(|series| series.points.iter().copied());
    let spreads = || panel.series.iter().flat_map(|series| series.spreads.iter().copied());
    let x = range_of(&panel.x, points().map(|(x, _)| x));
    let ends = spreads().flat_map(|(low, high)| [low, high]);
    let y = range_of(&panel.y, points().map(|(_, y)| y).chain(ends));
    let ranges = (x.clone(), y.clone());
    let mut chart = ChartBuilder::on(area);
    chart.margin_left(6).margin_right(16).margin_top(6);
    chart.x_label_area_size(places_height).y_label_area_size(LEFT_MARGIN - 6);
    if !panel.title.is_empty() {
        chart.caption(&panel.title, text_style(TITLE_SIZE, HPos::Center));
    }
    match (panel.x.scale, panel.y.scale) {
        (Scale::Linear, Scale::Linear) => {
            draw_chart(chart.build_cartesian_2d(x, y)?, panel, ranges, legend, places_height)
        }
        (Scale::Log, Scale::Linear) => draw_chart(
            chart.build_cartesian_2d(x.log_scale(), y)?,
            panel,
            ranges,
            legend,
            places_height,
        ),
        (Scale::Linear, Scale::Log) => draw_chart(
            chart.build_cartesian_2d(x, y.log_scale())?,
            panel,
            ranges,
            legend,
            places_height,
        ),
        (Scale::Log, Scale::Log) => {
            let chart = chart.build_cartesian_2d(x.log_scale(), y.log_scale())?;
            draw_chart(chart, panel, ranges, legend, places_height)
        }
    }
}

fn draw_chart<X, Y>(
    mut chart: ChartContext<'_, SVGBackend<'_>, Cartesian2d<X, Y>>,
    panel: &Panel,
    (x, y): (Range<f64>, Range<f64>),
    legend: &Legend,
    places_height: u32,
) -> Result<(), DrawError>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    for Span { range, label } in &panel.spans {
        let [from, to] = [range.0, range.1].map(|end| end.clamp(x.start, x.end));
        let style = AXIS.mix(SPAN_OPACITY).filled();
        chart.draw_series([Rectangle::new([(from, y.start), (to, y.end)], style)])?;
        let style = text_style(TEXT_SIZE, HPos::Center).pos(Pos::new(HPos::Center, VPos::Top));
        chart.draw_series([Text::new(label.clone(), ((from + to) / 2.0, y.end), style)])?;
    }
    let numbers = text_style(TEXT_SIZE, HPos::Center);
    let places = if places_height > PLACES_HEIGHT {
        numbers.transform(FontTransform::Rotate90).pos(Pos::new(HPos::Left, VPos::Center))
    } else {
        numbers.clone()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(if panel.x.names.is_empty() { 7 } else { 2 * panel.x.names.len() + 1 })
        .y_labels(7)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .y_label_style(numbers.clone())
        .x_label_style(places)
        .axis_desc_style(numbers)
        .x_label_formatter(&|value| place_text(&panel.x, *value))
        .y_label_formatter(&|value| tick_text(*value))
        .x_desc(panel.x.caption())
        .y_desc(panel.y.caption())
        .draw()?;
    for series in &panel.series {
        let colour = legend.colour(&series.name);
        for part in parts(panel, series) {
            // A value beyond a set end of the axis lies on its edge.
            let part: Vec<(f64, f64)> = part
                .iter()
                .map(|(px, py)| (px.clamp(x.start, x.end), py.clamp(y.start, y.end)))
                .collect();
            let style = line_style(colour, series.stroke);
            match series.stroke {
                Stroke::Dashed => {
                    chart.draw_series(DashedLineSeries::new(part, 6, 4, style))?;
                }
                Stroke::Bar => {
                    chart.draw_series(LineSeries::new(part, style))?;
                }
                Stroke::Solid | Stroke::Marks => {
                    if series.stroke == Stroke::Solid {
                        chart.draw_series(LineSeries::new(part.iter().copied(), style))?;
                    }
                    let marks =
                        part.iter().map(|at| Circle::new(*at, MARK_RADIUS, colour.filled()));
                    chart.draw_series(marks)?;
                }
            }
        }
        let spreads = series.points.iter().zip(&series.spreads);
        let visible = spreads.filter(|((px, py), (low, high))| {
            is_usable(&panel.x, *px) && [py, low, high].into_iter().all(|v| is_usable(&panel.y, *v))
        });
        let bars = visible.filter(|(_, (low, high))| low < high).map(|((px, py), (low, high))| {
            ErrorBar::new_vertical(*px, *low, *py, *high, colour.stroke_width(1), SPREAD_WIDTH)
        });
        chart.draw_series(bars)?;
    }
    Ok(())
}

/// Text at a place of a horizontal axis.
fn place_text(axis: &Axis, value: f64) -> String {
    if axis.names.is_empty() {
        return tick_text(value);
    }
    let place = value.round();
    let is_place = (value - place).abs() < 1e-6 && place >= 0.0;
    is_place.then(|| axis.names.get(place as usize).cloned()).flatten().unwrap_or_default()
}

/// The points of a series that the axes can show, cut where one cannot be shown.
fn parts<'s>(panel: &Panel, series: &'s Series) -> Vec<&'s [(f64, f64)]> {
    let is_shown = |(x, y): &(f64, f64)| is_usable(&panel.x, *x) && is_usable(&panel.y, *y);
    let parts = series.points.split(|point| !is_shown(point));
    parts.filter(|part| !part.is_empty()).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let linear = Panel {
            title: "work <0.5 us>".into(),
            x: Axis::new("offered load", "packets/s"),
            y: Axis::new("goodput", "packets/s"),
            series: vec![
                Series::new("kernel", [(1e5, 1e5), (4e5, 3.96e5), (8e5, 2e5), (1.1e6, 1.84e5)]),
                Series::new("polled & feedback", [(1e5, 1e5), (8e5, 8e5), (1.1e6, 8.4e5)]),
                Series::new("all that was offered", [(0.0, 0.0), (1.1e6, 1.1e6)]).dashed(),
            ],
            spans: vec![Span { range: (4e5, 6e5), label: "here".into() }],
        };
        let log = Panel {
            title: "in decades".into(),
            x: Axis::new("offered load", "").log(),
            y: Axis::new("share", "%").up_to(100.0),
            series: vec![
                Series::new("kernel", [(0.1, 100.0), (1.0, f64::NAN), (10.0, 12.5)]),
                Series::new("new", [(0.1, 20.0), (10.0, 40.0), (100.0, 90.0)]),
                Series::bar("busy", (1.0, 10.0), 50.0),
            ],
            spans: Vec::new(),
        };
        Picture { title: "Goodput against offered load".into(), panels: vec![linear, log] }
    }

    #[test]
    fn draws_all_texts_and_the_same_bytes_each_time() {
        let svg = picture().to_svg().unwrap();
        assert_eq!(svg, picture().to_svg().unwrap());
        for part in [
            "Goodput against offered load",
            "work &lt;0.5 us&gt;",
            "polled &amp; feedback",
            "goodput (packets/s)",
            "here",
            "200 k",
            "prefers-color-scheme:dark",
        ] {
            assert!(svg.contains(part), "{part:?} is not in {svg}");
        }
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        assert!(!svg.contains("script"), "{svg}");
        // For a look at the picture: TIDEGATE_SVG=FILE cargo test.
        if let Some(path) = std::env::var_os("TIDEGATE_SVG") {
            std::fs::write(path, svg).unwrap();
        }
    }

    #[test]
    fn series_name_has_one_colour_and_one_legend_entry() {
        let legend = Legend::new(&picture().panels, 900);
        assert_eq!(legend.entries.len(), 5);
        assert_ne!(legend.colour("kernel"), legend.colour("new"));
    }

    #[test]
    fn axes_end_at_round_powers_or_at_the_set_maximum() {
        let linear = Axis::new("a", "");
        assert_eq!(range_of(&linear, [0.0, 100.0].into_iter()), 0.0..105.0);
        assert_eq!(range_of(&linear.clone().up_to(100.0), [7.0].into_iter()), 0.0..100.0);
        assert_eq!(range_of(&linear, [0.0].into_iter()), 0.0..1.0);
        let log = linear.log();
        assert_eq!(range_of(&log, [0.0, 2.0, 40.0].into_iter()), 1.0..100.0);
        assert_eq!(range_of(&log, [10.0].into_iter()), 10.0..100.0);
        let texts = [0.0, -0.0, 0.25, 1500.0, 2e6, 3e9].map(tick_text);
        assert_eq!(texts, ["0", "0", "0.25", "1.5 k", "2 M", "3 G"]);
    }

    #[test]
    fn values_off_the_scale_interrupt_the_line() {
        let series = Series::new("s", [(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)]);
        let broken = Panel { series: vec![series], ..Panel::default() };
        let svg = Picture::from_panel(broken).to_svg().unwrap();
        assert_eq!(svg.matches("<circle").count(), 3 + 1, "three points and the legend");
        for values in [vec![], vec![(f64::INFINITY, -1.0)], vec![(0.0, 0.0)]] {
            for axis in [Axis::new("a", "b"), Axis::new("a", "b").log()] {
                let series = vec![Series::new("s", values.clone())];
                let panel = Panel { x: axis.clone(), y: axis, series, ..Panel::default() };
                let svg = Picture::from_panel(panel).to_svg().unwrap();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
        assert!(Picture::default().to_svg().is_ok());
    }
}
