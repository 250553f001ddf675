//! Frames that go back as they came: Tidegate's port, and `dpdk-testpmd` in its
//! place. On memif also the echo of UDP through the whole stack.

use std::any::Any;
use std::ffi::OsStr;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::DpdkLabConfig;
use super::bench::{Bench, Ends, MEMORY, Wire};
use super::testpmd::{BURST, STARTER, Testpmd};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::livelock::subject::this_program;
use crate::load::load_udp_closed;
use crate::netns::{End, Namespace, VethConfig, VethPair};
use crate::process::{Process, command_on_core};

/// Frames that go round, in bursts of testpmd's: as many as every ring has room
/// for, so that none is lost.
const BURSTS: usize = 16;
const FRAMES: usize = BURSTS * BURST;
const RING: &str = "net_ring0";
/// With its headers 64 bytes: what testpmd sends.
const ECHO_BYTES: usize = 64 - 42;
const ECHO_PORT: u16 = 7;
const WARM_UP: Duration = Duration::from_millis(200);
/// How often to look whether any frame comes back.
const TRIES: usize = 10;
/// A forwarder that nobody ended ends by itself after so long, in seconds.
const LIMIT_S: f64 = 300.0;

/// What frames go over.
enum Link {
    Memif,
    /// A ring whose end is its beginning.
    Ring,
    /// Packet sockets on a veth pair: load in `a`, the subject in `b`.
    AfPacket(VethPair),
}

impl Link {
    fn name(&self) -> &'static str {
        match self {
            Self::Memif => "memif",
            Self::Ring => "ring",
            Self::AfPacket(_) => "af_packet",
        }
    }

    /// A device for either side.
    fn ends(&self, bench: &Bench) -> Ends {
        match self {
            Self::Memif => bench.wire(Wire::Memif),
            Self::Ring => Ends { server: RING.to_owned(), load: RING.to_owned() },
            Self::AfPacket(pair) => {
                let device = |end: &End| format!("net_af_packet0,iface={}", end.device);
                Ends { server: device(&pair.b), load: device(&pair.a) }
            }
        }
    }

    /// Where the subject and the load have to be.
    fn namespaces(&self) -> Option<(&Namespace, &Namespace)> {
        match self {
            Self::AfPacket(pair) => Some((&pair.b.namespace, &pair.a.namespace)),
            _ => None,
        }
    }

    fn subjects(&self) -> &'static [Subject] {
        match self {
            Self::Memif => &[Subject::Testpmd, Subject::Port, Subject::Echo],
            _ => &[Subject::Testpmd, Subject::Port],
        }
    }
}

/// What sends frames back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// `dpdk-testpmd` in mode `io`.
    Testpmd,
    /// Tidegate's port alone.
    Port,
    /// `tidegate serve echo`: the whole stack.
    Echo,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::Testpmd => "dpdk-testpmd io",
            Self::Port => "tidegate port",
            Self::Echo => "tidegate serve echo",
        }
    }
}

/// What one subject did on one link, in every repeat.
struct Found {
    link: &'static str,
    subject: Subject,
    runs: Vec<f64>,
    /// Of the echo: looks of the generator that found nothing, in percent.
    waits: Vec<f64>,
}

/// Measures every subject on every link, in turns, and adds rows and figures.
pub(super) fn run(
    config: &DpdkLabConfig,
    bench: &Bench,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut links = vec![Link::Memif, Link::Ring];
    if rustix::process::geteuid().is_root() {
        links.push(Link::AfPacket(VethPair::new(&VethConfig::default())?));
    } else {
        result.note("af_packet was left out: it needs root");
    }
    let one = |link: &Link, subject| Found {
        link: link.name(),
        subject,
        runs: Vec::new(),
        waits: Vec::new(),
    };
    let all = links.iter().flat_map(|link| link.subjects().iter().map(move |&s| (link, s)));
    let mut found: Vec<(&Link, Found)> =
        all.map(|(link, subject)| (link, one(link, subject))).collect();
    for repeat in 1..=config.repeats {
        for (link, found) in &mut found {
            measure(config, bench, link, found)?;
            let rate = found.runs.last().copied().unwrap_or_default();
            let (name, rate) = (found.subject.name(), number(rate.round()));
            eprintln!("{repeat} {:<10} {name:<20} {rate:>12}/s", found.link);
        }
    }
    let found: Vec<Found> = found.into_iter().map(|(_, found)| found).collect();
    conclude(&found, result);
    Ok(())
}

