//! `tidegate lab ring`: messages per second of operations that are submitted together and complete
//! by events, over calls of one message each, after Diaz and Zabaljauregui.
//!
//! A program echoes messages over pairs of its own sockets: it sends one on the first socket of
//! each pair, receives all on the second ones, sends them back, and receives them again. All ways
//! send and receive the same messages on one thread, over the loopback of their stack.

mod kernel_pairs;
mod pairs;
mod sys;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tidegate::{Net, NetConfig};
use tidegate_device::mem::{self, MemConfig};
use tidegate_service::Geometry;
use tidegate_service::daemon::{AttachConfig, Daemon};

use self::kernel_pairs::KernelPairs;
use self::pairs::{PlainPairs, RingPairs};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::{cpu, folder};

/// Messages of a batch: pairs of sockets, each with one message at a time.
const BATCH_MESSAGES: usize = 32;
/// Bytes of a message.
const MESSAGE_BYTES: usize = 64;

/// Core of the program.
const PROGRAM_CORE: usize = 0;
/// Core of a network core that does not share the program's.
const NETWORK_CORE: usize = 1;

/// Configuration of the experiment.
#[derive(Clone, Copy, Debug)]
pub struct RingLabConfig {
    /// Duration of each measurement.
    pub seconds: f64,
    /// Number of repetitions; the result is their median.
    pub repeats: usize,
}

impl Default for RingLabConfig {
    fn default() -> Self {
        Self { seconds: 0.5, repeats: 5 }
    }
}

impl RingLabConfig {
    /// Reduces durations and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.1, repeats: 3 }
    }
}

/// Transport of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Udp,
    Tcp,
}

/// Stack of the sockets, and the core that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StackPlacement {
    /// Network core of a daemon on a core of its own.
    Attached,
    /// Network core of a daemon on the program's core.
    AttachedOneCore,
    /// Stack inside the program.
    Embedded,
    /// The kernel, on the program's core.
    Kernel,
}

/// CallStyle that carry the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallStyle {
    /// A call for each message, on sockets that are ready.
    Poll,
    /// A blocking call for each message, in the order in which they come.
    Blocking,
    /// A ring, or `io_uring`.
    Ring,
}

/// Measured case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    transport: Transport,
    is_ipv6: bool,
    place: StackPlacement,
    calls: CallStyle,
}

const PLACES: [StackPlacement; 4] = [
    StackPlacement::Attached,
    StackPlacement::AttachedOneCore,
    StackPlacement::Embedded,
    StackPlacement::Kernel,
];

impl StackPlacement {
    fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::AttachedOneCore => "attached-one-core",
            Self::Embedded => "embedded",
            Self::Kernel => "kernel",
        }
    }
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for transport in [Transport::Udp, Transport::Tcp] {
            for is_ipv6 in [false, true] {
                for place in PLACES {
                    for calls in [CallStyle::Poll, CallStyle::Blocking, CallStyle::Ring] {
                        all.push(Self { transport, is_ipv6, place, calls });
                    }
                }
            }
        }
        all
    }

    fn name(self) -> String {
        let (transport, family) = (self.transport_name(), self.family());
        format!("{transport} {family} {} {}", self.place.name(), self.calls_name())
    }

    fn calls_name(self) -> &'static str {
        match (self.place, self.calls) {
            (_, CallStyle::Poll) => "poll",
            (_, CallStyle::Blocking) => "blocking",
            (StackPlacement::Kernel, CallStyle::Ring) => "io_uring",
            (_, CallStyle::Ring) => "ring",
        }
    }

    fn transport_name(self) -> &'static str {
        match self.transport {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        }
    }

    fn family(self) -> &'static str {
        if self.is_ipv6 { "IPv6" } else { "IPv4" }
    }

    /// Address of the stack in the case's family.
    fn address(self) -> &'static str {
        match (self.place, self.is_ipv6) {
            (StackPlacement::Kernel, false) => "127.0.0.1",
            (StackPlacement::Kernel, true) => "::1",
            (_, false) => "192.0.2.1",
            (_, true) => "2001:db8::1",
        }
    }

    /// Opens the sockets, and measures the messages per second.
    fn measure(self, seconds: f64) -> io::Result<f64> {
        let folder = folder::private().map_err(io::Error::other)?;
        let started = match self.place {
            StackPlacement::Kernel => {
                let mut pairs = KernelPairs::new(self.transport, self.address())?;
                return match self.calls {
                    CallStyle::Poll => messages_per_s(seconds, || pairs.echo_ready()),
                    CallStyle::Blocking => messages_per_s(seconds, || pairs.echo_in_order()),
                    CallStyle::Ring => messages_per_s(seconds, || pairs.echo()),
                };
            }
            StackPlacement::Embedded => (Net::open(net_config()?).map_err(io::Error::other)?, None),
            StackPlacement::Attached => attach(folder.path(), NETWORK_CORE)?,
            StackPlacement::AttachedOneCore => attach(folder.path(), PROGRAM_CORE)?,
        };
        let (net, _daemon) = started;
        match self.calls {
            CallStyle::Poll => {
                let mut pairs = PlainPairs::new(&net, self.transport, self.address())?;
                messages_per_s(seconds, || pairs.echo_ready())
            }
            CallStyle::Blocking => {
                let mut pairs = PlainPairs::new(&net, self.transport, self.address())?;
                messages_per_s(seconds, || pairs.echo_in_order())
            }
            CallStyle::Ring => {
                let mut pairs = RingPairs::new(&net, self.transport, self.address())?;
                messages_per_s(seconds, || pairs.echo())
            }
        }
    }
}

