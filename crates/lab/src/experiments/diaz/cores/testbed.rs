//! Testbed of `lab cores`: servers and floods on veth pairs of different numbers of queues.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tidegate_load::{Addressing, QuerySet};

use super::Run;
use super::placement::Placement;
use crate::error::LabError;
use crate::testbed::cpu::{self, CoreTicks};
use crate::testbed::dns::ZoneFile;
use crate::testbed::dns::tools::{DnsTool, DnsToolRun};
use crate::testbed::flood::LOAD_MAC;
use crate::testbed::load::arp_responder::ArpResponder;
use crate::testbed::load::flood::{self, Flood};
use crate::testbed::netns::{VethConfig, VethEnd, VethPair};
use crate::testbed::process::{ServerProcess, list};
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;

const TIDEGATE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 2);
const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 3);
/// Address of the kernel's stack at the end of the load.
const TOOL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 1);
/// Source of the load, an address that no kernel has.
const LOAD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 79, 1, 1);
const ECHO_PORT: u16 = 7;
const DNS_PORT: u16 = 53;
/// Flows of the load: many enough that a hash divides them evenly.
const FLOWS: u16 = 2_048;
const FIRST_SOURCE_PORT: u16 = 20_000;
const ECHO_BYTES: usize = 64;
const ZONE_NAMES: u64 = 2_048;
/// Rates offered to each queue, in packets per second: some servers answer less under a flood.
const RATES_PPS: [f64; 3] = [400_000.0, 800_000.0, 1_488_095.0];
/// Rate for each queue before the first measurement, in packets per second, and the answers to wait
/// for.
const FIRST_PPS: f64 = 2_000.0;
const FIRST_ANSWERS: u64 = 100;
const FIRST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(20);
/// Duration of a load before its measurement.
const WARM_UP: Duration = Duration::from_millis(200);

pub(super) const NOTE: &str = "AF_XDP over a veth pair. flood: 2,048 flows of 64-byte requests, or of DNS questions, for each \
     network core, at 0.4, 0.8 and 1.49 million/s, of which the row has the best; every flow arrives at \
     every queue. dnsperf: a thread on each processor of the load, on kernel sockets. \
     tidegate: a receive queue for each network core, and a socket of one reuse group on each, so \
     that no flow has to cross; tidegate-one-queue: one queue for all, so that the first core \
     receives everything and the others' flows cross; kernel: as many threads with SO_REUSEPORT, with \
     receive work on the senders' processors (kernel-softirq, which flatters it), handed from there to \
     the servers' (kernel-rps), in a NAPI thread beside each (kernel-thread), or in the threads' own \
     calls (kernel-busy-poll). per_busy_second: answers over the busy time of the servers' \
     processors, or over that of the server process where the load shares them. cores_2_over_1: \
     twice the per_busy_second of two cores over that of one; by_clock: answers over answers";

/// Service that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    Echo,
    Dns,
}

impl Service {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Dns => "dns",
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::Echo => ECHO_PORT,
            Self::Dns => DNS_PORT,
        }
    }
}

/// Load generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Our own, one for each queue.
    Flood,
    /// That of DNS-OARC, on kernel sockets.
    Dnsperf,
}

impl Load {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Flood => "flood",
            Self::Dnsperf => "dnsperf",
        }
    }
}

/// Service under a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) service: Service,
    pub(super) load: Load,
}

impl Case {
    const ALL: [Self; 3] = [
        Self { service: Service::Echo, load: Load::Flood },
        Self { service: Service::Dns, load: Load::Flood },
        Self { service: Service::Dns, load: Load::Dnsperf },
    ];

    /// End of the names of its figures.
    pub(super) fn suffix(self) -> &'static str {
        match (self.service, self.load) {
            (Service::Echo, _) => "",
            (Service::Dns, Load::Flood) => "_dns",
            (Service::Dns, Load::Dnsperf) => "_dns_dnsperf",
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.service.name(), self.load.name())
    }
}

