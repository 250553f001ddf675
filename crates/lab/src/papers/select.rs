//! Points of rows, by expressions over each row.

use minijinja::value::Serde;
use minijinja::{Environment, Expression};
use serde::Serialize;
use serde_json::Value;

use super::plan::Query;
use super::runs::RunResults;
use crate::LabError;
use crate::published::PublishedTables;

/// A number of a series, or a text where there is no number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Point {
    pub(super) series: String,
    pub(super) x: PointPlace,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) y: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    /// Ends of the spread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) low: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) high: Option<f64>,
}

/// PointPlace on the horizontal axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum PointPlace {
    Number(f64),
    Name(String),
}

/// Points that a query finds; none if its run has no result.
pub(super) fn points(
    query: &Query,
    tables: &PublishedTables,
    results: &RunResults,
) -> Result<Vec<Point>, LabError> {
    let rows = match (&query.table, &query.run) {
        (Some(table), None) => tables.rows(table).map(<[Value]>::to_vec),
        (None, Some(run)) => results.rows(run),
        _ => None,
    };
    let Some(rows) = rows else { return Ok(Vec::new()) };
    let environment = Environment::new();
    let compiled = Compiled::new(query, &environment).map_err(|error| failed(query, &error))?;
    let mut points = Vec::new();
    for row in expand(rows, query.each.as_deref()) {
        points.extend(compiled.point(&row).map_err(|error| failed(query, &error))?);
    }
    Ok(points)
}

/// True if a query takes a row.
#[cfg(test)]
pub(super) fn takes(query: &Query, row: &Value) -> Result<bool, LabError> {
    let environment = Environment::new();
    let compiled = Compiled::new(query, &environment).map_err(|error| failed(query, &error))?;
    compiled.point(row).map(|point| point.is_some()).map_err(|error| failed(query, &error))
}

fn failed(query: &Query, error: &minijinja::Error) -> LabError {
    LabError::Config(format!("the report's plan: {query:?}: {error:#}"))
}

/// The rows, or the elements of a list in each row together with the row: the keys of an object, else
/// `index` and `element`.
fn expand(rows: Vec<Value>, each: Option<&str>) -> Vec<Value> {
    let Some(each) = each else { return rows };
    let elements = |row: Value| {
        let list = row[each].as_array().cloned().unwrap_or_default();
        list.into_iter().enumerate().map(move |(index, element)| {
            let mut whole = row.clone();
            match (whole.as_object_mut(), element) {
                (Some(whole), Value::Object(element)) => whole.extend(element),
                (_, element) => {
                    whole["index"] = Value::from(index);
                    whole["element"] = element;
                }
            }
            whole
        })
    };
    rows.into_iter().flat_map(elements).collect()
}

/// Expressions of a query.
struct Compiled<'e> {
    filter: Expression<'e, 'e>,
    series: Expression<'e, 'e>,
    x: Expression<'e, 'e>,
    y: Expression<'e, 'e>,
    low: Option<Expression<'e, 'e>>,
    high: Option<Expression<'e, 'e>>,
}

impl<'e> Compiled<'e> {
    fn new(query: &'e Query, environment: &'e Environment<'e>) -> Result<Self, minijinja::Error> {
        let compile = |text: &'e str| environment.compile_expression(text);
        Ok(Self {
            filter: compile(&query.filter)?,
            series: compile(&query.series)?,
            x: compile(&query.x)?,
            y: compile(&query.y)?,
            low: query.low.as_deref().map(compile).transpose()?,
            high: query.high.as_deref().map(compile).transpose()?,
        })
    }

    /// Point of a row that the filter takes and that has a value.
    fn point(&self, row: &Value) -> Result<Option<Point>, minijinja::Error> {
        let row = minijinja::Value::from(Serde(row));
        if !self.filter.eval(&row)?.is_true() {
            return Ok(None);
        }
        let number =
            |value: minijinja::Value| f64::try_from(value).ok().filter(|number| number.is_finite());
        let end = |expression: &Option<Expression<'_, '_>>| {
            expression
                .as_ref()
                .map(|end| end.eval(&row))
                .transpose()
                .map(|end| end.and_then(number))
        };
        let x = self.x.eval(&row)?;
        let x = match number(x.clone()) {
            Some(number) => PointPlace::Number(number),
            None => PointPlace::Name(x.to_string()),
        };
        let value = self.y.eval(&row)?;
        let text = value.as_str().map(str::to_owned);
        let y = if text.is_some() { None } else { number(value) };
        if y.is_none() && text.is_none() {
            return Ok(None);
        }
        let series = self.series.eval(&row)?.to_string();
        Ok(Some(Point { series, x, y, text, low: end(&self.low)?, high: end(&self.high)? }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn query(each: Option<&str>, filter: &str, y: &str) -> Query {
        Query {
            table: None,
            run: None,
            each: each.map(str::to_owned),
            filter: filter.to_owned(),
            series: "'line ' ~ line".to_owned(),
            x: "at".to_owned(),
            y: y.to_owned(),
            low: Some("y - 1".to_owned()),
            high: Some("nothing".to_owned()),
        }
    }

    fn points_of(query: &Query, rows: Vec<Value>) -> Vec<Point> {
        let environment = Environment::new();
        let compiled = Compiled::new(query, &environment).unwrap();
        let rows = expand(rows, query.each.as_deref());
        rows.iter().filter_map(|row| compiled.point(row).unwrap()).collect()
    }

    #[test]
    fn takes_rows_that_fit_and_the_elements_of_lists() {
        let rows = vec![
            json!({"line": "a", "steps": [{"at": 1, "y": 10}, {"at": 2, "y": 20}]}),
            json!({"line": "b", "steps": [{"at": "N1", "y": 30}]}),
            json!({"line": "c"}),
        ];
        let found = points_of(&query(Some("steps"), "line != 'x' and y > 10", "y / 2"), rows);
        let point = |series: &str, x, y| Point {
            series: series.to_owned(),
            x,
            y: Some(y),
            text: None,
            low: Some(2.0 * y - 1.0),
            high: None,
        };
        let expected = [
            point("line a", PointPlace::Number(2.0), 10.0),
            point("line b", PointPlace::Name("N1".to_owned()), 15.0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn elements_without_keys_have_a_number() {
        let rows =
            expand(vec![json!({"line": "a", "each_second": [5, null]})], Some("each_second"));
        assert_eq!((rows.len(), &rows[0]["element"], &rows[1]["index"]), (2, &json!(5), &json!(1)));
    }

    #[test]
    fn words_are_texts_and_missing_values_no_points() {
        let rows =
            vec![json!({"line": "a", "at": 1, "y": "near 0"}), json!({"line": "a", "at": 2})];
        let found = points_of(&query(None, "true", "y"), rows[1..].to_vec());
        assert_eq!(found, []);
        let mut words = query(None, "true", "y");
        words.low = None;
        let found = points_of(&words, rows);
        assert_eq!((found.len(), found[0].y), (1, None));
        assert_eq!(found[0].text.as_deref(), Some("near 0"));
    }
}