/// Stack with an address of each family and no host at the other end of its link.
fn net_config() -> io::Result<NetConfig> {
    let (device, _) = mem::wire(&MemConfig::default())?;
    let address = |text: &str| text.parse().map_err(io::Error::other);
    Ok(NetConfig::new(device)
        .address(address("192.0.2.1/24")?)
        .address(address("2001:db8::1/64")?)
        .address_probe(tidegate::AddressProbe::Off))
}

/// Starts a daemon on `core`, and attaches to it.
fn attach(folder: &Path, core: usize) -> io::Result<(Net, Option<Daemon>)> {
    let path = folder.join("daemon.sock");
    let attach_config = AttachConfig::new(
        path.clone(),
        Geometry { sockets: 128, tcp_bytes: 1 << 16, udp_bytes: 1 << 16 },
    );
    let on_core_start = move || cpu::pin_this_thread(core).map_err(io::Error::other);
    let daemon = Daemon::start(net_config()?, attach_config, on_core_start, Arc::new(|_: &str| {}))
        .map_err(io::Error::other)?;
    Ok((Net::attach(&path, "lab")?, Some(daemon)))
}

/// Messages per second of a call that carries a batch to its receivers and back.
fn messages_per_s(seconds: f64, mut echo: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    let warm_up = Instant::now();
    while warm_up.elapsed().as_secs_f64() < seconds / 10.0 {
        echo()?;
    }
    let began = Instant::now();
    let mut batches = 0;
    let took: Duration = loop {
        echo()?;
        batches += 2;
        let elapsed = began.elapsed();
        if elapsed.as_secs_f64() >= seconds {
            break elapsed;
        }
    };
    Ok((batches * BATCH_MESSAGES) as f64 / took.as_secs_f64())
}

/// Measures each case in turn, or those whose names contain the text `only`.
///
/// # Errors
/// If no name contains the text, there are fewer than two cores, or a stack cannot be opened.
pub fn run(config: &RingLabConfig, only: Option<&str>) -> Result<Experiment, LabError> {
    let mut cases = Case::all();
    cases.retain(|case| only.is_none_or(|text| case.name().contains(text)));
    if cases.is_empty() {
        let text = only.unwrap_or_default();
        return Err(LabError::Config(format!(
            "no case contains {text:?}, as \"udp IPv4 attached\""
        )));
    }
    if cpu::available_cores() < 2 {
        return Err(LabError::Config("this experiment needs two cores".to_owned()));
    }
    // A new thread is pinned, so that the other threads keep their cores.
    let measured = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| {
            cpu::pin_this_thread(PROGRAM_CORE)?;
            let mut measured: Vec<(Case, Vec<f64>)> =
                cases.into_iter().map(|case| (case, Vec::new())).collect();
            let progress = Progress::new(measured.len() * config.repeats);
            for repeat in 1..=config.repeats {
                for (case, rates) in &mut measured {
                    let what = format!("{} failed", case.name());
                    let rate = case.measure(config.seconds).map_err(LabError::io(&what))?;
                    progress
                        .step(format_args!("{repeat} {:<35} {rate:>9.0} messages/s", case.name()));
                    rates.push(rate);
                }
            }
            Ok::<_, LabError>(measured)
        });
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(report(&measured))
}

