//! The experiment `echo-cost`: what the echo of a small UDP packet costs
//! through a port in memory, the stack and a socket, both directions.
//!
//! Everything runs on one thread: a driver puts frames on the wire, the echo
//! server answers them, the driver takes the echoes back. Instructions are
//! counted by callgrind, as the difference of two runs of different length, so
//! that starting up does not count.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate::port::mem::{MemConfig, MemPort, wire};
use tidegate::{Net, NetConfig, UdpSocket};

use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::template::{Addressing, Template, fold, sum};
use crate::load::{neighbour, neighbour::Event};
use crate::netns::output;

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EchoCostConfig {
    /// How many packets to echo.
    pub packets: u64,
    /// Over IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Count instructions with callgrind.
    pub callgrind: bool,
}

impl Default for EchoCostConfig {
    fn default() -> Self {
        Self { packets: 100_000, ipv6: false, callgrind: false }
    }
}

const PAYLOAD_BYTES: usize = 64;
/// Frames on the wire at a time.
const BURST: usize = 32;
const ECHO_PORT: u16 = 7777;
const DRIVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// Runs the experiment.
///
/// # Errors
/// When an echo is missing or wrong, or valgrind is not installed or fails.
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
        let each = instructions as f64 / (many - few) as f64;
        result.figure("instructions_per_packet", (each * 10.0).round() / 10.0);
        result.note(format!(
            "callgrind, {many} packets less {few}; one packet is received, handed to the socket, \
             answered and sent; the driver that makes and checks the frames is counted too"
        ));
        result.rows.push(json!({"family": family, "instructions_per_packet": each}));
    } else {
        let start = Instant::now();
        let echoed = echo(config.packets, config.ipv6)?;
        let each = start.elapsed().as_nanos() as f64 / echoed as f64;
        result.figure("packets", echoed as f64);
        result.figure("ns_per_packet", (each * 10.0).round() / 10.0);
        result.rows.push(json!({"family": family, "packets": echoed, "ns_per_packet": each}));
    }
    result.note(format!("{PAYLOAD_BYTES} bytes of payload, {family}, bursts of {BURST}"));
    Ok(result)
}

/// The driver's end of the wire and the server at the other.
struct Bench {
    driver: MemPort,
    net: Net,
    server: UdpSocket,
    addressing: Addressing,
}

/// Echoes `packets` packets and returns how many came back, all of them right.
fn echo(packets: u64, ipv6: bool) -> Result<u64, LabError> {
    let mut bench = Bench::new(ipv6)?;
    bench.meet()?;
    let template = Template::new(&bench.addressing);
    let payload: Vec<u8> = (0..PAYLOAD_BYTES).map(|i| i as u8).collect();
    let mut frame = vec![0; template.header_bytes()];
    frame.extend(&payload);
    template.write(0, &mut frame, sum(&payload));
    let expected = bench.expected_echo(&payload);
    let mut echoed = 0;
    while echoed < packets {
        let burst = (packets - echoed).min(BURST as u64) as usize;
        bench.driver.transmit_copies(burst, &frame);
        bench.serve(burst)?;
        let came = bench.take_echoes(&expected);
        if came != burst {
            return Err(LabError::Config(format!("sent {burst} packets, got {came} right echoes")));
        }
        echoed += came as u64;
    }
    Ok(echoed)
}

impl Bench {
    fn new(ipv6: bool) -> Result<Self, LabError> {
        let opened = |error: &dyn std::fmt::Display| LabError::Config(error.to_string());
        let config =
            MemConfig { macs: [DRIVER_MAC, SERVER_MAC], capacity: 256, ..MemConfig::default() };
        let (driver, port) = wire(&config).map_err(LabError::io("cannot make a wire"))?;
        let (own, driver_address, cidr): (IpAddr, IpAddr, _) = if ipv6 {
            (
                [0xfd00, 0, 0, 0, 0, 0, 0, 2].into(),
                [0xfd00, 0, 0, 0, 0, 0, 0, 1].into(),
                "fd00::2/64",
            )
        } else {
            ([10, 0, 0, 2].into(), [10, 0, 0, 1].into(), "10.0.0.2/24")
        };
        let cidr = cidr.parse().map_err(|error| opened(&error))?;
        let net = NetConfig::new(port).address(cidr).seed([7; 16]);
        let net = Net::open(net).map_err(|error| opened(&error))?;
        let target = SocketAddr::new(own, ECHO_PORT);
        let server = UdpSocket::bind(&net, target)
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
            .map_err(LabError::io("cannot bind the echo socket"))?;
        let addressing = Addressing {
            source_mac: DRIVER_MAC,
            target_mac: SERVER_MAC,
            source: driver_address,
            sources: 1,
            first_port: 40_000,
            ports: 1,
            target,
        };
        Ok(Self { driver, net, server, addressing })
    }

