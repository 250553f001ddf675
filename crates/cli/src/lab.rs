//! `tidegate lab`: experiments that write their figures.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tidegate_lab::{Experiment, dns, echo_cost, livelock, mlfrr, papers, protect, soak, sweep};

use crate::Failure;

/// Experiments.
#[derive(Subcommand)]
pub(crate) enum Lab {
    /// DNS servers on one core, each at its best: Tidegate, the same server on
    /// kernel sockets, Knot DNS with and without XDP, NSD
    Dns(DnsLab),
    /// What it costs to echo a packet through port, stack and socket
    EchoCost(EchoCostLab),
    /// UDP at the maximum with faults injected: does memory grow, is every
    /// packet accounted for
    Soak(SoakLab),
    /// Goodput against offered load, up to the most that can be offered: a
    /// service on kernel sockets and on Tidegate in each mode, DNS servers
    Livelock(LivelockLab),
    /// Every mode of the gate, simulated: 0.1 to 10 times the capacity, 1 to
    /// 64 cores
    Sweep(SweepLab),
    /// The papers' own machines, simulated, beside their published numbers
    PapersLivelock(PapersLivelockLab),
    /// What a flood does to the rest of the machine: a steady flow out, ping,
    /// system time at eight levels, and how soon a server recovers
    Protect(ProtectLab),
    /// The maximum loss-free receive rate of a server, beside the kernel's
    Mlfrr(MlfrrLab),
}

/// Flags of `lab dns`.
#[derive(Args)]
pub(crate) struct DnsLab {
    #[command(flatten)]
    output: Output,
    /// Measure shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Which servers [default: all]
    #[arg(long, value_name = "SERVER", value_delimiter = ',')]
    servers: Vec<dns::servers::ServerKind>,
    /// Names in the zone
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    names: u64,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure each server at its best; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
    /// Do not compare every answer with NSD's
    #[arg(long)]
    no_verify: bool,
}

/// Flags of `lab echo-cost`.
#[derive(Args)]
pub(crate) struct EchoCostLab {
    #[command(flatten)]
    output: Output,
    /// How many packets to echo
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    packets: u64,
    /// Over IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Count instructions with valgrind's callgrind
    #[arg(long)]
    callgrind: bool,
}

/// Flags of `lab soak`.
#[derive(Args)]
pub(crate) struct SoakLab {
    #[command(flatten)]
    output: Output,
    /// How long
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// Over AF_XDP on a veth pair instead of a wire in memory; needs root
    #[arg(long)]
    xdp: bool,
    /// Over IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// How often each fault happens to a packet: loss, duplication, reordering
    /// and corruption alike
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.01)]
    faults: f64,
}

/// Flags of `lab livelock`.
#[derive(Args)]
pub(crate) struct LivelockLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// Work for each packet [default: 0,500,2000,10000]
    #[arg(long, value_name = "NANOSECONDS", value_delimiter = ',')]
    work_ns: Vec<u64>,
    /// What carries the service: kernel, or a mode of Tidegate [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    carriers: Vec<String>,
    /// Which DNS servers [default: tidegate-xdp,nsd,knot,knot-xdp]
    #[arg(long, value_name = "SERVER", value_delimiter = ',', conflicts_with = "no_dns")]
    dns: Vec<dns::servers::ServerKind>,
    /// No DNS servers
    #[arg(long)]
    no_dns: bool,
    /// Loads to offer besides the maximum, in packets per second
    #[arg(long, value_name = "RATE", value_delimiter = ',')]
    loads: Vec<f64>,
    /// How long to measure at each load
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

/// Flags of `lab protect`.
#[derive(Args)]
pub(crate) struct ProtectLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Measure everything once and shortly, for a first look
    #[arg(long)]
    quick: bool,
    /// What carries the flooded service: kernel, or a mode of Tidegate
    /// [default: kernel,moderated,napi,polled+feedback]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    carriers: Vec<String>,
    /// How long to measure at each level
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// A third of the time line
    #[arg(long, value_name = "SECONDS")]
    third: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

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

/// Where the picture goes, for experiments that draw one.
#[derive(Args)]
pub(crate) struct Drawing {
    /// Draw the result into this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Drawing {
    /// Draws the result when asked to.
    pub(crate) fn write(&self, result: &Experiment) -> Result<(), Failure> {
        if let (Some(path), Some(picture)) = (&self.svg, &result.picture) {
            picture.write(path)?;
        }
        Ok(())
    }
}

