//! Commands: one for each experiment, and the demonstration.

mod attach_latency;
mod chaos;
mod concurrent_reads;
mod cores;
mod cpu_share;
pub(crate) mod demo;
mod dns;
mod dpdk;
mod echo_cost;
mod elastic;
mod fleet;
mod growth;
mod guard;
mod hostile;
mod kafka;
mod livelock;
mod lock_contention;
mod mlfrr;
mod monitor;
mod nfs;
mod observe;
mod papers_livelock;
mod profile;
mod protect;
mod reader_scaling;
mod receive_queues;
mod receive_trace;
pub(crate) mod report;
mod result_file;
mod ring;
mod router;
mod sessions;
mod soak;
pub(crate) mod summary;
mod sweep;
mod tcp;
mod web_server;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::{Args, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tidegate_lab::Experiment;
use tidegate_lab::report::Provenance;
use tidegate_lab::testbed::cleanup;

use crate::Failure;
use crate::output::print;

/// Experiments.
#[derive(Subcommand)]
pub(crate) enum Lab {
    /// DNS servers on one core, each in its best configuration: Tidegate, the same server on
    /// kernel sockets, Knot DNS with and without XDP, NSD
    Dns(dns::DnsLab),
    /// Cost of echoing a packet through device, stack and socket
    EchoCost(echo_cost::EchoCostLab),
    /// TCP echo over many connections, after Farias: requests per second
    #[command(alias = "echo-1")]
    EchoThroughput(tcp::TcpLab),
    /// TCP echo over a range of message sizes, after Farias: gigabits per second
    #[command(alias = "echo-2")]
    EchoMessageSize(tcp::TcpLab),
    /// TCP echo with few clients, after Farias: latency
    #[command(alias = "echo-3")]
    EchoLatency(tcp::TcpLab),
    /// A web server written for mTCP, on the C library and on the kernel's epoll, by wrk
    MtcpServer(tcp::TcpLab),
    /// One-way TCP throughput, into a server and out of a server
    Bulk(tcp::TcpLab),
    /// Cost of idle TCP connections: memory, and the latency of a request
    Connections(tcp::ConnectionsLab),
    /// Costs that are not to grow with what a server holds: requests/s among a million connections,
    /// processor time of a network core with 64 attached programs, instructions among 100,000 sockets
    Growth(growth::GrowthLab),
    /// TCP connection setup under a SYN flood
    SynFlood(tcp::TcpLab),
    /// Requests per second of unmodified applications, without load and under a flood: redis,
    /// memcached and nginx on the kernel, with Tidegate embedded, and attached to the
    /// daemon
    Apps(tcp::TcpLab),
    /// A million messages to a Kafka broker and back by kcat, unmodified, and by a client linked with
    /// the C library: on the kernel, with Tidegate embedded, and attached to the daemon
    Kafka(kafka::KafkaLab),
    /// Cost of metrics that are read, and of logs of each request, for a DNS server and a web server
    Observe(observe::ObserveLab),
    /// Unmodified programs by benchmark programs of others: redis, memcached and nginx with 1 to
    /// 1000 connections, sockperf; rates, latency and processor time on the kernel at its best, with
    /// Tidegate embedded, and attached to the daemon on the same core
    Programs(tcp::ProgramsLab),
    /// Servers beside CPU-bound programs on their core: an echo server, redis and nginx on the
    /// kernel, with Tidegate embedded, and attached to the daemon
    Noisy(tcp::NoisyLab),
    /// An ordinary day: latency, requests/s and streams between a client on kernel sockets that never
    /// sleeps and a server as it starts by itself, beside the kernel at its best
    Ordinary(tcp::OrdinaryLab),
    /// Other user-space network stacks on the same link: latency, requests/s and streams between a
    /// client on kernel sockets that never sleeps and a server on smoltcp, gVisor's netstack, lwIP, and
    /// on the programs that the variable TIDEGATE_PEERS names, as vpp=PATH,tas=PATH
    Peers(tcp::PeersLab),
    /// Small answers beside bulk senders of the same host on a link of 1 Gb/s: Tidegate's transmit
    /// classes and the kernel's queueing disciplines
    Priorities(tcp::PrioritiesLab),
    /// Context switches and interrupts of redis at equal throughput: the kernel tuned by
    /// affinity against a network core
    #[command(alias = "asymmetric")]
    ContextSwitches(tcp::TcpLab),
    /// Functions in which a core spends its time, after Diaz and Zabaljauregui: streams through a
    /// server on the kernel tuned by affinity and on a network core, by perf
    Profile(profile::ProfileLab),
    /// A server on one, two and more network cores, each with its own receive queue: answers per busy
    /// second, and frames that cross from core to core
    Cores(cores::CoresLab),
    /// A daemon that uses as many network cores as it needs, under a load that rises and falls: cores
    /// in use, requests lost, time to follow
    Elastic(elastic::ElasticLab),
    /// UDP at the maximum rate with injected faults: checks that memory does not grow and that
    /// every packet is accounted for
    Soak(soak::SoakLab),
    /// Goodput against offered load, up to the maximum of the generator: a service on kernel
    /// sockets and on Tidegate in each mode, and DNS servers
    Livelock(livelock::LivelockLab),
    /// Scaling of receive queue structures with several producers and several readers, after
    /// Rivera's thesis
    #[command(alias = "queues")]
    ReceiveQueues(receive_queues::ReceiveQueuesLab),
    /// Requests per second of a service with several reader threads: on one kernel socket, with
    /// SO_REUSEPORT, and on Tidegate
    #[command(alias = "readers")]
    ReaderScaling(reader_scaling::ReaderScalingLab),
    /// Contention of the locks of a receive queue, with and without memory accounting, after
    /// Rivera's thesis
    #[command(alias = "locks")]
    LockContention(lock_contention::LockContentionLab),
    /// Forwarding rate against offered load, with and without a packet filter, in each mode and
    /// with each quota of Mogul and Ramakrishnan
    Router(router::RouterLab),
    /// Packets that a passive monitor counts against packets offered: Tidegate, tcpdump, and a reader
    /// that only counts; and the processor share that they leave to a program on their core
    Monitor(monitor::MonitorLab),
    /// CPU share left to a compute-bound process beside the router
    #[command(alias = "share")]
    CpuShare(cpu_share::CpuShareLab),
    /// Network file service under a flood: calls of libnfs's clients that are answered, by
    /// `tidegate serve nfs` on Tidegate and on kernel sockets, and by nfs-ganesha
    Nfs(nfs::NfsLab),
    /// Effect of a flood on the rest of the machine: a steady outgoing flow, ping, system time
    /// at eight levels, and the recovery time of a server
    Protect(protect::ProtectLab),
    /// Web servers with a flood in the middle third of the time, after Jonack and Murta: Apache and
    /// nginx on the kernel and on Tidegate, and `tidegate serve http`
    WebServer(web_server::WebServerLab),
    /// Three servers behind a router that share their addresses, by `tidegate announce` and BIRD: a
    /// server drained, killed, and flooded at ten times its capacity
    Fleet(fleet::FleetLab),
    /// NSD under a flood from unknown sources, with and without `tidegate guard`: answers to a
    /// known source
    Guard(guard::GuardLab),
    /// Sessions of several requests to a web server at up to ten times its capacity, with and without
    /// admission of requests: sessions served to their end
    Sessions(sessions::SessionsLab),
    /// Maximum loss-free receive rate of a server, compared with the kernel's
    Mlfrr(mlfrr::MlfrrLab),
    /// Concurrent reads of /dev/zero, a FIFO and a UDP socket, and null system calls:
    /// Rivera's Tables 2.1 to 2.4 on this kernel
    #[command(alias = "reads")]
    ConcurrentReads(concurrent_reads::ConcurrentReadsLab),
    /// Latency and throughput of messages between two processes: shared-memory ring, Unix
    /// socket, pipe, loopback TCP, and the daemon
    #[command(alias = "attach")]
    AttachLatency(attach_latency::AttachLatencyLab),
    /// Messages per second of a ring of submissions and completions over a call for each message, on
    /// UDP and TCP, attached and embedded, beside io_uring
    Ring(ring::RingLab),
    /// Tidegate on DPDK devices: forwarding compared with dpdk-testpmd, UDP echo, a flood,
    /// services over memif and as the host of a virtual machine
    Dpdk(dpdk::DpdkLab),
    /// Applications of the daemon killed in any state, misbehaving applications, and the daemon
    /// killed: checks the losses of the others and that all memory is freed
    Chaos(chaos::ChaosLab),
    /// Attacks that may cost nobody else anything: servers killed and stopped under a flood, which
    /// must leave the interface as it was
    Hostile(hostile::HostileLab),
    /// Receive path trace: time per stage of a packet, in the kernel and in Tidegate
    #[command(alias = "trace")]
    ReceiveTrace(receive_trace::ReceiveTraceLab),
    /// Simulation of every receive mode: 0.1 to 10 times the capacity, 1 to 64 cores
    Sweep(sweep::SweepLab),
    /// Simulation of the machines of the papers, compared with their published numbers
    PapersLivelock(papers_livelock::PapersLivelockLab),
}

/// Does `work`. SIGINT, SIGTERM and SIGHUP end the process before, and leave no namespace, process
/// or file of the experiment.
pub(crate) fn clean_up_on_signal(
    work: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let is_ending = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&is_ending);
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            ending.store(true, Ordering::Release);
            cleanup::remove_everything();
            // As a shell reports a command that a signal has ended.
            std::process::exit(128 + signal);
        }
    })?;
    let result = work();
    while is_ending.load(Ordering::Acquire) {
        // The experiment fails without its namespaces. The other thread ends the process.
        std::thread::park();
    }
    result
}