fn measure(
    config: &DpdkLabConfig,
    bench: &Bench,
    link: &Link,
    found: &mut Found,
) -> Result<(), LabError> {
    let rate = match (link, found.subject) {
        (_, Subject::Echo) => {
            let Ends { server, load } = link.ends(bench);
            let _server = bench.serve(&["echo"], &server)?;
            let load = bench.load_config(&load, ECHO_PORT, config.seconds);
            let report = load_udp_closed(&load, ECHO_BYTES, FRAMES)?;
            found.waits.push(report.empty_looks_percent);
            report.answered_pps
        }
        (Link::Ring, Subject::Port) => forward_alone(bench, config.seconds)?,
        (Link::Ring, Subject::Testpmd) => {
            let core = bench.server_core;
            let ring = Testpmd::start(command_on_core(core, STARTER), core, RING)?;
            returned(ring, config.seconds)?
        }
        (_, subject) => {
            let ends = link.ends(bench);
            let _subject = start(subject, bench, link, &ends.server)?;
            let core = bench.load_core;
            let command = on_core(link.namespaces().map(|sides| sides.1), core, STARTER);
            returned(Testpmd::start(command, core, &ends.load)?, config.seconds)?
        }
    };
    if rate <= 0.0 {
        let (link, subject) = (found.link, found.subject.name());
        return Err(LabError::Config(format!("no frame came back over {link} from {subject}")));
    }
    found.runs.push(rate);
    Ok(())
}

/// Starts what sends back the frames of a device. It ends on drop.
fn start(
    subject: Subject,
    bench: &Bench,
    link: &Link,
    device: &str,
) -> Result<Box<dyn Any>, LabError> {
    let core = bench.server_core;
    let namespace = link.namespaces().map(|sides| sides.0);
    if subject == Subject::Testpmd {
        let mut testpmd = Testpmd::start(on_core(namespace, core, STARTER), core, device)?;
        testpmd.forward(0)?;
        return Ok(Box::new(testpmd));
    }
    let mut command = on_core(namespace, core, this_program()?);
    command.args(["lab", "dpdk", "--forward", &format!("{device} {MEMORY}")]);
    command.args(["--cpu", &core.to_string(), "--seconds", &LIMIT_S.to_string()]);
    let mut process = Process::start("tidegate lab dpdk --forward", &mut command)?;
    process.wait_for_line()?;
    Ok(Box::new(process))
}

fn on_core(namespace: Option<&Namespace>, core: usize, program: impl AsRef<OsStr>) -> Command {
    match namespace {
        Some(namespace) => namespace.command_on_core(core, program),
        None => command_on_core(core, program),
    }
}

/// Puts frames into the generator's device, and tells how many come back in a
/// second.
fn returned(mut generator: Testpmd, seconds: f64) -> Result<f64, LabError> {
    let time = Duration::from_secs_f64(seconds);
    generator.wait_for_link()?;
    generator.forward(BURSTS)?;
    thread::sleep(WARM_UP);
    // On a busy machine the other side may not have run at all.
    let rates = (0..TRIES).map(|_| generator.received_pps(time));
    let mut some = rates.skip_while(|rate| rate.as_ref().is_ok_and(|rate| *rate == 0.0));
    some.next().unwrap_or(Ok(0.0))
}

