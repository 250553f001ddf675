//! The experiment `echo-cost`: cost of echoing UDP packets through an in-memory device, the stack
//! and a socket, in both directions; and of TCP messages through the stack and a socket.
//!
//! Everything runs on one thread: a driver puts frames on the link, the echo server replies, and
//! the driver takes the echoes back. Callgrind counts the instructions. The result is the
//! difference of two runs of different length, so that start-up does not count.

mod random_flows;
mod tcp;
mod testbed;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate_load::template::{FrameTemplate, sum};

use self::random_flows::{FLOW_COUNT, MAX_PAYLOAD_BYTES, MIN_PAYLOAD_BYTES};
#[cfg(test)]
use self::testbed::PORTS_PER_ADDRESS;
use self::testbed::{BURST_FRAMES, ChecksumMode, EchoTestbed, Flows};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::testbed::netns::output;
use crate::testbed::programs;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EchoCostConfig {
    /// Number of packets to echo.
    pub packets: u64,
    /// Use IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Count instructions with callgrind.
    pub callgrind: bool,
    /// Echo this traffic only.
    pub traffic: Option<Traffic>,
    /// UDP sockets of the stack, one of which echoes; on several addresses if they are more than
    /// an address has ports. For one flow.
    pub sockets: usize,
    /// Packets on the link at a time, for one flow.
    pub burst: usize,
}

impl Default for EchoCostConfig {
    fn default() -> Self {
        Self {
            packets: 100_000,
            ipv6: false,
            callgrind: false,
            traffic: None,
            sockets: 1,
            burst: BURST_FRAMES,
        }
    }
}

impl EchoCostConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { packets: 20_000, ..self }
    }
}

/// Packets to echo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// One flow of small packets, in bursts; the device computes the checksums of the replies.
    OneFlow,
    /// As [`Traffic::OneFlow`], by a server that measures its service times for its metrics.
    OneFlowTimed,
    /// Packets of many flows and sizes in random order, in bursts. The stack computes the
    /// checksums.
    RandomFlows,
    /// As [`Traffic::RandomFlows`], with one packet at a time.
    RandomFlowsSingly,
    /// Messages of 64 bytes on TCP connections between two stacks, one of which echoes.
    Tcp,
}

impl Traffic {
    /// All kinds of traffic.
    pub const ALL: [Self; 5] =
        [Self::OneFlow, Self::OneFlowTimed, Self::RandomFlows, Self::RandomFlowsSingly, Self::Tcp];

    /// Name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneFlow => "one-flow",
            Self::OneFlowTimed => "one-flow-timed",
            Self::RandomFlows => "random-flows",
            Self::RandomFlowsSingly => "random-flows-singly",
            Self::Tcp => "tcp",
        }
    }

    /// Packets on the link at a time.
    fn burst_frames(self, config: &EchoCostConfig) -> usize {
        match self {
            Self::OneFlow | Self::OneFlowTimed => config.burst,
            Self::RandomFlows => BURST_FRAMES,
            Self::RandomFlowsSingly => 1,
            Self::Tcp => tcp::CONNECTIONS,
        }
    }

    /// Name of the figure for this traffic.
    fn figure(self, quantity: &str) -> String {
        match self {
            Self::OneFlow => format!("{quantity}_per_packet"),
            Self::OneFlowTimed => format!("{quantity}_per_packet_timed"),
            Self::Tcp => format!("{quantity}_per_tcp_message"),
            Self::RandomFlows | Self::RandomFlowsSingly => {
                let burst = if self == Self::RandomFlows { BURST_FRAMES } else { 1 };
                format!("{quantity}_per_packet_{FLOW_COUNT}_flows_mixed_sizes_burst_{burst}")
            }
        }
    }

    /// Echoes `packets` packets and returns the number of correct echoes.
    fn echo(self, packets: u64, config: &EchoCostConfig) -> Result<u64, LabError> {
        match self {
            Self::OneFlow | Self::OneFlowTimed => {
                echo_one_flow(packets, config, self == Self::OneFlowTimed)
            }
            Self::Tcp => tcp::echo(packets, config.ipv6),
            _ => random_flows::echo(packets, config.ipv6, self.burst_frames(config)),
        }
    }
}