fn report(measured: &[(Case, Vec<f64>)]) -> Experiment {
    let mut result = Experiment::new("ring");
    let rate = |wanted: Case| {
        let found = measured.iter().find(|(case, _)| *case == wanted);
        found.map_or(0.0, |(_, rates)| median(rates))
    };
    for (case, rates) in measured {
        let poll = rate(Case { calls: CallStyle::Poll, ..*case });
        let messages_per_s = median(rates);
        result.rows.push(json!({
            "transport": case.transport_name(),
            "family": case.family(),
            "stack": case.place.name(),
            "calls": case.calls_name(),
            "messages_per_s": messages_per_s.round(),
            "over_poll": round_to_thousandths(messages_per_s / poll.max(1.0)),
        }));
    }
    let is_ring = |(case, _): &&(Case, Vec<f64>)| case.calls == CallStyle::Ring;
    let worst = |place: StackPlacement, divisor: &dyn Fn(Case) -> Case| {
        let rings = measured.iter().filter(is_ring).filter(|(case, _)| case.place == place);
        let ratios = rings.filter_map(|(case, rates)| {
            let divisor = rate(divisor(*case));
            (divisor > 0.0).then(|| median(rates) / divisor)
        });
        ratios.reduce(f64::min).map(round_to_thousandths)
    };
    let poll = |case| Case { calls: CallStyle::Poll, ..case };
    let blocking = |case| Case { calls: CallStyle::Blocking, ..case };
    let io_uring = |case| Case { place: StackPlacement::Kernel, ..case };
    let figures = [
        ("ring_ratio", worst(StackPlacement::Attached, &poll)),
        ("ring_ratio_one_core", worst(StackPlacement::AttachedOneCore, &poll)),
        ("ring_ratio_embedded", worst(StackPlacement::Embedded, &poll)),
        ("ring_over_blocking", worst(StackPlacement::Attached, &blocking)),
        ("ring_over_blocking_one_core", worst(StackPlacement::AttachedOneCore, &blocking)),
        ("ring_over_blocking_embedded", worst(StackPlacement::Embedded, &blocking)),
        ("io_uring_ratio", worst(StackPlacement::Kernel, &poll)),
        ("ring_over_io_uring", worst(StackPlacement::AttachedOneCore, &io_uring)),
        ("ring_over_io_uring_embedded", worst(StackPlacement::Embedded, &io_uring)),
    ];
    for (name, ratio) in figures {
        ratio.into_iter().for_each(|ratio| result.figure(name, ratio));
    }
    result.columns = vec!["transport", "family", "stack", "calls", "messages_per_s", "over_poll"];
    result.note(format!(
        "a program on core {PROGRAM_CORE} sends {MESSAGE_BYTES} bytes on each of {BATCH_MESSAGES} \
         sockets, receives them on {BATCH_MESSAGES} others, and sends them back; poll: a call for each \
         message, on sockets that Poll or epoll reports; blocking: a blocking call for each message, \
         for a program that knows which comes next; ring, io_uring: a batch is {BATCH_MESSAGES} sends \
         and as many receives, submitted together"
    ));
    result.note(format!(
        "attached: a network core on core {NETWORK_CORE}; attached-one-core: on core {PROGRAM_CORE}, \
         where the kernel and the embedded stack do all their work, too; messages pass the loopback \
         of the stack"
    ));
    result.note(
        "figures are the worst of UDP and TCP, IPv4 and IPv6: ring_ratio: messages/s over poll on the \
         same stack; ring_over_io_uring: attached-one-core over the kernel's io_uring; medians",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_echoes() {
        for case in Case::all() {
            let rate = case.measure(0.01).unwrap_or_else(|error| panic!("{case:?}: {error}"));
            assert!(rate > 0.0, "{case:?}");
        }
    }

    #[test]
    fn figures_are_the_worst_ratios() {
        let rates = |case: Case| match (case.place, case.calls, case.transport, case.is_ipv6) {
            (StackPlacement::Attached, CallStyle::Ring, Transport::Tcp, true) => 150.0,
            (StackPlacement::Kernel, CallStyle::Ring, ..) => 250.0,
            (StackPlacement::AttachedOneCore, CallStyle::Ring, ..) => 500.0,
            (_, CallStyle::Ring, ..) => 300.0,
            (_, CallStyle::Poll, ..) => 100.0,
            (_, CallStyle::Blocking, ..) => 200.0,
        };
        let measured: Vec<_> =
            Case::all().into_iter().map(|case| (case, vec![rates(case), 1.0, 1e9])).collect();
        let figures = report(&measured).figures;
        assert_eq!(figures["ring_ratio"], 1.5);
        assert_eq!(figures["ring_ratio_embedded"], 3.0);
        assert_eq!(figures["ring_ratio_one_core"], 5.0);
        assert_eq!(figures["ring_over_blocking"], 0.75);
        assert_eq!(figures["ring_over_io_uring"], 2.0);
        assert_eq!(figures["ring_over_io_uring_embedded"], 1.2);
    }
}