    /// Sends one packet and answers the server's question who the driver is.
    fn meet(&mut self) -> Result<(), LabError> {
        let template = Template::new(&self.addressing);
        let mut frame = vec![0; template.header_bytes()];
        template.write(0, &mut frame, 0);
        self.driver.stage(0, &frame);
        self.driver.flush(1);
        for _ in 0..100 {
            self.round()?;
            let mut reply = None;
            let mut echoed = false;
            self.driver.receive_bytes(BURST, |bytes| {
                match neighbour::read(bytes, &self.addressing, self.addressing.target.ip()) {
                    Some(Event::Reply(frame)) => reply = Some(frame),
                    Some(Event::Found(_)) => {}
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
        Err(LabError::Config("the echo server did not answer the first packet".into()))
    }

    /// The frame that comes back, to the last byte. The server's stack leaves
    /// the UDP checksum to the port, which is none: the field holds the sum of
    /// the pseudo-header.
    fn expected_echo(&self, payload: &[u8]) -> Vec<u8> {
        let Addressing { source, first_port, target, .. } = self.addressing;
        let template = Template::new(&Addressing {
            source_mac: SERVER_MAC,
            target_mac: DRIVER_MAC,
            source: target.ip(),
            first_port: target.port(),
            target: SocketAddr::new(source, first_port),
            ..self.addressing
        });
        let mut frame = vec![0; template.header_bytes()];
        frame.extend(payload);
        template.write(0, &mut frame, sum(payload));
        let udp = template.header_bytes() - 8;
        let addresses = if target.is_ipv6() { 22..54 } else { 26..34 };
        let pseudo = sum(&frame[addresses]) + 17 + (payload.len() + 8) as u32;
        frame[udp + 6..udp + 8].copy_from_slice(&fold(pseudo).to_be_bytes());
        frame
    }

    /// Takes what came back and returns how many are right echoes. The server
    /// asks again who the driver is from time to time, which is answered.
    fn take_echoes(&mut self, expected: &[u8]) -> usize {
        let (mut echoes, mut others) = (0, Vec::new());
        self.driver.receive_bytes(2 * BURST, |bytes| {
            if bytes == expected {
                echoes += 1;
            } else {
                keep(&mut others, bytes);
            }
        });
        for frame in others {
            let event = neighbour::read(&frame, &self.addressing, self.addressing.target.ip());
            if let Some(Event::Reply(reply)) = event {
                self.driver.stage(0, &reply);
                self.driver.flush(1);
            }
        }
        echoes
    }

    /// Lets the server answer `burst` packets.
    fn serve(&mut self, burst: usize) -> Result<(), LabError> {
        let mut served = 0;
        // Each call takes up to a quota; an empty one means that packets were
        // lost, which the caller will see.
        for _ in 0..2 * BURST {
            served += self.round()?;
            if served >= burst {
                break;
            }
        }
        Ok(())
    }

    /// Receives and answers once; returns how many packets were answered.
    fn round(&mut self) -> Result<usize, LabError> {
        // What an error says is made only when there is one.
        self.net.run_once().map_err(|error| LabError::io("the port failed")(error))?;
        let answered = self.server.exchange_in_place(|request| Some(request.len));
        match answered {
            Ok(count) => Ok(count),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(LabError::io("the echo socket failed")(error)),
        }
    }
}

#[cold]
fn keep(others: &mut Vec<Vec<u8>>, frame: &[u8]) {
    others.push(frame.to_vec());
}

/// Runs this program again under callgrind and returns the instructions that
/// it counted.
fn count_instructions(packets: u64, ipv6: bool) -> Result<u64, LabError> {
    let program = std::env::current_exe().map_err(LabError::io("cannot find this program"))?;
    let mut command = callgrind(&program);
    command.args(["lab", "echo-cost", "--packets", &packets.to_string()]);
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

/// The count in `==123== Collected : 4567`.
fn parse_collected(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("Collected :"))?;
    line.rsplit(':').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_is_echoed() {
        for ipv6 in [false, true] {
            assert_eq!(echo(1000, ipv6).unwrap(), 1000);
        }
    }

    #[test]
    fn the_count_is_read_from_what_callgrind_says() {
        let text = "==7== Events    : Ir\n==7== Collected : 123456\n==7==\n";
        assert_eq!(parse_collected(text), Some(123_456));
        assert_eq!(parse_collected("==7== nothing\n"), None);
    }

    #[test]
    fn no_packets_are_refused() {
        let config = EchoCostConfig { packets: 0, ..EchoCostConfig::default() };
        assert!(run(&config).is_err());
    }
}