/// Way of the packets to the network cores or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerSetup {
    /// Tidegate with a receive queue for each network core.
    QueueEach,
    /// Tidegate with one receive queue for all.
    OneQueue,
    /// The kernel with a queue and a thread for each core, and this receive work.
    Kernel(ReceiveWork),
}

impl ServerSetup {
    /// The kernel's ways.
    pub(super) const KERNEL: [Self; 4] = [
        Self::Kernel(ReceiveWork::Softirq),
        Self::Kernel(ReceiveWork::Steered),
        Self::Kernel(ReceiveWork::Thread),
        Self::Kernel(ReceiveWork::BusyPoll),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::QueueEach => "tidegate",
            Self::OneQueue => "tidegate-one-queue",
            Self::Kernel(work) => work.kernel_name(),
        }
    }

    fn is_kernel(self) -> bool {
        matches!(self, Self::Kernel(_))
    }

    fn address(self) -> Ipv4Addr {
        if self.is_kernel() { KERNEL_ADDRESS } else { TIDEGATE_ADDRESS }
    }

    fn queues(self, cores: usize) -> usize {
        if self == Self::OneQueue { 1 } else { cores }
    }

    /// Puts the receive work of `end` on the processors of the servers.
    fn place(self, end: &VethEnd, processors: &[usize]) -> Result<(), LabError> {
        let Self::Kernel(work) = self else { return Ok(()) };
        work.place(end, processors[0])?;
        match work {
            ReceiveWork::Steered => end.set_rps(processors),
            ReceiveWork::Thread => {
                let threads = cpu::napi_threads(&end.device);
                let mut places = threads.into_iter().zip(processors.iter().cycle());
                places.try_for_each(|(thread, &processor)| cpu::pin_process(thread, processor))
            }
            _ => Ok(()),
        }
    }
}

/// Veth pair with a responder for the addresses of the load.
struct Link {
    pair: VethPair,
    _responder: ArpResponder,
}

impl Link {
    fn new(queues: usize) -> Result<Self, LabError> {
        let config = VethConfig {
            a: vec![format!("{TOOL_ADDRESS}/16")],
            b: vec![format!("{KERNEL_ADDRESS}/16")],
        };
        let pair = VethPair::as_on_a_wire_with_queues(&config, queues)?;
        let addressing = addressing(SocketAddr::new(KERNEL_ADDRESS.into(), 0), pair.b.mac);
        let responder = ArpResponder::new(&pair.a, &addressing, 0)?;
        Ok(Self { pair, _responder: responder })
    }
}

fn addressing(target: SocketAddr, target_mac: [u8; 6]) -> Addressing {
    Addressing {
        source_mac: LOAD_MAC,
        target_mac,
        source: IpAddr::V4(LOAD_ADDRESS),
        source_count: 1,
        first_port: FIRST_SOURCE_PORT,
        port_count: FLOWS,
        target,
    }
}

/// Veth pairs by their number of queues, and a zone.
pub(super) struct CoresTestbed {
    placement: Placement,
    links: BTreeMap<usize, Link>,
    zone: ZoneFile,
    queries: QuerySet,
}

/// Server at work, and where.
struct Running<'a> {
    pair: &'a VethPair,
    server: &'a ServerProcess,
    processors: &'a [usize],
}

impl CoresTestbed {
    pub(super) fn new(placement: Placement) -> Result<Self, LabError> {
        let zone = ZoneFile::write(ZONE_NAMES)?;
        let queries = zone.queries();
        Ok(Self { placement, links: BTreeMap::new(), zone, queries })
    }

    /// The cases that this machine can measure: dnsperf has to be installed, and is not to take
    /// processors from the server.
    pub(super) fn cases(&self) -> Vec<Case> {
        let has_dnsperf = self.placement.is_apart && DnsTool::Dnsperf.check_installed().is_ok();
        Case::ALL.into_iter().filter(|case| has_dnsperf || case.load != Load::Dnsperf).collect()
    }