impl std::str::FromStr for Traffic {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        Self::ALL.into_iter().find(|traffic| traffic.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            LabError::Config(format!("unknown traffic {text:?}; available: {names}"))
        })
    }
}

/// Payload of the traffic of one flow.
const PAYLOAD_BYTES: usize = 64;

/// Runs the experiment.
///
/// # Errors
/// If an echo is missing or wrong, or valgrind is not installed or fails.
pub fn run(config: &EchoCostConfig) -> Result<Experiment, LabError> {
    if config.packets == 0 {
        return Err(LabError::Config("echo-cost needs at least one packet".into()));
    }
    let mut result = Experiment::new("echo-cost");
    let family = if config.ipv6 { "IPv6" } else { "IPv4" };
    let selected = |traffic: &Traffic| config.traffic.is_none_or(|only| only == *traffic);
    let few = config.packets;
    for traffic in Traffic::ALL.into_iter().filter(selected) {
        let burst = traffic.burst_frames(config);
        let row = if config.callgrind {
            let per_packet = instructions_per_packet(traffic, config)?;
            result.figure(&traffic.figure("instructions"), round_to_tenths(per_packet));
            json!({"traffic": traffic.name(), "family": family, "burst": burst,
                "instructions_per_packet": per_packet})
        } else {
            let start = Instant::now();
            let echoed = traffic.echo(few, config)?;
            let ns_per_packet = start.elapsed().as_nanos() as f64 / echoed as f64;
            result.figure("packets", echoed as f64);
            result.figure(&traffic.figure("ns"), round_to_tenths(ns_per_packet));
            json!({"traffic": traffic.name(), "family": family, "burst": burst,
                "packets": echoed, "ns_per_packet": ns_per_packet})
        };
        result.rows.push(row);
    }
    if config.callgrind {
        result.note(format!(
            "callgrind: {} packets minus {few}; a packet is received, delivered to the socket, \
             echoed and sent; the driver that builds and checks the frames is included",
            3 * few
        ));
    }
    result.note(format!(
        "one-flow: {PAYLOAD_BYTES} bytes of payload, {family}, bursts of {}; the device fills in the \
         checksums of the replies",
        config.burst
    ));
    result.note("one-flow-timed: the same, with the service times that `--metrics` measures");
    result.note(format!(
        "random-flows: {FLOW_COUNT} flows in random order, payloads of {MIN_PAYLOAD_BYTES} to \
         {MAX_PAYLOAD_BYTES} bytes, bursts of {BURST_FRAMES}, or of 1 (singly); the stack computes \
         the checksums of requests and replies; the driver copies each frame and compares each reply \
         to the last byte"
    ));
    result.note(format!(
        "tcp: {PAYLOAD_BYTES} bytes on each of {} connections between two stacks, of which one echoes and \
         one checks and sends again; a message is received, read from a socket, answered and sent by \
         one of them, without a device; the stack computes the checksums",
        tcp::CONNECTIONS
    ));
    Ok(result)
}

fn round_to_tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Instructions of the echo of a packet: those of three times as many packets as `config` says without
/// those of that number, so that the start does not count.
pub(super) fn instructions_per_packet(
    traffic: Traffic,
    config: &EchoCostConfig,
) -> Result<f64, LabError> {
    let (few, many) = (config.packets, 3 * config.packets);
    let instructions = count_instructions(many, traffic, config)?
        .saturating_sub(count_instructions(few, traffic, config)?);
    Ok(instructions as f64 / (many - few) as f64)
}

/// Echoes `packets` packets of one flow and returns the number of correct echoes, whose service times
/// were measured if `is_timed`.
fn echo_one_flow(packets: u64, config: &EchoCostConfig, is_timed: bool) -> Result<u64, LabError> {
    let EchoCostConfig { ipv6, sockets, .. } = *config;
    let mut testbed = EchoTestbed::with_sockets(ipv6, Flows::One, ChecksumMode::Device, sockets)?;
    testbed.resolve_driver()?;
    if is_timed {
        testbed.measure_times();
    }
    let template = FrameTemplate::new(&testbed.addressing);
    let payload: Vec<u8> = (0..PAYLOAD_BYTES).map(|i| i as u8).collect();
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(&payload);
    template.write_headers(0, &mut frame, sum(&payload));
    let expected = testbed.expected_echo(0, &payload);
    let mut echoed = 0;
    while echoed < packets {
        let burst = (packets - echoed).min(config.burst as u64) as usize;
        testbed.driver.transmit_copies(burst, &frame);
        testbed.serve(burst)?;
        let echo_count = testbed.receive_echoes(&expected);
        if echo_count != burst {
            return Err(missing_echoes(burst, echo_count));
        }
        echoed += echo_count as u64;
    }
    // The packets of the last bursts wait for the next time.
    let timed = testbed.timed_packets();
    if is_timed && timed + 7 * (config.burst as u64) < echoed {
        return Err(LabError::Config(format!("{echoed} echoes, the times of {timed}")));
    }
    Ok(echoed)
}

