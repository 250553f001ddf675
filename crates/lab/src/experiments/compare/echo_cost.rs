//! The experiment `echo-cost`: cost of echoing a small UDP packet through an in-memory device,
//! the stack and a socket, in both directions.
//!
//! Everything runs on one thread: a driver puts frames on the link, the echo server replies, and
//! the driver takes the echoes back. Callgrind counts the instructions. The result is the
//! difference of two runs of different length, so that start-up does not count.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate::device::mem::{MemConfig, MemDevice, wire};
use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_load::template::{Addressing, FrameTemplate, fold, sum};
use tidegate_load::{neighbour, neighbour::NeighbourEvent};

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
}

impl Default for EchoCostConfig {
    fn default() -> Self {
        Self { packets: 100_000, ipv6: false, callgrind: false }
    }
}

impl EchoCostConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { packets: 20_000, ..self }
    }
}

const PAYLOAD_BYTES: usize = 64;
/// Frames on the link at a time.
const BURST_FRAMES: usize = 32;
const ECHO_PORT: u16 = 7777;
const DRIVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

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
    if config.callgrind {
        let (few, many) = (config.packets, 3 * config.packets);
        let instructions = count_instructions(many, config.ipv6)?
            .saturating_sub(count_instructions(few, config.ipv6)?);
        let instructions_per_packet = instructions as f64 / (many - few) as f64;
        result.figure("instructions_per_packet", (instructions_per_packet * 10.0).round() / 10.0);
        result.note(format!(
            "callgrind: {many} packets minus {few}; a packet is received, delivered to the socket, \
             echoed and sent; the driver that builds and checks the frames is included"
        ));
        result
            .rows
            .push(json!({"family": family, "instructions_per_packet": instructions_per_packet}));
    } else {
        let start = Instant::now();
        let echoed = echo(config.packets, config.ipv6)?;
        let ns_per_packet = start.elapsed().as_nanos() as f64 / echoed as f64;
        result.figure("packets", echoed as f64);
        result.figure("ns_per_packet", (ns_per_packet * 10.0).round() / 10.0);
        result
            .rows
            .push(json!({"family": family, "packets": echoed, "ns_per_packet": ns_per_packet}));
    }
    result.note(format!("{PAYLOAD_BYTES} bytes of payload, {family}, bursts of {BURST_FRAMES}"));
    Ok(result)
}

/// The driver's end of the link, and the echo server at the other end.
struct EchoTestbed {
    driver: MemDevice,
    net: Net,
    server: UdpSocket,
    addressing: Addressing,
}

/// Echoes `packets` packets and returns the number of correct echoes.
fn echo(packets: u64, ipv6: bool) -> Result<u64, LabError> {
    let mut testbed = EchoTestbed::new(ipv6)?;
    testbed.resolve_driver()?;
    let template = FrameTemplate::new(&testbed.addressing);
    let payload: Vec<u8> = (0..PAYLOAD_BYTES).map(|i| i as u8).collect();
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(&payload);
    template.write_headers(0, &mut frame, sum(&payload));
    let expected = testbed.expected_echo(&payload);
    let mut echoed = 0;
    while echoed < packets {
        let burst = (packets - echoed).min(BURST_FRAMES as u64) as usize;
        testbed.driver.transmit_copies(burst, &frame);
        testbed.serve(burst)?;
        let echo_count = testbed.receive_echoes(&expected);
        if echo_count != burst {
            return Err(LabError::Config(format!(
                "sent {burst} packets, got {echo_count} correct echoes"
            )));
        }
        echoed += echo_count as u64;
    }
    Ok(echoed)
}

impl EchoTestbed {
    fn new(ipv6: bool) -> Result<Self, LabError> {
        let config_error = |error: &dyn std::fmt::Display| LabError::Config(error.to_string());
        let config = MemConfig::default().macs([DRIVER_MAC, SERVER_MAC]).capacity(256);
        let (driver, device) =
            wire(&config).map_err(LabError::io("cannot create an in-memory link"))?;
        let (server_address, driver_address, cidr): (IpAddr, IpAddr, _) = if ipv6 {
            (
                [0xfd00, 0, 0, 0, 0, 0, 0, 2].into(),
                [0xfd00, 0, 0, 0, 0, 0, 0, 1].into(),
                "fd00::2/64",
            )
        } else {
            ([10, 0, 0, 2].into(), [10, 0, 0, 1].into(), "10.0.0.2/24")
        };
        let cidr = cidr.parse().map_err(|error| config_error(&error))?;
        let net = NetConfig::new(device).address(cidr).seed([7; 16]);
        let net = Net::open(net).map_err(|error| config_error(&error))?;
        let target = SocketAddr::new(server_address, ECHO_PORT);
        let server = UdpSocket::bind(&net, target)
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
            .map_err(LabError::io("cannot bind the echo socket"))?;
        let addressing = Addressing {
            source_mac: DRIVER_MAC,
            target_mac: SERVER_MAC,
            source: driver_address,
            source_count: 1,
            first_port: 40_000,
            port_count: 1,
            target,
        };
        Ok(Self { driver, net, server, addressing })
    }

