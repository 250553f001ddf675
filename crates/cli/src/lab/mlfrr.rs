//! `tidegate lab mlfrr`.

use clap::Args;
use tidegate_lab::mlfrr;

use super::Output;
use crate::Failure;

/// Flags of `lab mlfrr`.
#[derive(Args)]
pub(crate) struct MlfrrLab {
    #[command(flatten)]
    output: Output,
    /// One short search each, for a first look
    #[arg(long)]
    quick: bool,
    /// The server: a command line that prints a line when it is ready, with {iface}, {own} or
    /// {kernel} (addresses), {core}, {port}, {counters} [default: `serve echo` as a sink, 500 ns
    /// of work]
    #[arg(long, value_name = "COMMAND")]
    target: Option<String>,
    /// What it is compared with [default: the same on kernel sockets]
    #[arg(long, value_name = "COMMAND")]
    baseline: Option<String>,
    /// The share of packets that a good trial may lose [default: 0]
    #[arg(long, value_name = "SHARE")]
    loss_ratio: Option<f64>,
    /// The share of the trials' time that may be bad [default: 0.5]
    #[arg(long, value_name = "SHARE")]
    exceed_ratio: Option<f64>,
    /// How long a trial lasts [default: 0.5]
    #[arg(long, value_name = "SECONDS")]
    trial: Option<f64>,
    /// How long all trials at a load last [default: 2.5]
    #[arg(long, value_name = "SECONDS")]
    duration_sum: Option<f64>,
    /// How close the bounds are at the end [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    width: Option<f64>,
    /// The largest load [default: what the generator can send]
    #[arg(long, value_name = "RATE")]
    max: Option<f64>,
    /// How often to search for both; the median of the ratios counts [default: 5]
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