    /// Measures a server on `cores` network cores under each rate of the load; returns the run with
    /// most answers.
    pub(super) fn measure(
        &mut self,
        case: Case,
        way: ServerSetup,
        cores: usize,
        seconds: f64,
    ) -> Result<Run, LabError> {
        let queues = way.queues(cores);
        if let Entry::Vacant(vacant) = self.links.entry(queues) {
            vacant.insert(Link::new(queues)?);
        }
        let pair = &self.links[&queues].pair;
        ReceiveWork::reset(&pair.b)?;
        pair.b.ethtool(&["gro", if way.is_kernel() { "on" } else { "off" }])?;
        let processors = &self.placement.servers(cores)[..];
        let mut command = self.command(case.service, way, pair, processors)?;
        let mut server = ServerProcess::start("tidegate", &mut command)?;
        server.wait_for_first_line()?;
        way.place(&pair.b, processors)?;
        let running = Running { pair, server: &server, processors };
        let target = SocketAddr::new(way.address().into(), case.service.port());
        let best = match case.load {
            Load::Flood => self.measure_flood(&running, case.service, target, seconds)?,
            Load::Dnsperf => self.measure_dnsperf(&running, target, seconds)?,
        };
        let report = server.stop();
        Ok(Run { crossing_share: report.as_ref().map_or(0.0, crossing_share), ..best })
    }

    fn measure_flood(
        &self,
        running: &Running<'_>,
        service: Service,
        target: SocketAddr,
        seconds: f64,
    ) -> Result<Run, LabError> {
        let frames = self.frames(service, &addressing(target, running.pair.b.mac));
        let cores = self.placement.load_of_queues(running.processors.len());
        let floods = cores.map(|core| Flood::new(&running.pair.a, &frames, core));
        let mut floods = floods.collect::<Result<Vec<_>, _>>()?;
        wait_for_answers(running, &mut floods)?;
        let mut best = Run::default();
        for rate_pps in RATES_PPS {
            floods.iter_mut().try_for_each(|flood| flood.set_rate(Some(rate_pps)))?;
            thread::sleep(WARM_UP);
            let before = Reading::take(running, &mut floods)?;
            thread::sleep(Duration::from_secs_f64(seconds));
            let after = Reading::take(running, &mut floods)?;
            let run = after.since(&before, self.placement.is_apart);
            if run.answered_pps > best.answered_pps {
                best = run;
            }
        }
        Ok(best)
    }

    fn measure_dnsperf(
        &self,
        running: &Running<'_>,
        target: SocketAddr,
        seconds: f64,
    ) -> Result<Run, LabError> {
        let end = &running.pair.a;
        let cores = &self.placement.load[..];
        // The answers are received on the processors of the load.
        end.set_rps(cores)?;
        let run = DnsToolRun {
            pair: running.pair,
            cores,
            source: TOOL_ADDRESS,
            target: target.ip(),
            queries: &self.zone.write_queries(self.zone.folder())?,
        };
        let rates = DnsTool::Dnsperf.measure(&run, 0.0, Duration::from_secs_f64(seconds))?;
        end.set_rps(&[])?;
        Ok(Run { offered_pps: rates.sent_pps, answered_pps: rates.answered_pps, ..Run::default() })
    }

