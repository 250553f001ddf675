//! The monitors under test, and what they report when they end.

use std::process::Command;

use serde_json::Value;

use crate::error::LabError;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;

/// Memory of each monitor's ring.
const RING_MIB: u32 = 8;
/// Processor share of the limited monitor, in percent.
const CPU_SHARE: &str = "25";

/// A monitor, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Tidegate,
    /// With a limit on its processor share.
    TidegateShare,
    Tcpdump,
    /// A reader of the same ring that only counts.
    Plain,
    /// No monitor: what the receive work alone costs a program.
    None,
}

impl Reader {
    pub(super) const ALL: [Self; 5] =
        [Self::Tidegate, Self::TidegateShare, Self::Tcpdump, Self::Plain, Self::None];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::TidegateShare => "tidegate, share 25 %",
            Self::Tcpdump => "tcpdump",
            Self::Plain => "plain reader",
            Self::None => "none",
        }
    }

    pub(super) fn figure_name(self) -> &'static str {
        match self {
            Self::Tidegate => "monitor",
            Self::TidegateShare => "monitor_share_25",
            Self::Tcpdump => "tcpdump",
            Self::Plain => "plain_reader",
            Self::None => "none",
        }
    }

    /// True if the monitor is measured at each load, not only beside a program.
    pub(super) fn is_curve(self) -> bool {
        matches!(self, Self::Tidegate | Self::Tcpdump | Self::Plain)
    }

    pub(super) fn is_tidegate(self) -> bool {
        matches!(self, Self::Tidegate | Self::TidegateShare)
    }

    /// Command of the monitor, which prints a line when it is ready.
    fn command(self, testbed: &FloodTestbed) -> Result<Option<Command>, LabError> {
        let end = &testbed.pair.b;
        let on_core = |program| end.namespace.command_on_core(testbed.server_core, program);
        let ring = RING_MIB.to_string();
        let command = match self {
            Self::None => return Ok(None),
            Self::Tidegate | Self::TidegateShare => {
                let mut command = on_core(programs::tidegate()?);
                command.args(["monitor", "--iface", &end.device, "--ring-mib", &ring, "--json"]);
                if self == Self::TidegateShare {
                    command.args(["--cpu-share", CPU_SHARE]);
                }
                command
            }
            Self::Plain => {
                let mut command = on_core(programs::laboratory()?);
                command.args(["monitor", "--as-plain-reader", &end.device, "--ring-mib", &ring]);
                command
            }
            Self::Tcpdump => {
                let mut command = on_core("sh".into());
                let kib = (RING_MIB << 10).to_string();
                // tcpdump says on standard error that it listens, and what it has captured.
                let script = r#"exec tcpdump -n -i "$1" -s 96 -B "$2" -w /dev/null 2>&1"#;
                command.args(["-c", script, "sh", &end.device, &kib]);
                command
            }
        };
        Ok(Some(command))
    }
}

/// Packets by the report of a monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReaderReport {
    pub(super) counted: u64,
    /// All lost packets.
    pub(super) lost: u64,
    /// Packets that found the monitor's ring full.
    pub(super) ring_full: u64,
}

/// A running monitor, ended on drop.
pub(super) struct RunningReader {
    reader: Reader,
    process: Option<ServerProcess>,
}

impl RunningReader {
    /// Starts the monitor and waits until it is ready.
    pub(super) fn start(reader: Reader, testbed: &FloodTestbed) -> Result<Self, LabError> {
        let Some(mut command) = reader.command(testbed)? else {
            return Ok(Self { reader, process: None });
        };
        let mut process = ServerProcess::start(reader.name(), &mut command)?;
        let line = process.wait_for_first_line()?;
        if line.contains("not found") {
            return Err(LabError::Missing { program: "tcpdump".into(), package: "tcpdump" });
        }
        Ok(Self { reader, process: Some(process) })
    }

    /// Ends the monitor and reads its report.
    pub(super) fn stop(self) -> Result<ReaderReport, LabError> {
        let Some(process) = self.process else { return Ok(ReaderReport::default()) };
        let text = process.stop_with_output().unwrap_or_default();
        let report = match self.reader {
            Reader::Tcpdump => parse_tcpdump(&text),
            _ => parse_json(&text),
        };
        report.ok_or_else(|| {
            LabError::Config(format!("{} reports nothing: {text:?}", self.reader.name()))
        })
    }
}

/// Reads the last line of JSON, the final report.
fn parse_json(text: &str) -> Option<ReaderReport> {
    let report: Value = serde_json::from_str(text.lines().last()?).ok()?;
    let total = &report["total"];
    let sum = |counts: &Value| -> Option<u64> {
        counts.as_object()?.values().map(Value::as_u64).sum::<Option<u64>>()
    };
    Some(ReaderReport {
        counted: total["packets"].as_u64()? + sum(&total["malformed"])?,
        lost: sum(&total["lost"])?,
        ring_full: total["lost"]["ring_full"].as_u64()?,
    })
}

/// Reads the counts that tcpdump prints at its end.
fn parse_tcpdump(text: &str) -> Option<ReaderReport> {
    let count = |what: &str| {
        let line = text.lines().find(|line| line.ends_with(what))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let ring_full = count("dropped by kernel")?;
    Some(ReaderReport { counted: count("captured")?, lost: ring_full, ring_full })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_reports_of_the_monitors() {
        let text = "tcpdump: listening on x\n12 packets captured\n15 packets received by filter\n\
                    3 packets dropped by kernel\n";
        let expected = ReaderReport { counted: 12, lost: 3, ring_full: 3 };
        assert_eq!(parse_tcpdump(text), Some(expected));
        assert_eq!(parse_tcpdump("12 packets captured"), None);
        let line = r#"{"total": {"packets": 10, "malformed": {"a": 2}, "lost": {"ring_full": 1, "c": 2}}}"#;
        let expected = ReaderReport { ring_full: 1, ..expected };
        assert_eq!(parse_json(&format!("{{}}\n{line}\n")), Some(expected));
        assert_eq!(parse_json(""), None);
    }
}