impl Lab {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            // Signals end this process of an experiment with a report.
            Lab::Monitor(lab) if lab.is_reader() => lab.run(),
            experiment => clean_up_on_signal(|| experiment.run_experiment()),
        }
    }

    fn run_experiment(self) -> Result<(), Failure> {
        match self {
            Lab::Dns(lab) => lab.run(),
            Lab::EchoCost(lab) => lab.run(),
            Lab::EchoThroughput(lab) => {
                lab.run(tidegate_lab::experiments::farias::echo::run_throughput)
            }
            Lab::EchoMessageSize(lab) => {
                lab.run(tidegate_lab::experiments::farias::echo::run_message_size)
            }
            Lab::EchoLatency(lab) => lab.run(tidegate_lab::experiments::farias::echo::run_latency),
            Lab::MtcpServer(lab) => lab.run(tidegate_lab::experiments::farias::mtcp_server::run),
            Lab::Bulk(lab) => lab.run(tidegate_lab::experiments::compare::bulk::run),
            Lab::Connections(lab) => lab.run(),
            Lab::Growth(lab) => lab.run(),
            Lab::SynFlood(lab) => lab.run(tidegate_lab::experiments::compare::syn_flood::run),
            Lab::Apps(lab) => lab.run(tidegate_lab::experiments::compare::apps::run),
            Lab::Programs(lab) => lab.run(),
            Lab::Noisy(lab) => lab.run(),
            Lab::Ordinary(lab) => lab.run(),
            Lab::Peers(lab) => lab.run(),
            Lab::Priorities(lab) => lab.run(),
            Lab::ContextSwitches(lab) => {
                lab.run(tidegate_lab::experiments::diaz::context_switches::run)
            }
            Lab::Profile(lab) => lab.run(),
            Lab::Cores(lab) => lab.run(),
            Lab::Elastic(lab) => lab.run(),
            Lab::Soak(lab) => lab.run(),
            Lab::Livelock(lab) => lab.run(),
            Lab::ReceiveQueues(lab) => lab.run(),
            Lab::ReaderScaling(lab) => lab.run(),
            Lab::LockContention(lab) => lab.run(),
            Lab::Router(lab) => lab.run(),
            Lab::Monitor(lab) => lab.run(),
            Lab::CpuShare(lab) => lab.run(),
            Lab::Protect(lab) => lab.run(),
            Lab::WebServer(lab) => lab.run(),
            Lab::Fleet(lab) => lab.run(),
            Lab::Kafka(lab) => lab.run(),
            Lab::Observe(lab) => lab.run(),
            Lab::Guard(lab) => lab.run(),
            Lab::Sessions(lab) => lab.run(),
            Lab::Mlfrr(lab) => lab.run(),
            Lab::Nfs(lab) => lab.run(),
            Lab::ConcurrentReads(lab) => lab.run(),
            Lab::AttachLatency(lab) => lab.run(),
            Lab::Ring(lab) => lab.run(),
            Lab::Dpdk(lab) => lab.run(),
            Lab::Chaos(lab) => lab.run(),
            Lab::Hostile(lab) => lab.run(),
            Lab::ReceiveTrace(lab) => lab.run(),
            Lab::Sweep(lab) => lab.run(),
            Lab::PapersLivelock(lab) => lab.run(),
        }
    }
}