/// Tidegate's port on a ring, which nobody else has an end of.
fn forward_alone(bench: &Bench, seconds: f64) -> Result<f64, LabError> {
    let mut command = command_on_core(bench.server_core, this_program()?);
    command.args(["lab", "dpdk", "--forward", &format!("{RING} {MEMORY}")]);
    command.args(["--frames", &FRAMES.to_string(), "--seconds", &seconds.to_string()]);
    command.args(["--cpu", &bench.server_core.to_string()]);
    let output = command.output().map_err(LabError::io("cannot start this program"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
    let rate = said.and_then(|said| said["frames_per_second"].as_f64());
    rate.ok_or_else(|| LabError::Server {
        name: "tidegate lab dpdk --forward".to_owned(),
        detail: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

fn of<'f>(found: &'f [Found], link: &str, subject: Subject) -> Option<&'f Found> {
    found.iter().find(|one| one.link == link && one.subject == subject)
}

/// A subject over testpmd on the same link. Each repeat is compared with
/// itself, and the median counts: a machine that is shared is slower at some
/// times than at others.
fn over_testpmd(found: &[Found], link: &str, subject: Subject) -> Option<f64> {
    let testpmd = of(found, link, Subject::Testpmd)?;
    let ratios = of(found, link, subject)?.runs.iter().zip(&testpmd.runs).map(|(own, io)| own / io);
    Some(median(&ratios.collect::<Vec<_>>()))
}

fn conclude(found: &[Found], result: &mut Experiment) {
    let ratio = |link| over_testpmd(found, link, Subject::Port);
    for link in ["memif", "ring", "af_packet"] {
        if let Some(ratio) = ratio(link) {
            result.figure(&format!("testpmd_ratio_{link}"), ratio);
        }
    }
    if let (Some(memif), Some(ring)) = (ratio("memif"), ratio("ring")) {
        result.figure("testpmd_ratio", memif.min(ring));
    }
    if let Some(ratio) = over_testpmd(found, "memif", Subject::Echo) {
        result.figure("echo_over_raw", ratio);
    }
    for one in found {
        let remark = match (one.link, one.subject) {
            ("ring", Subject::Testpmd) => "moves pointers, touches no frame".to_owned(),
            (_, Subject::Echo) => {
                format!("{:.0} % of the generator's looks found nothing", median(&one.waits))
            }
            _ => String::new(),
        };
        result.rows.push(json!({
            "part": "frames back",
            "wire": one.link,
            "subject": one.subject.name(),
            "load": format!("{FRAMES} frames of 64 B"),
            "per_second": median(&one.runs).round(),
            "lowest": one.runs.iter().copied().fold(f64::INFINITY, f64::min).round(),
            "highest": one.runs.iter().copied().fold(0.0, f64::max).round(),
            "over_testpmd": over_testpmd(found, one.link, one.subject),
            "remark": remark,
        }));
    }
    result.note(format!(
        "frames back: {FRAMES} frames of 64 bytes go round and none is made anew; the other side \
         is dpdk-testpmd in mode io, for the echo a generator that makes each answer the next \
         request, and it counts what comes back; on the ring there is no other side; \
         testpmd_ratio is the lesser of memif and ring, echo_over_raw the echo through the whole \
         stack over testpmd on memif; every repeat is compared with itself"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(link: &'static str, subject: Subject, runs: &[f64]) -> Found {
        Found { link, subject, runs: runs.to_vec(), waits: vec![30.0] }
    }

    #[test]
    fn each_repeat_is_compared_with_itself() {
        let all = [
            found("memif", Subject::Testpmd, &[100.0, 10.0, 200.0]),
            found("memif", Subject::Port, &[90.0, 9.0, 10.0]),
            found("memif", Subject::Echo, &[50.0, 6.0, 100.0]),
            found("ring", Subject::Testpmd, &[1000.0]),
            found("ring", Subject::Port, &[500.0]),
        ];
        let mut result = Experiment::new("dpdk");
        conclude(&all, &mut result);
        let figures = &result.figures;
        assert_eq!(figures["testpmd_ratio_memif"], 0.9);
        assert_eq!(figures["testpmd_ratio_ring"], 0.5);
        assert_eq!(figures["testpmd_ratio"], 0.5, "the lesser");
        assert_eq!(figures["echo_over_raw"], 0.5);
        assert!(!figures.contains_key("testpmd_ratio_af_packet"));
        assert_eq!(result.rows.len(), 5);
        assert!(result.rows[3]["remark"].as_str().unwrap().contains("touches no frame"));
        assert_eq!(result.rows[1]["lowest"], 9.0);
    }
}