    fn command(
        &self,
        service: Service,
        way: ServerSetup,
        pair: &VethPair,
        processors: &[usize],
    ) -> Result<Command, LabError> {
        let mut command = pair.b.namespace.command(programs::tidegate()?);
        command.args(["serve", service.name(), "--json", "--iface", &pair.b.device]);
        command.args(["--listen", &service.port().to_string()]);
        command.args(["--address", &format!("{}/16", way.address())]);
        if service == Service::Dns {
            let zone = format!("{}={}", self.zone.origin(), self.zone.path().display());
            // One source asks each question many times: that is the measurement.
            command.args(["--rate-limit", "0", "--zone", &zone]);
        }
        let (count, processors) = (processors.len().to_string(), list(processors));
        if let ServerSetup::Kernel(work) = way {
            command.args(["--io", "kernel", "--reuse-port", "--readers", &count]);
            command.args(["--reader-cpus", &processors]).args(work.serve_flags());
        } else {
            command.args(["--io", "xdp", "--cores", &count, "--core-cpus", &processors]);
        }
        Ok(command)
    }

    fn frames(&self, service: Service, addressing: &Addressing) -> Vec<Vec<u8>> {
        match service {
            Service::Echo => {
                let payload = [0x7e; ECHO_BYTES];
                flood::frames(addressing, (0..FLOWS).map(|_| &payload[..]))
            }
            Service::Dns => {
                let queries = (0..self.queries.len()).map(|index| self.queries.get(index).0);
                flood::frames(addressing, queries)
            }
        }
    }
}

/// Sends slowly until the server has learned the hardware address of the load, and answers.
fn wait_for_answers(running: &Running<'_>, floods: &mut [Flood]) -> Result<(), LabError> {
    let before = running.pair.b.tx_packets()?;
    let wanted = before + FIRST_ANSWERS * floods.len() as u64;
    floods.iter_mut().try_for_each(|flood| flood.set_rate(Some(FIRST_PPS)))?;
    let began = Instant::now();
    while running.pair.b.tx_packets()? < wanted {
        if began.elapsed() > FIRST_ANSWERS_TIMEOUT {
            return Err(LabError::Config("the server does not answer a slow load".to_owned()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Frames passed from core to core over requests answered, by the report of a server.
fn crossing_share(report: &Value) -> f64 {
    let passed_on: f64 = report["cores"]
        .as_array()
        .map_or(0.0, |cores| cores.iter().filter_map(|core| core["passed_on"].as_f64()).sum());
    passed_on / report["answers"].as_f64().unwrap_or(0.0).max(1.0)
}

/// Counters of load and server at one moment.
struct Reading {
    at: Instant,
    offered: u64,
    answered: u64,
    process_ticks: u64,
    processors: Vec<CoreTicks>,
}

impl Reading {
    fn take(running: &Running<'_>, floods: &mut [Flood]) -> Result<Self, LabError> {
        let mut processors = running.processors.to_vec();
        processors.sort_unstable();
        processors.dedup();
        let ticks = processors.into_iter().map(CoreTicks::read);
        Ok(Self {
            at: Instant::now(),
            offered: floods.iter_mut().map(Flood::offered).sum::<Result<u64, _>>()?,
            answered: running.pair.b.tx_packets()?,
            process_ticks: cpu::process_ticks(running.server.pid())?,
            processors: ticks.collect::<Result<_, _>>()?,
        })
    }

    fn since(&self, before: &Self, is_apart: bool) -> Run {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        let answered = (self.answered - before.answered) as f64;
        let busy_seconds = if is_apart {
            let both = self.processors.iter().zip(&before.processors);
            let busy = both.map(|(after, before)| after.since(*before).busy_percent);
            busy.sum::<f64>() / 100.0 * seconds
        } else {
            (self.process_ticks - before.process_ticks) as f64 / cpu::ticks_per_second() as f64
        };
        Run {
            offered_pps: (self.offered - before.offered) as f64 / seconds,
            answered_pps: answered / seconds,
            per_busy_second: Some(answered / busy_seconds.max(0.01)),
            crossing_share: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn crossing_share_counts_the_frames_of_all_cores() {
        let report = json!({
            "answers": 100,
            "cores": [{"passed_on": 30}, {"passed_on": 20}],
        });
        assert_eq!(crossing_share(&report), 0.5);
        assert_eq!(crossing_share(&json!({"answers": 100})), 0.0);
    }
}
