//! Charts of experiments: panels with axes and series, written as SVG.

mod svg;

use std::path::Path;

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
    /// Names of the places 0, 1, 2 and so on of a horizontal axis; empty for numbers.
    pub names: Vec<String>,
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
    /// Marks without a line: values at places that have names.
    Marks,
}

/// A named sequence of points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend. The same name has the same colour in all panels.
    pub name: String,
    /// The points, in drawing order. A point that is not finite interrupts the line.
    pub points: Vec<(f64, f64)>,
    /// Lowest and highest value of each point; empty without spread.
    pub spreads: Vec<(f64, f64)>,
    /// Line style.
    pub stroke: Stroke,
}

impl Series {
    /// A measured series.
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: points.into_iter().collect(), ..Self::default() }
    }

    /// A range of the horizontal axis at a given height.
    pub fn bar(name: impl Into<String>, range: (f64, f64), height: f64) -> Self {
        let points = vec![(range.0, height), (range.1, height)];
        Self { name: name.into(), points, stroke: Stroke::Bar, ..Self::default() }
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

impl Picture {
    /// A picture with one panel.
    pub fn from_panel(mut panel: Panel) -> Self {
        Self { title: std::mem::take(&mut panel.title), panels: vec![panel] }
    }

    /// Writes the picture to a file, as SVG.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), LabError> {
        std::fs::write(path, self.to_svg()?).map_err(LabError::file(path))
    }

    /// The picture as an SVG document.
    ///
    /// # Errors
    /// When a value cannot be drawn.
    pub fn to_svg(&self) -> Result<String, LabError> {
        self.to_svg_of_width(svg::default_width(self))
    }

    /// The picture as an SVG document with panels of this width in pixels.
    ///
    /// # Errors
    /// When a value cannot be drawn.
    pub fn to_svg_of_width(&self, panel_width: u32) -> Result<String, LabError> {
        svg::draw(self, panel_width).map_err(LabError::io_other("cannot draw the picture"))
    }
}
