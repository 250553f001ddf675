//! Numbers for people.

/// Formats a number for people: without decimals when it is large or whole.
pub fn format_number(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 1000.0 {
        let digits = format!("{:.0}", value.abs());
        let grouped: Vec<&str> = digits
            .as_bytes()
            .rchunks(3)
            .rev()
            .filter_map(|chunk| std::str::from_utf8(chunk).ok())
            .collect();
        let sign = if value < 0.0 { "-" } else { "" };
        format!("{sign}{}", grouped.join(","))
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_digits_by_thousands() {
        assert_eq!(format_number(1_234_567.0), "1,234,567");
        assert_eq!(format_number(-1_234.4), "-1,234");
        assert_eq!(format_number(12.0), "12");
        assert_eq!(format_number(1.505), "1.50");
        assert_eq!(format_number(0.0), "0");
    }
}