/// Duration and repetitions, for experiments that measure a live machine.
#[derive(Args)]
pub(crate) struct Measure {
    /// Shorter and fewer measurements, for a first look
    #[arg(long)]
    quick: bool,
    /// Duration of each measurement, in seconds [default: depends on the experiment]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Number of repetitions of each measurement; the median is reported
    #[arg(long, value_name = "COUNT")]
    repeats: Option<usize>,
}

impl Measure {
    /// Returns the configuration that the flags ask for. `quick` shortens a configuration for a
    /// first look; `fields` returns its seconds and its repetitions.
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

/// Destinations of a result with a plot.
#[derive(Args)]
pub(crate) struct PlotOutput {
    #[command(flatten)]
    output: Output,
    /// Write a plot of the result to this file, as SVG
    #[arg(long, value_name = "FILE", value_parser = result_file::parse)]
    svg: Option<PathBuf>,
}

impl PlotOutput {
    /// Writes the plot, prints the result, and writes the result as JSON when asked to.
    fn write(&self, result: &Experiment) -> Result<(), Failure> {
        if let (Some(path), Some(picture)) = (&self.svg, &result.picture) {
            picture.write(path)?;
        }
        self.output.write(result)
    }
}

/// Destination of a result.
#[derive(Args)]
pub(crate) struct Output {
    /// Write the result to this file as JSON; - is standard output
    #[arg(long, value_name = "FILE", value_parser = result_file::parse)]
    json: Option<PathBuf>,
    /// Start of the run.
    #[arg(skip = Instant::now())]
    began: Instant,
}

impl Output {
    /// Prints the result as text, and writes it as JSON with its provenance when asked to.
    pub(crate) fn write(&self, result: &Experiment) -> Result<(), Failure> {
        let Some(path) = &self.json else {
            print(format_args!("{result}"))?;
            return Ok(());
        };
        let provenance = Provenance::of_this_run(self.began.elapsed());
        let text = serde_json::to_string_pretty(&provenance.record(result))? + "\n";
        if path.as_os_str() == "-" {
            print(format_args!("{text}"))?;
            return Ok(());
        }
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        print(format_args!("{result}"))?;
        Ok(())
    }
}
