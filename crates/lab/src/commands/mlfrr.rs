//! `tidegate lab mlfrr`.

use clap::Args;
use tidegate_lab::experiments::jonack::mlfrr;

use super::Output;
use crate::Failure;

/// Flags of `lab mlfrr`.
#[derive(Args)]
pub(crate) struct MlfrrLab {
    #[command(flatten)]
    output: Output,
    /// One short search for each server, for a first look
    #[arg(long)]
    quick: bool,
    /// Server under test: a command line that prints a line when it is ready, with the variables
    /// {iface}, {own} or {kernel} (addresses), {core}, {port}, {counters} [default: `serve echo`
    /// as a sink, 500 ns of work per packet]
    #[arg(long, value_name = "COMMAND")]
    target: Option<String>,
    /// Command line of the baseline server [default: the same server on kernel sockets]
    #[arg(long, value_name = "COMMAND")]
    baseline: Option<String>,
    /// Maximum packet loss of a good trial, as a ratio from 0 to 1 [default: 0]
    #[arg(long, value_name = "SHARE")]
    loss_ratio: Option<f64>,
    /// Maximum share of trial time at a load that may be bad, from 0 to 1 [default: 0.5]
    #[arg(long, value_name = "SHARE")]
    exceed_ratio: Option<f64>,
    /// Duration of a trial, in seconds [default: 0.5]
    #[arg(long, value_name = "SECONDS")]
    trial: Option<f64>,
    /// Total duration of the trials at a load, in seconds [default: 2.5]
    #[arg(long, value_name = "SECONDS")]
    duration_sum: Option<f64>,
    /// Final distance of the bounds, relative to the upper bound [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    width: Option<f64>,
    /// Maximum load, in packets per second [default: what the generator can send]
    #[arg(long, value_name = "RATE")]
    max: Option<f64>,
    /// Number of searches for each server; the median of the ratios is reported [default: 5]
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl MlfrrLab {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut config = mlfrr::MlfrrConfig::default();
        if self.quick {
            config = config.quick();
        }
        let goal = &mut config.goal;
        goal.loss_ratio = self.loss_ratio.unwrap_or(goal.loss_ratio);
        goal.exceed_ratio = self.exceed_ratio.unwrap_or(goal.exceed_ratio);
        goal.trial_s = self.trial.unwrap_or(goal.trial_s);
        goal.duration_sum_s = self.duration_sum.unwrap_or(goal.duration_sum_s);
        goal.width = self.width.unwrap_or(goal.width);
        config.target = self.target.unwrap_or(config.target);
        config.baseline = self.baseline.unwrap_or(config.baseline);
        config.max_pps = self.max;
        config.repeats = self.repeats.unwrap_or(config.repeats);
        self.output.write(&mlfrr::run(&config)?)
    }
}