/// Flags of `lab sweep`.
#[derive(Args)]
pub(crate) struct SweepLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
    /// Fewer cores and loads, for a first look
    #[arg(long)]
    quick: bool,
    /// The numbers of cores [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    cores: Vec<u32>,
    /// What all chance comes from: the same seed gives the same bytes
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

/// Flags of `lab papers-livelock`.
#[derive(Args)]
pub(crate) struct PapersLivelockLab {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    drawing: Drawing,
}

/// Where a result goes.
#[derive(Args)]
pub(crate) struct Output {
    /// Write the result to this file as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Lab {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Lab::Dns(lab) => lab.run(),
            Lab::EchoCost(lab) => lab.run(),
            Lab::Soak(lab) => lab.run(),
            Lab::Livelock(lab) => lab.run(),
            Lab::Sweep(lab) => lab.run(),
            Lab::PapersLivelock(lab) => lab.run(),
            Lab::Protect(lab) => lab.run(),
            Lab::Mlfrr(lab) => lab.run(),
        }
    }
}

impl DnsLab {
    fn run(self) -> Result<(), Failure> {
        let mut config = dns::DnsConfig { names: self.names, ..dns::DnsConfig::default() };
        if self.quick {
            config = config.quick();
        }
        if !self.servers.is_empty() {
            config.servers = self.servers;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        config.verify = !self.no_verify;
        self.output.write(&dns::run(&config)?)
    }
}

impl EchoCostLab {
    fn run(self) -> Result<(), Failure> {
        let (packets, ipv6, callgrind) = (self.packets, self.ipv6, self.callgrind);
        let config = echo_cost::EchoCostConfig { packets, ipv6, callgrind };
        self.output.write(&echo_cost::run(&config)?)
    }
}

impl SoakLab {
    fn run(self) -> Result<(), Failure> {
        let config = soak::SoakConfig {
            seconds: self.seconds,
            link: if self.xdp { soak::SoakLink::Xdp } else { soak::SoakLink::Mem },
            ipv6: self.ipv6,
            loss: self.faults,
            duplication: self.faults,
            reordering: self.faults,
            corruption: self.faults,
            ..soak::SoakConfig::default()
        };
        let report = soak::run(&config, &mut |progress| eprintln!("{progress}"))?;
        self.output.write(&(&report).into())?;
        if report.unaccounted != 0 || report.frames_missing != 0 {
            return Err("packets or buffers were lost without a reason".into());
        }
        Ok(())
    }
}

impl LivelockLab {
    fn run(self) -> Result<(), Failure> {
        let mut config = livelock::LivelockConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.carriers = self.carriers;
        if !self.work_ns.is_empty() {
            config.work_ns = self.work_ns;
        }
        if self.no_dns || !self.dns.is_empty() {
            config.dns = self.dns;
        }
        if !self.loads.is_empty() {
            config.loads_pps = self.loads;
        }
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = livelock::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}

impl SweepLab {
    fn run(self) -> Result<(), Failure> {
        let mut config = sweep::SweepConfig { seed: self.seed, ..Default::default() };
        if self.quick {
            config = config.quick();
        }
        if !self.cores.is_empty() {
            config.cores = self.cores;
        }
        let result = sweep::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}

impl ProtectLab {
    fn run(self) -> Result<(), Failure> {
        let mut config = protect::ProtectConfig::default();
        if self.quick {
            config = config.quick();
        }
        config.carriers = self.carriers;
        config.seconds = self.seconds.unwrap_or(config.seconds);
        config.third_seconds = self.third.unwrap_or(config.third_seconds);
        config.repeats = self.repeats.unwrap_or(config.repeats);
        let result = protect::run(&config)?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}

impl MlfrrLab {
    fn run(self) -> Result<(), Failure> {
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

impl PapersLivelockLab {
    fn run(self) -> Result<(), Failure> {
        let result = papers::run()?;
        self.drawing.write(&result)?;
        self.output.write(&result)
    }
}

impl Output {
    /// Prints the result for people, and writes it as JSON when asked to.
    pub(crate) fn write(&self, result: &Experiment) -> Result<(), Failure> {
        let Some(path) = &self.json else {
            print!("{result}");
            return Ok(());
        };
        let text = serde_json::to_string_pretty(result)? + "\n";
        if path.as_os_str() == "-" {
            print!("{text}");
            return Ok(());
        }
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        print!("{result}");
        Ok(())
    }
}
