//! Forwarding of unchanged frames: Tidegate's device layer against `dpdk-testpmd` in the same
//! role. On memif also the UDP echo through the whole stack.

use std::any::Any;
use std::ffi::OsStr;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_load::{format_number, load_udp_closed_loop};

use super::DpdkLabConfig;
use super::testbed::{DpdkTestbed, EAL_MEMORY_FLAG, WireDevices, WireKind};
use super::testpmd::{BURST_FRAMES, STDBUF, Testpmd};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::netns::{Namespace, VethConfig, VethEnd, VethPair};
use crate::testbed::process::{ServerProcess, command_on_core};
use crate::testbed::programs;

/// Frames in circulation, in testpmd's bursts: as many as every ring can hold, so that none
/// is lost.
const BURST_COUNT: usize = 16;
const FRAME_COUNT: usize = BURST_COUNT * BURST_FRAMES;
/// Bursts of testpmd as the forwarder; the fastest counts. Each divides the number of frames.
const TESTPMD_BURSTS: [usize; 4] = [16, 32, 64, 128];
const RING_DEVICE: &str = "net_ring0";
/// UDP payload in bytes: with its headers 64 bytes, the frame length of testpmd.
const ECHO_PAYLOAD_BYTES: usize = 64 - 42;
const ECHO_PORT: u16 = 7;
const WARM_UP: Duration = Duration::from_millis(200);
/// Rate samples to wait for the first frame to come back.
const MAX_RATE_SAMPLES: usize = 10;
/// Time after which a forwarder that was not stopped exits by itself, in seconds.
const FORWARD_LIMIT_S: f64 = 300.0;

/// Link that the frames travel over.
enum ForwardLink {
    Memif,
    /// DPDK ring device whose output is its own input.
    Ring,
    /// Packet sockets on a veth pair: load in `a`, the forwarder in `b`.
    AfPacket(VethPair),
}

impl ForwardLink {
    fn name(&self) -> &'static str {
        match self {
            Self::Memif => "memif",
            Self::Ring => "ring",
            Self::AfPacket(_) => "af_packet",
        }
    }

    /// Devices for the two sides.
    fn devices(&self, testbed: &DpdkTestbed) -> WireDevices {
        match self {
            Self::Memif => testbed.new_wire(WireKind::Memif),
            Self::Ring => {
                WireDevices { server: RING_DEVICE.to_owned(), load: RING_DEVICE.to_owned() }
            }
            Self::AfPacket(pair) => {
                let device = |end: &VethEnd| format!("net_af_packet0,iface={}", end.device);
                WireDevices { server: device(&pair.b), load: device(&pair.a) }
            }
        }
    }

    /// Namespaces of the forwarder and the load, if the link needs them.
    fn namespaces(&self) -> Option<(&Namespace, &Namespace)> {
        match self {
            Self::AfPacket(pair) => Some((&pair.b.namespace, &pair.a.namespace)),
            _ => None,
        }
    }

    fn forwarders(&self) -> Vec<Forwarder> {
        let mut all: Vec<Forwarder> = TESTPMD_BURSTS.map(Forwarder::Testpmd).into();
        all.push(Forwarder::Device);
        if matches!(self, Self::Memif) {
            all.push(Forwarder::Echo);
        }
        all
    }
}

/// Program that returns frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forwarder {
    /// `dpdk-testpmd` in mode `io`, with this many frames in a burst.
    Testpmd(usize),
    /// Tidegate's device layer alone.
    Device,
    /// `tidegate serve echo`: the whole stack.
    Echo,
}

impl Forwarder {
    fn name(self) -> String {
        match self {
            Self::Testpmd(burst) => format!("dpdk-testpmd io, burst {burst}"),
            Self::Device => "tidegate device".to_owned(),
            Self::Echo => "tidegate serve echo".to_owned(),
        }
    }
}

