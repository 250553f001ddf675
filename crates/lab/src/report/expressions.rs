//! Filters and functions for expressions over results, in templates, in README.md and in the plan of
//! the report. Filters are functions too: an expression in README.md has no `|`, which would end a
//! cell of its table.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use tidegate_load::format_number;

/// Adds the filters and functions to an environment.
pub(crate) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("thousands", thousands);
    environment.add_filter("k", k);
    environment.add_filter("million", million);
    environment.add_filter("fixed", fixed);
    environment.add_filter("percent", percent);
    environment.add_function("thousands", thousands);
    environment.add_function("k", k);
    environment.add_function("million", million);
    environment.add_function("fixed", fixed);
    environment.add_function("percent", percent);
    environment.add_function("row", row);
    environment.add_function("rows", rows);
    environment.add_function("best", best);
    environment.add_function("kernel_best", kernel_best);
}

/// An integer with separators: 388,123.
fn thousands(value: f64) -> String {
    format_number(value.round())
}

/// A number in thousands: 388; below ten thousand with one digit: 4.9.
fn k(value: f64) -> String {
    short(value / 1e3)
}

/// A number in millions: 14; below ten million with one digit: 3.9.
fn million(value: f64) -> String {
    short(value / 1e6)
}

fn short(value: f64) -> String {
    if value.abs() < 9.95 && value != 0.0 { format!("{value:.1}") } else { thousands(value) }
}

/// A number with `digits` digits after the point: two without the argument.
fn fixed(value: f64, digits: Option<usize>) -> String {
    format!("{value:.*}", digits.unwrap_or(2))
}

/// A ratio in percent. Without `digits`, as many as the distance to 0 or to 100 % needs: 15 %,
/// 1.2 %, 99.98 %.
fn percent(ratio: f64, digits: Option<usize>) -> String {
    let value = ratio * 100.0;
    let distance = value.abs().min((100.0 - value).abs());
    let digits = digits.unwrap_or(match distance {
        ..0.005 | 10.0.. => 0,
        0.1.. => 1,
        _ => 2,
    });
    format!("{value:.digits$} %")
}

/// Rows of a result whose keys have the values of the arguments. The value of an argument may be
/// a list: any of its values fits.
fn rows(result: Value, wanted: Kwargs) -> Result<Vec<Value>, Error> {
    let keys: Vec<&str> = wanted.args().collect();
    let mut wanted_values = Vec::new();
    for key in keys {
        wanted_values.push((key, wanted.get::<Value>(key)?));
    }
    let mut found = Vec::new();
    for row in result.get_attr("rows")?.try_iter()? {
        let mut fits = true;
        for (key, wanted) in &wanted_values {
            let value = row.get_attr(key)?;
            fits &= match wanted.kind() {
                ValueKind::Seq => wanted.try_iter()?.any(|one| one == value),
                _ => *wanted == value,
            };
        }
        if fits {
            found.push(row);
        }
    }
    if found.is_empty() {
        let experiment = result.get_attr("experiment")?;
        let wanted = wanted_values.iter().map(|(key, value)| format!("{key}={value}"));
        let wanted: Vec<String> = wanted.collect();
        return Err(failed(format!("no row of {experiment} has {}", wanted.join(", "))));
    }
    Ok(found)
}

/// The only row of a result with these values.
fn row(result: Value, wanted: Kwargs) -> Result<Value, Error> {
    let mut found = rows(result.clone(), wanted)?;
    if found.len() > 1 {
        let experiment = result.get_attr("experiment")?;
        return Err(failed(format!("{} rows of {experiment} where one is due", found.len())));
    }
    Ok(found.swap_remove(0))
}

/// Largest value of a key among the rows with these values. A row without a value, of a measurement
/// that was cut off, does not count.
fn best(result: Value, key: &str, wanted: Kwargs) -> Result<f64, Error> {
    let mut best = f64::NEG_INFINITY;
    for row in rows(result, wanted)? {
        let value = row.get_attr(key)?;
        if value.is_none() {
            continue;
        }
        let value = f64::try_from(value)
            .map_err(|error| failed(format!("{key} of a row is no number")).with_source(error))?;
        best = best.max(value);
    }
    if best == f64::NEG_INFINITY {
        return Err(failed(format!("{key} has no value in these rows")));
    }
    Ok(best)
}

/// Figure of the kernel at its best, to which a ratio refers.
fn kernel_best(result: Value, figure: &str) -> Result<Value, Error> {
    for comparison in result.get_attr("comparisons")?.try_iter()? {
        if comparison.get_attr("figure")?.as_str() == Some(figure) {
            let rows = comparison.get_attr("kernel_rows")?;
            return rows.get_item(&comparison.get_attr("kernel_best")?);
        }
    }
    let experiment = result.get_attr("experiment")?;
    Err(failed(format!("{experiment} does not compare {figure} with the kernel")))
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_counts_rows_that_have_a_value() {
        let mut environment = Environment::new();
        add(&mut environment);
        let rows = [("a", Some(2.0)), ("a", None), ("a", Some(3.0)), ("b", None)];
        let rows = rows.map(|(name, rate)| minijinja::context!(name => name, rate => rate));
        let result =
            minijinja::context!(r => minijinja::context!(experiment => "e", rows => rows.to_vec()));
        let best = |text: &str| environment.compile_expression(text).unwrap().eval(&result);
        assert_eq!(f64::try_from(best("best(r, 'rate', name='a')").unwrap()).unwrap(), 3.0);
        assert!(best("best(r, 'rate', name='b')").is_err());
    }

    #[test]
    fn formats_numbers_for_readers() {
        assert_eq!(thousands(388_122.7), "388,123");
        assert_eq!((k(388_123.0), k(4_912.0), k(0.0)), ("388".into(), "4.9".into(), "0".into()));
        assert_eq!((million(3.94e6), million(1.4e7)), ("3.9".into(), "14".into()));
        assert_eq!(million(2.3e9), "2,300");
        assert_eq!((fixed(1.671, None), fixed(0.25, Some(1))), ("1.67".into(), "0.2".into()));
        let percents = [0.99999, 0.9998, 0.994, 0.53, 0.012, 0.0, 0.15];
        let texts = percents.map(|ratio| percent(ratio, None));
        assert_eq!(texts, ["100 %", "99.98 %", "99.4 %", "53 %", "1.2 %", "0 %", "15 %"]);
        assert_eq!(percent(0.5, Some(1)), "50.0 %");
    }
}