fn missing_echoes(sent: usize, echoed: usize) -> LabError {
    LabError::Config(format!("sent {sent} packets, got {echoed} correct echoes"))
}

/// Runs this executable again under callgrind and returns the instructions that callgrind
/// counted.
fn count_instructions(
    packets: u64,
    traffic: Traffic,
    config: &EchoCostConfig,
) -> Result<u64, LabError> {
    let executable = programs::laboratory()?;
    let mut command = callgrind(&executable);
    command.args(["echo-cost", "--packets", &packets.to_string(), "--traffic", traffic.name()]);
    command.args(["--socket-count", &config.sockets.to_string()]);
    command.args(["--burst", &config.burst.to_string()]);
    if config.ipv6 {
        command.arg("--ipv6");
    }
    let output = output(&mut command, "valgrind")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    parse_collected(&stderr).filter(|_| output.status.success()).ok_or_else(|| LabError::Command {
        command: "valgrind --tool=callgrind".into(),
        status: output.status.to_string(),
        stderr: stderr.trim().to_owned(),
    })
}

fn callgrind(program: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    command
}

/// The instruction count in `==123== Collected : 4567`.
fn parse_collected(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("Collected :"))?;
    line.rsplit(':').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn echoes_every_packet() {
        for ipv6 in [false, true] {
            let config = EchoCostConfig { ipv6, ..EchoCostConfig::default() };
            for traffic in Traffic::ALL {
                let echoed = traffic.echo(1000, &config).unwrap();
                let whole_bursts = if traffic == Traffic::Tcp { 1024 } else { 1000 };
                assert_eq!(echoed, whole_bursts, "{traffic:?}, IPv6: {ipv6}");
            }
            let config = EchoCostConfig { sockets: PORTS_PER_ADDRESS + 2, burst: 1, ..config };
            assert_eq!(Traffic::OneFlow.echo(1000, &config).unwrap(), 1000, "IPv6: {ipv6}");
        }
    }

    #[test]
    fn figures_name_the_traffic() {
        let config = EchoCostConfig { packets: 100, ..EchoCostConfig::default() };
        let result = run(&config).unwrap();
        let names = [
            "ns_per_packet",
            "ns_per_packet_1024_flows_mixed_sizes_burst_1",
            "ns_per_packet_1024_flows_mixed_sizes_burst_32",
            "ns_per_packet_timed",
            "ns_per_tcp_message",
            "packets",
        ];
        assert!(result.figures.keys().eq(names), "{:?}", result.figures);
        let text = result.to_string();
        assert!(text.contains("random-flows-singly"), "{text}");
        let only = EchoCostConfig { traffic: Some(Traffic::OneFlow), ..config };
        assert!(run(&only).unwrap().figures.keys().eq(["ns_per_packet", "packets"]));
        for traffic in Traffic::ALL {
            assert_eq!(traffic.name().parse::<Traffic>().unwrap(), traffic);
        }
        assert!("two-flows".parse::<Traffic>().unwrap_err().to_string().contains("one-flow"));
    }

    #[test]
    fn parses_the_instruction_count_of_callgrind() {
        let text = "==7== Events    : Ir\n==7== Collected : 123456\n==7==\n";
        assert_eq!(parse_collected(text), Some(123_456));
        assert_eq!(parse_collected("==7== nothing\n"), None);
    }

    #[test]
    fn rejects_zero_packets() {
        let config = EchoCostConfig { packets: 0, ..EchoCostConfig::default() };
        assert!(run(&config).is_err());
    }
}