/// Results of one forwarder on one link: a rate in frames per second for each repeat.
struct ForwardResults {
    link: &'static str,
    forwarder: Forwarder,
    runs: Vec<f64>,
    /// Echo only: the generator's polls that found no frame, in percent.
    empty_polls_percent: Vec<f64>,
}

/// Measures every forwarder on every link, in turns, and adds rows and figures.
pub(super) fn run(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut links = vec![ForwardLink::Memif, ForwardLink::Ring];
    if rustix::process::geteuid().is_root() {
        links.push(ForwardLink::AfPacket(VethPair::as_on_a_wire(&VethConfig::default())?));
    } else {
        result.note("af_packet was skipped: it needs root");
    }
    let empty_results = |link: &ForwardLink, forwarder| ForwardResults {
        link: link.name(),
        forwarder,
        runs: Vec::new(),
        empty_polls_percent: Vec::new(),
    };
    let all = links.iter().flat_map(|link| link.forwarders().into_iter().map(move |s| (link, s)));
    let mut results: Vec<(&ForwardLink, ForwardResults)> =
        all.map(|(link, forwarder)| (link, empty_results(link, forwarder))).collect();
    let progress = Progress::of_part("forwarding", results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for (link, results) in &mut results {
            measure(config, testbed, link, results)?;
            let rate = results.runs.last().copied().unwrap_or_default();
            let (name, rate) = (results.forwarder.name(), format_number(rate.round()));
            progress.step(format_args!("{repeat} {:<10} {name:<26} {rate:>12}/s", results.link));
        }
    }
    let results: Vec<ForwardResults> = results.into_iter().map(|(_, found)| found).collect();
    conclude(&results, result);
    Ok(())
}

fn measure(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    link: &ForwardLink,
    results: &mut ForwardResults,
) -> Result<(), LabError> {
    let rate = match (link, results.forwarder) {
        (_, Forwarder::Echo) => {
            let WireDevices { server, load } = link.devices(testbed);
            let _server = testbed.start_service(&["echo"], &server)?;
            let load = testbed.load_config(&load, ECHO_PORT, config.seconds);
            let report = load_udp_closed_loop(&load, ECHO_PAYLOAD_BYTES, FRAME_COUNT)?;
            results.empty_polls_percent.push(report.empty_looks_percent);
            report.answered_pps
        }
        (ForwardLink::Ring, Forwarder::Device) => forward_on_ring(testbed, config.seconds)?,
        (ForwardLink::Ring, Forwarder::Testpmd(burst)) => {
            let core = testbed.server_core;
            let ring = Testpmd::start(command_on_core(core, STDBUF), core, RING_DEVICE, burst)?;
            measure_returned_pps(ring, FRAME_COUNT / burst, config.seconds)?
        }
        (_, forwarder) => {
            let devices = link.devices(testbed);
            let _forwarder = start_forwarder(forwarder, testbed, link, &devices.server)?;
            let core = testbed.load_core;
            let command = command_in(link.namespaces().map(|sides| sides.1), core, STDBUF);
            let generator = Testpmd::start(command, core, &devices.load, BURST_FRAMES)?;
            measure_returned_pps(generator, BURST_COUNT, config.seconds)?
        }
    };
    if rate <= 0.0 {
        let (link, subject) = (results.link, results.forwarder.name());
        return Err(LabError::Config(format!("no frame came back over {link} from {subject}")));
    }
    results.runs.push(rate);
    Ok(())
}

