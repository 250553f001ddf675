//! Statistics of measurements.

use std::borrow::Borrow;

/// Median; of an even number of values, the mean of the two in the middle. 0 without values.
pub fn median<T: Borrow<f64>>(values: impl IntoIterator<Item = T>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().map(|value| *value.borrow()).collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Largest value less the smallest one, in percent of the median. 0 without values.
pub(crate) fn spread_percent(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    let greatest = values.iter().copied().fold(f64::MIN, f64::max);
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    let spread = (greatest - least) / median(&values) * 100.0;
    if values.is_empty() { 0.0 } else { round_to_hundredths(spread) }
}

/// Rounds to hundredths, for display.
pub(crate) fn round_to_hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Rounds to thousandths, for ratios.
pub(crate) fn round_to_thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].iter()), 2.5);
        assert_eq!(median([0.0; 0]), 0.0);
    }

    #[test]
    fn spread_is_relative_to_the_median() {
        assert_eq!(spread_percent([9.0, 10.0, 12.0]), 30.0);
        assert_eq!(spread_percent([7.0]), 0.0);
        assert_eq!(spread_percent([]), 0.0);
    }
}
