//! Readings in the text formats of Prometheus and OpenMetrics.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, NoLabelSet, prometheus_text, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::table::{self, MetricKind, Readings, Value};

/// Format of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus text, version 0.0.4.
    Prometheus,
    /// OpenMetrics text, version 1.0.0.
    OpenMetrics,
}

impl Format {
    /// Format for a client with this header `Accept`.
    pub(super) fn accepted_by(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Writes the readings, a metric after the other in the order of the table.
pub(super) fn write(readings: Readings, format: Format) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(table::PREFIX);
    registry.register_collector(Box::new(readings));
    let mut text = String::new();
    match format {
        Format::Prometheus => prometheus_text::encode(&mut text, &registry)?,
        Format::OpenMetrics => text::encode(&mut text, &registry)?,
    }
    Ok(text)
}

impl Collector for Readings {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for metric in table::ALL {
            if self.of(metric).next().is_none() {
                continue;
            }
            let kind = match metric.kind {
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Histogram => MetricType::Histogram,
            };
            let mut family = encoder.encode_descriptor(metric.stem, metric.help, None, kind)?;
            for reading in self.of(metric) {
                let labels: Vec<(&str, &str)> = metric
                    .labels
                    .iter()
                    .zip(&reading.labels)
                    .map(|(&name, value)| (name, value.as_str()))
                    .collect();
                let mut one = family.encode_family(&labels)?;
                match (metric.kind, &reading.value) {
                    (MetricKind::Counter, &Value::Integer(value)) => {
                        ConstCounter::new(value).encode(one)?;
                    }
                    (MetricKind::Counter, &Value::Real(value)) => {
                        ConstCounter::new(value).encode(one)?;
                    }
                    (_, &Value::Integer(value)) => ConstGauge::new(value).encode(one)?,
                    (_, &Value::Real(value)) => ConstGauge::new(value).encode(one)?,
                    (_, Value::Buckets(sum, buckets)) => {
                        let count = buckets.iter().map(|bucket| bucket.1).sum();
                        one.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readings() -> Readings {
        let mut readings = Readings::default();
        readings.add(&table::CORES_USED, [], 2_usize);
        readings.add(&table::RX_PACKETS, ["eth0", "0"], 7_u64);
        readings.add(&table::RX_PACKETS, ["eth0", "1"], u64::MAX);
        readings.add(&table::CORE_BUSY, ["0"], 0.25);
        readings
    }

    #[test]
    fn readings_are_written_by_metric() {
        let text = write(readings(), Format::Prometheus).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("# HELP tidegate_rx_packets_total "), "{text}");
        assert_eq!(lines[1], "# TYPE tidegate_rx_packets_total counter");
        assert_eq!(lines[2], r#"tidegate_rx_packets_total{device="eth0",queue="0"} 7"#);
        assert!(lines[3].ends_with(" 18446744073709551615"), "{text}");
        assert!(text.contains("tidegate_core_busy_ratio{core=\"0\"} 0.25\n"), "{text}");
        assert!(text.contains("tidegate_cores_used 2\n"), "{text}");
    }

    #[test]
    fn labels_are_escaped() {
        let mut readings = Readings::default();
        readings.add(&table::APPLICATION_COMMANDS, ["a\"b\\c\nd", "1"], 1_u64);
        for format in [Format::Prometheus, Format::OpenMetrics] {
            let text = write(readings.clone(), format).unwrap();
            assert!(text.contains(r#"program="a\"b\\c\nd""#), "{text}");
        }
    }

    #[test]
    fn client_chooses_the_format() {
        let openmetrics = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3";
        assert_eq!(Format::accepted_by(openmetrics), Format::OpenMetrics);
        assert_eq!(Format::accepted_by("*/*"), Format::Prometheus);
        let text = write(readings(), Format::OpenMetrics).unwrap();
        assert!(text.contains("# TYPE tidegate_rx_packets counter\n"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