/// Starts the forwarder on a device. The returned handle stops it on drop.
fn start_forwarder(
    forwarder: Forwarder,
    testbed: &DpdkTestbed,
    link: &ForwardLink,
    device: &str,
) -> Result<Box<dyn Any>, LabError> {
    let core = testbed.server_core;
    let namespace = link.namespaces().map(|sides| sides.0);
    if let Forwarder::Testpmd(burst) = forwarder {
        let command = command_in(namespace, core, STDBUF);
        let mut testpmd = Testpmd::start(command, core, device, burst)?;
        testpmd.forward(0)?;
        return Ok(Box::new(testpmd));
    }
    let mut command = command_in(namespace, core, programs::laboratory()?);
    command.args(["dpdk", "--forward", &format!("{device} {EAL_MEMORY_FLAG}")]);
    command.args(["--cpu", &core.to_string(), "--seconds", &FORWARD_LIMIT_S.to_string()]);
    let mut process = ServerProcess::start("tidegate lab dpdk --forward", &mut command)?;
    process.wait_for_first_line()?;
    Ok(Box::new(process))
}

fn command_in(namespace: Option<&Namespace>, core: usize, program: impl AsRef<OsStr>) -> Command {
    match namespace {
        Some(namespace) => namespace.command_on_core(core, program),
        None => command_on_core(core, program),
    }
}

/// Puts this many bursts of frames into the generator's device, and returns the rate at which they come back, in
/// frames per second.
fn measure_returned_pps(
    mut generator: Testpmd,
    bursts: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    let time = Duration::from_secs_f64(seconds);
    generator.wait_for_link()?;
    generator.forward(bursts)?;
    thread::sleep(WARM_UP);
    // On a busy machine the forwarder may not have been scheduled yet.
    let rates = (0..MAX_RATE_SAMPLES).map(|_| generator.received_pps(time));
    let mut nonzero = rates.skip_while(|rate| rate.as_ref().is_ok_and(|rate| *rate == 0.0));
    nonzero.next().unwrap_or(Ok(0.0))
}

