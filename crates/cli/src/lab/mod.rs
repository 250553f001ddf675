//! `tidegate lab`: experiments that write their figures.

mod attach;
mod chaos;
mod dns;
mod dpdk;
mod echo_cost;
mod guard;
mod livelock;
mod locks;
mod mlfrr;
mod papers_livelock;
mod protect;
mod queues;
mod readers;
mod reads;
mod router;
mod share;
mod soak;
mod sweep;
mod tcp;
mod trace;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tidegate_lab::Experiment;

use crate::Failure;

/// Experiments.
#[derive(Subcommand)]
pub(crate) enum Lab {
    /// DNS servers on one core, each at its best: Tidegate, the same server on
    /// kernel sockets, Knot DNS with and without XDP, NSD
    Dns(dns::DnsLab),
    /// What it costs to echo a packet through port, stack and socket
    EchoCost(echo_cost::EchoCostLab),
    /// TCP echo over many connections, after Farias: requests per second
    #[command(name = "echo-1")]
    Echo1(tcp::TcpLab),
    /// TCP echo of growing messages, after Farias: gigabits per second
    #[command(name = "echo-2")]
    Echo2(tcp::TcpLab),
    /// TCP echo to few clients, after Farias: latency
    #[command(name = "echo-3")]
    Echo3(tcp::TcpLab),
    /// TCP bytes one way, into a server and out of one
    Bulk(tcp::TcpLab),
    /// What idle TCP connections cost: memory, and time of a request
    Connections(tcp::ConnectionsLab),
    /// Whether one can still connect while strangers send SYN segments
    SynFlood(tcp::TcpLab),
    /// Requests per second of unmodified programs, calm and under a flood: redis,
    /// memcached and nginx on the kernel, with Tidegate inside, and attached to the
    /// daemon
    Apps(tcp::TcpLab),
    /// Context switches and interrupts of redis at the same throughput: the kernel
    /// tuned by affinity, and a network core
    Asymmetric(tcp::TcpLab),
    /// UDP at the maximum with faults injected: does memory grow, is every
    /// packet accounted for
    Soak(soak::SoakLab),
    /// Goodput against offered load, up to the most that can be offered: a
    /// service on kernel sockets and on Tidegate in each mode, DNS servers
    Livelock(livelock::LivelockLab),
    /// Receive queues with several producers and several readers, after
    /// Rivera's thesis: which structure scales
    Queues(queues::QueuesLab),
    /// Requests per second of a service with several reader threads: on one
    /// kernel socket, with SO_REUSEPORT, on Tidegate
    Readers(readers::ReadersLab),
    /// How the locks of a receive queue are used, with and without memory
    /// accounting, after Rivera's thesis
    Locks(locks::LocksLab),
    /// Packets forwarded against packets offered, with and without a packet
    /// screen, in each shape and with each quota of Mogul and Ramakrishnan
    Router(router::RouterLab),
    /// What a program beside the router gets of the processor
    Share(share::ShareLab),
    /// What a flood does to the rest of the machine: a steady flow out, ping,
    /// system time at eight levels, and how soon a server recovers
    Protect(protect::ProtectLab),
    /// NSD under a flood of strangers, with `tidegate guard` in front of it and
    /// without: how much a known peer is answered
    Guard(guard::GuardLab),
    /// The maximum loss-free receive rate of a server, beside the kernel's
    Mlfrr(mlfrr::MlfrrLab),
    /// Concurrent reads of /dev/zero, a FIFO and a UDP socket, and null calls:
    /// Rivera's Tables 2.1 to 2.4 on this kernel
    Reads(reads::ReadsLab),
    /// What it costs to hand a message to another process: a ring in shared
    /// memory, a Unix socket, a pipe, the loopback
    Attach(attach::AttachLab),
    /// Tidegate on devices of DPDK's: frames sent back beside dpdk-testpmd, UDP echo, a flood,
    /// services over memif and as the host of a virtual machine
    Dpdk(dpdk::DpdkLab),
    /// Applications of the daemon that are killed in any state, bad ones, and the
    /// daemon killed: what the others lose, and whether all memory comes back
    Chaos(chaos::ChaosLab),
    /// Where a packet's time goes on receive, in the kernel and in Tidegate
    Trace(trace::TraceLab),
    /// Every mode of the gate, simulated: 0.1 to 10 times the capacity, 1 to
    /// 64 cores
    Sweep(sweep::SweepLab),
    /// The papers' own machines, simulated, beside their published numbers
    PapersLivelock(papers_livelock::PapersLivelockLab),
}