    /// Sends one packet, and replies to the server's ARP or NDP request for the driver's address.
    fn resolve_driver(&mut self) -> Result<(), LabError> {
        let template = FrameTemplate::new(&self.addressing);
        let mut frame = vec![0; template.header_bytes()];
        template.write_headers(0, &mut frame, 0);
        self.driver.stage(0, &frame);
        self.driver.flush(1);
        for _ in 0..100 {
            self.serve_once()?;
            let mut reply = None;
            let mut echoed = false;
            self.driver.receive_bytes(BURST_FRAMES, |bytes| {
                match neighbour::parse(bytes, &self.addressing, self.addressing.target.ip()) {
                    Some(NeighbourEvent::Reply(frame)) => reply = Some(frame),
                    Some(NeighbourEvent::Resolved(_)) => {}
                    None => echoed |= bytes.get(12..14) == frame.get(12..14),
                }
            });
            if let Some(reply) = reply {
                self.driver.stage(0, &reply);
                self.driver.flush(1);
            } else if echoed {
                return Ok(());
            }
        }
        Err(LabError::Config("the echo server did not reply to the first packet".into()))
    }

    /// The expected echo frame, to the last byte. The server's stack leaves the UDP checksum to the
    /// device. The in-memory device computes none: the field holds the sum of the pseudo-header.
    fn expected_echo(&self, payload: &[u8]) -> Vec<u8> {
        let Addressing { source, first_port, target, .. } = self.addressing;
        let template = FrameTemplate::new(&Addressing {
            source_mac: SERVER_MAC,
            target_mac: DRIVER_MAC,
            source: target.ip(),
            first_port: target.port(),
            target: SocketAddr::new(source, first_port),
            ..self.addressing
        });
        let mut frame = vec![0; template.header_bytes()];
        frame.extend(payload);
        template.write_headers(0, &mut frame, sum(payload));
        let udp = template.header_bytes() - 8;
        let addresses = if target.is_ipv6() { 22..54 } else { 26..34 };
        let pseudo = sum(&frame[addresses]) + 17 + (payload.len() + 8) as u32;
        frame[udp + 6..udp + 8].copy_from_slice(&fold(pseudo).to_be_bytes());
        frame
    }

    /// Receives the echoed frames and returns the number of correct echoes. Also replies to the
    /// ARP or NDP requests that the server repeats from time to time.
    fn receive_echoes(&mut self, expected: &[u8]) -> usize {
        let (mut echoes, mut others) = (0, Vec::new());
        self.driver.receive_bytes(2 * BURST_FRAMES, |bytes| {
            if bytes == expected {
                echoes += 1;
            } else {
                store_frame(&mut others, bytes);
            }
        });
        for frame in others {
            let event = neighbour::parse(&frame, &self.addressing, self.addressing.target.ip());
            if let Some(NeighbourEvent::Reply(reply)) = event {
                self.driver.stage(0, &reply);
                self.driver.flush(1);
            }
        }
        echoes
    }

    /// Lets the server echo `burst` packets.
    fn serve(&mut self, burst: usize) -> Result<(), LabError> {
        let mut served = 0;
        // Each call takes up to a quota. Too few replies mean that packets were lost, which the
        // caller detects.
        for _ in 0..2 * BURST_FRAMES {
            served += self.serve_once()?;
            if served >= burst {
                break;
            }
        }
        Ok(())
    }

    /// Receives and replies once; returns the number of packets echoed.
    fn serve_once(&mut self) -> Result<usize, LabError> {
        // The error text is built only on an error.
        self.net.run_once().map_err(|error| LabError::io("the device failed")(error))?;
        let answered = self.server.exchange_in_place(|request| Some(request.len));
        match answered {
            Ok(count) => Ok(count),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(LabError::io("the echo socket failed")(error)),
        }
    }
}

#[cold]
fn store_frame(others: &mut Vec<Vec<u8>>, frame: &[u8]) {
    others.push(frame.to_vec());
}

/// Runs this executable again under callgrind and returns the instructions that callgrind
/// counted.
fn count_instructions(packets: u64, ipv6: bool) -> Result<u64, LabError> {
    let executable = programs::laboratory()?;
    let mut command = callgrind(&executable);
    command.args(["echo-cost", "--packets", &packets.to_string()]);
    if ipv6 {
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
            assert_eq!(echo(1000, ipv6).unwrap(), 1000);
        }
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