/// Measures Tidegate's device layer on a ring that no other process uses, in frames per second.
fn forward_on_ring(testbed: &DpdkTestbed, seconds: f64) -> Result<f64, LabError> {
    let mut command = command_on_core(testbed.server_core, programs::laboratory()?);
    command.args(["dpdk", "--forward", &format!("{RING_DEVICE} {EAL_MEMORY_FLAG}")]);
    command.args(["--frames", &FRAME_COUNT.to_string(), "--seconds", &seconds.to_string()]);
    command.args(["--cpu", &testbed.server_core.to_string()]);
    let output = command.output().map_err(LabError::io("cannot start this executable"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
    let rate = report.and_then(|said| said["frames_per_second"].as_f64());
    rate.ok_or_else(|| LabError::Server {
        name: "tidegate lab dpdk --forward".to_owned(),
        detail: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

fn find_results<'f>(
    results: &'f [ForwardResults],
    link: &str,
    forwarder: Forwarder,
) -> Option<&'f ForwardResults> {
    results.iter().find(|one| one.link == link && one.forwarder == forwarder)
}

/// Testpmd on a link, with the burst at which its median rate is the highest.
fn best_testpmd<'f>(results: &'f [ForwardResults], link: &str) -> Option<&'f ForwardResults> {
    let is_testpmd = |one: &&ForwardResults| matches!(one.forwarder, Forwarder::Testpmd(_));
    let on_link = results.iter().filter(|one| one.link == link).filter(is_testpmd);
    on_link.max_by(|one, other| median(&one.runs).total_cmp(&median(&other.runs)))
}

/// Rate of a forwarder over that of testpmd on the same link, at testpmd's best burst.
///
/// Each repeat is compared with testpmd's in the same repeat, and the median counts: a shared
/// machine is slower at some times than at others.
fn over_testpmd(results: &[ForwardResults], link: &str, forwarder: Forwarder) -> Option<f64> {
    let testpmd = best_testpmd(results, link)?;
    let ratios = find_results(results, link, forwarder)?
        .runs
        .iter()
        .zip(&testpmd.runs)
        .map(|(own, io)| own / io);
    Some(median(ratios))
}

fn conclude(results: &[ForwardResults], result: &mut Experiment) {
    let ratio = |link| over_testpmd(results, link, Forwarder::Device);
    for link in ["memif", "ring", "af_packet"] {
        if let Some(ratio) = ratio(link) {
            result.figure(&format!("testpmd_ratio_{link}"), ratio);
        }
        if let Some(Forwarder::Testpmd(burst)) =
            best_testpmd(results, link).map(|best| best.forwarder)
        {
            result.figure(&format!("testpmd_burst_{link}"), burst as f64);
        }
    }
    if let (Some(memif), Some(ring)) = (ratio("memif"), ratio("ring")) {
        result.figure("testpmd_ratio", memif.min(ring));
    }
    if let Some(ratio) = over_testpmd(results, "memif", Forwarder::Echo) {
        result.figure("echo_over_raw", ratio);
    }
    for one in results {
        let remark = match (one.link, one.forwarder) {
            ("ring", Forwarder::Testpmd(_)) => "moves pointers only, touches no frame".to_owned(),
            (_, Forwarder::Echo) => {
                format!(
                    "{:.0} % of the generator's polls found no frame",
                    median(&one.empty_polls_percent)
                )
            }
            _ => String::new(),
        };
        result.rows.push(json!({
            "part": "frames back",
            "wire": one.link,
            "subject": one.forwarder.name(),
            "load": format!("{FRAME_COUNT} frames of 64 B"),
            "per_second": median(&one.runs).round(),
            "lowest": one.runs.iter().copied().fold(f64::INFINITY, f64::min).round(),
            "highest": one.runs.iter().copied().fold(0.0, f64::max).round(),
            "over_testpmd": over_testpmd(results, one.link, one.forwarder),
            "remark": remark,
        }));
    }
    result.note(format!(
        "frames back: {FRAME_COUNT} frames of 64 bytes circulate, none is newly created; the other side \
         is dpdk-testpmd in mode io, for the echo a generator that turns each reply into the next \
         request, and counts the returned frames; on the ring there is no other side; \
         testpmd forwards in bursts of 16, 32, 64 and 128, the best of which counts on each link \
         (testpmd_burst_*); testpmd_ratio is the lower of memif and ring; echo_over_raw is the echo through the whole \
         stack over testpmd on memif; ratios are taken within each repeat"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results_of(link: &'static str, forwarder: Forwarder, runs: &[f64]) -> ForwardResults {
        ForwardResults { link, forwarder, runs: runs.to_vec(), empty_polls_percent: vec![30.0] }
    }

    #[test]
    fn every_burst_of_testpmd_divides_the_frames() {
        assert!(TESTPMD_BURSTS.iter().all(|burst| FRAME_COUNT.is_multiple_of(*burst)));
    }

    #[test]
    fn compares_each_repeat_with_itself() {
        let all = [
            results_of("memif", Forwarder::Testpmd(128), &[1.0, 500.0, 2.0]),
            results_of("memif", Forwarder::Testpmd(64), &[100.0, 10.0, 200.0]),
            results_of("memif", Forwarder::Device, &[90.0, 9.0, 10.0]),
            results_of("memif", Forwarder::Echo, &[50.0, 6.0, 100.0]),
            results_of("ring", Forwarder::Testpmd(32), &[1000.0]),
            results_of("ring", Forwarder::Device, &[500.0]),
        ];
        let mut result = Experiment::new("dpdk");
        conclude(&all, &mut result);
        let figures = &result.figures;
        assert_eq!(figures["testpmd_ratio_memif"], 0.9);
        assert_eq!(figures["testpmd_ratio_ring"], 0.5);
        assert_eq!(figures["testpmd_ratio"], 0.5, "the lower ratio");
        assert_eq!(figures["echo_over_raw"], 0.5);
        assert!(!figures.contains_key("testpmd_ratio_af_packet"));
        assert_eq!(figures["testpmd_burst_memif"], 64.0, "the burst with the best median");
        assert_eq!(result.rows.len(), 6);
        assert!(result.rows[4]["remark"].as_str().unwrap().contains("touches no frame"));
        assert_eq!(result.rows[2]["lowest"], 9.0);
    }
}