impl Lab {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Lab::Dns(lab) => lab.run(),
            Lab::EchoCost(lab) => lab.run(),
            Lab::Echo1(lab) => lab.run(tidegate_lab::tcp::echo::run_1),
            Lab::Echo2(lab) => lab.run(tidegate_lab::tcp::echo::run_2),
            Lab::Echo3(lab) => lab.run(tidegate_lab::tcp::echo::run_3),
            Lab::Bulk(lab) => lab.run(tidegate_lab::tcp::bulk::run),
            Lab::Connections(lab) => lab.run(),
            Lab::SynFlood(lab) => lab.run(tidegate_lab::tcp::syn_flood::run),
            Lab::Apps(lab) => lab.run(tidegate_lab::apps::speed::run),
            Lab::Asymmetric(lab) => lab.run(tidegate_lab::apps::asymmetric::run),
            Lab::Soak(lab) => lab.run(),
            Lab::Livelock(lab) => lab.run(),
            Lab::Queues(lab) => lab.run(),
            Lab::Readers(lab) => lab.run(),
            Lab::Locks(lab) => lab.run(),
            Lab::Router(lab) => lab.run(),
            Lab::Share(lab) => lab.run(),
            Lab::Protect(lab) => lab.run(),
            Lab::Guard(lab) => lab.run(),
            Lab::Mlfrr(lab) => lab.run(),
            Lab::Reads(lab) => lab.run(),
            Lab::Attach(lab) => lab.run(),
            Lab::Dpdk(lab) => lab.run(),
            Lab::Chaos(lab) => lab.run(),
            Lab::Trace(lab) => lab.run(),
            Lab::Sweep(lab) => lab.run(),
            Lab::PapersLivelock(lab) => lab.run(),
        }
    }
}

/// How long to measure, for experiments that measure a live machine.
#[derive(Args)]
pub(crate) struct Measure {
    /// Measure shortly and not as often, for a first look
    #[arg(long)]
    quick: bool,
    /// How long each measurement lasts
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// How often to measure everything; the median counts
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl Measure {
    /// The configuration asked for. `quick` makes one for a first look,
    /// `fields` names where its seconds and its repeats stand.
    fn config<C>(
        &self,
        config: C,
        quick: impl FnOnce(C) -> C,
        fields: impl FnOnce(&mut C) -> (&mut f64, &mut usize),
    ) -> C {
        let mut config = if self.quick { quick(config) } else { config };
        let (seconds, repeats) = fields(&mut config);
        *seconds = self.seconds.unwrap_or(*seconds);
        *repeats = self.repeats.unwrap_or(*repeats);
        config
    }
}

/// Where a result with a picture goes.
#[derive(Args)]
pub(crate) struct DrawnOutput {
    #[command(flatten)]
    output: Output,
    /// Draw the result into this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl DrawnOutput {
    /// Draws and prints the result, and writes it as JSON when asked to.
    fn write(&self, result: &Experiment) -> Result<(), Failure> {
        if let (Some(path), Some(picture)) = (&self.svg, &result.picture) {
            picture.write(path)?;
        }
        self.output.write(result)
    }
}

/// Where a result goes.
#[derive(Args)]
pub(crate) struct Output {
    /// Write the result to this file as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
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
