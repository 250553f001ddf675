//! iperf3: its client on kernel sockets, its server unmodified on the kernel and on Tidegate.

use serde_json::json;

use super::Direction;
use crate::error::LabError;
use crate::experiments::kernel_best::Goal;
use crate::experiments::packaged_program::ProgramResults;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::testbed::apps::{StackKind, packaged_pair};
use crate::testbed::flood::FloodTestbed;

/// Direction and number of streams.
#[derive(Clone, Copy)]
struct Case {
    direction: Direction,
    streams: usize,
}

/// Rows of iperf3.
pub(super) struct Iperf3 {
    testbed: FloodTestbed,
    cases: Vec<(Case, ProgramResults<f64>)>,
}

impl Iperf3 {
    /// Chooses the kernel's best way for each direction and number of streams.
    pub(super) fn choose_kernel(
        (server_core, load_core): (usize, usize),
        stream_counts: &[usize],
        seconds: f64,
    ) -> Result<Self, LabError> {
        let testbed = FloodTestbed::new(server_core, load_core)?;
        let directions = [Direction::In, Direction::Out];
        let steps = directions.len() * stream_counts.len();
        let steps = steps * ProgramResults::<f64>::first_pass_steps();
        let progress = Progress::of_part("first pass, iperf3", steps);
        let mut cases = Vec::new();
        for direction in directions {
            for &streams in stream_counts {
                let case = Case { direction, streams };
                let measure = |stack| case.measure(&testbed, stack, seconds, &progress);
                let results = ProgramResults::choose_kernel(Goal::Highest, |gbps| *gbps, measure)?;
                cases.push((case, results));
            }
        }
        Ok(Self { testbed, cases })
    }

    /// Number of measurements of a repetition.
    pub(super) fn steps(&self) -> usize {
        self.cases.iter().map(|(_, results)| results.rows().len()).sum()
    }

    /// Measures all rows once.
    pub(super) fn measure(&mut self, seconds: f64, progress: &Progress) -> Result<(), LabError> {
        for (case, results) in &mut self.cases {
            results.measure(|stack| case.measure(&self.testbed, stack, seconds, progress))?;
        }
        Ok(())
    }

    pub(super) fn report(&self, result: &mut Experiment) {
        for (case, results) in &self.cases {
            let streams = if case.streams == 1 { "" } else { &format!("_{}", case.streams) };
            let figure = format!("iperf3_{}_ratio{streams}", case.direction.name());
            results.compare(result, &figure);
            result.rows.extend(results.rows().iter().map(|row| {
                json!({
                    "server": format!("iperf3-{}", row.stack.name()),
                    "wire": "frames",
                    "client": "iperf3",
                    "way": case.direction.name(),
                    "streams": case.streams,
                    "gigabits_per_second": row.median(|gbps| *gbps),
                    "spread_percent": row.spread_percent(|gbps| *gbps),
                })
            }));
        }
        result.note(
            "iperf3: Debian's package, its client on kernel sockets on core 0, its server unmodified \
             on core 1: on the kernel's best way, embedded, and attached to a daemon on core 1, both on \
             AF_XDP, while the better one of Tidegate's other rows may be on AF_PACKET; \
             iperf3_*_ratio_embedded and _attached: over the kernel's best; spread: largest less \
             smallest value of all repetitions, in percent of the median",
        );
    }
}

impl Case {
    fn measure(
        self,
        testbed: &FloodTestbed,
        stack: StackKind,
        seconds: f64,
        progress: &Progress,
    ) -> Result<f64, LabError> {
        let Self { direction, streams } = self;
        let is_out = direction == Direction::Out;
        let gbps = packaged_pair::measure_bytes(testbed, stack, streams, is_out, seconds)?;
        progress.step(format_args!(
            "iperf3 {:<22} {streams:>3} x {:<3}: {gbps:.2} Gbit/s",
            stack.name(),
            direction.name(),
        ));
        Ok(gbps)
    }
}
