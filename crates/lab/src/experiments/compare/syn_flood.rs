//! Experiment syn-flood: success of connection attempts during a flood of SYN segments from unknown
//! sources.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig, TcpLoadReport, load_tcp};
use tidegate_wire::{MacAddr, TcpFlags};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::flood::{
    CLIENT_ADDRESS, FloodTestbed, GIGABIT_LINE_PPS, GoodputMeter, LOAD_ADDRESS, LOAD_MAC,
    PREFIX_BITS, Receiver, TIDEGATE_ADDRESS,
};
use crate::testbed::load::segment::Segment;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{ECHO_PORT, TcpLabConfig, choose_cores};

/// Connections per second of the client.
const CONNECTS_PER_SECOND: f64 = 100.0;
/// Maximum number of simultaneous connections of the client: more than are due during the
/// retransmission delay of a lost segment.
const MAX_CONNECTIONS: usize = 1_000;
/// Learning time in seconds. A source becomes known when it was seen in two successive periods of
/// one second, and the first period is incomplete.
const LEARNING_SECONDS: f64 = 4.0;
/// Seconds from the start of the flood to the start of the measurement.
const SETTLING_SECONDS: f64 = 2.0;
/// Minimum duration in seconds. A lost segment delays a connection by one second, so a shorter
/// measurement would miss its effect.
const MIN_SECONDS: f64 = 5.0;
/// First source address of the flood, from the range of RFC 2544.
const FIRST_FLOOD_SOURCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const FLOOD_SOURCES: u32 = 8_192;

/// Server configuration and rate of the flood. `None` is the maximum rate, which may exceed what
/// the receiver can examine.
struct FloodCase {
    name: &'static str,
    figure: &'static str,
    flags: &'static [&'static str],
    flood_pps: Option<f64>,
    runs: Vec<FloodRun>,
}

struct FloodRun {
    success: f64,
    offered_pps: f64,
    load: TcpLoadReport,
}

/// Measures a client that connects throughout the flood.
///
/// # Errors
/// When namespaces cannot be created or the server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let case = |name, figure, flags, flood_pps| {
        let runs = Vec::new();
        FloodCase { name, figure, flags, flood_pps, runs }
    };
    let (admission, line) = (&["--admission"][..], Some(GIGABIT_LINE_PPS));
    let mut cases = [
        case("admission", "connect_success", admission, line),
        case("drop-tail", "connect_success_droptail", &[], line),
        case("admission, overrun", "connect_success_overrun", admission, None),
        case("drop-tail, overrun", "connect_success_droptail_overrun", &[], None),
    ];
    let progress = Progress::new(cases.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for case in &mut cases {
            let run = measure(&testbed, case, config.seconds)?;
            progress.step(format_args!(
                "{repeat} {:<20} {:.2} % of {CONNECTS_PER_SECOND} connections/s, p50 {:.0} us, p99 \
                 {:.0} us; {:.0} SYN/s",
                case.name,
                run.success * 100.0,
                run.load.connect_latency.p50_us,
                run.load.connect_latency.p99_us,
                run.offered_pps
            ));
            case.runs.push(run);
        }
    }
    let mut result = Experiment::new("syn-flood");
    for case in &cases {
        let median_of = |figure: fn(&FloodRun) -> f64| median(case.runs.iter().map(figure));
        result.figure(case.figure, median_of(|run| run.success));
        result.rows.push(json!({
            "server": case.name,
            "syn_per_second": median_of(|run| run.offered_pps).round(),
            "connect_success": median_of(|run| run.success),
            "connect_p50_us": median_of(|run| run.load.connect_latency.p50_us),
            "connect_p99_us": median_of(|run| run.load.connect_latency.p99_us),
            "broken": case.runs.iter().map(|run| run.load.broken).sum::<u64>(),
        }));
    }
    result.note(format!(
        "a client on kernel sockets makes {CONNECTS_PER_SECOND} connections/s, sends 64 bytes on \
         each and reads them back, for {} s and 5 at least, while {FLOOD_SOURCES} unknown sources send SYN \
         segments at the line rate of 1 Gb/s or, in an overrun, as fast as core 0 can; core 1 serves; \
         success is the number of answered connections over the number due",
        config.seconds
    ));
    Ok(result)
}

fn measure(testbed: &FloodTestbed, case: &FloodCase, seconds: f64) -> Result<FloodRun, LabError> {
    testbed.prepare(Receiver::Server)?;
    let end = &testbed.pair.b;
    let (core, port) = (testbed.server_core.to_string(), ECHO_PORT.to_string());
    let address = format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}");
    // Default route for the replies to the flood's sources.
    let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
    let mut command = end.namespace.command_on_core(testbed.server_core, programs::tidegate()?);
    command.args(["serve", "echo", "--tcp", "--listen", &port, "--json", "--cpu", &core]);
    command.args(["--iface", &end.device, "--address", &address, "--route", &route]);
    let mut server = ServerProcess::start("tidegate", command.args(case.flags))?;
    server.wait_for_first_line()?;
    let seconds = seconds.max(MIN_SECONDS);
    let mut flood = testbed.flood_frames(&syn_frames(testbed.pair.b.mac), ReceiveWork::Server)?;
    let load = TcpLoadConfig {
        connections: MAX_CONNECTIONS,
        connection_per_request: true,
        source: Some(CLIENT_ADDRESS.into()),
        rate_per_second: Some(CONNECTS_PER_SECOND),
        // The client becomes known before the flood and is measured throughout the flood.
        warm_up_seconds: LEARNING_SECONDS + SETTLING_SECONDS,
        seconds,
        core: Some(testbed.load_core),
        ..TcpLoadConfig::new(LinkKind::Kernel, (TIDEGATE_ADDRESS, ECHO_PORT).into())
    };
    let client = testbed.pair.a.namespace.spawn(move || Ok(load_tcp(&load)?))?;
    thread::sleep(Duration::from_secs_f64(LEARNING_SECONDS));
    let time = Duration::from_secs_f64(seconds + SETTLING_SECONDS);
    let measured = testbed.measure(
        &mut flood,
        &GoodputMeter::TransmittedFrames,
        case.flood_pps,
        Duration::ZERO,
        time,
    );
    let load = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    flood.set_rate(Some(0.0))?;
    server.stop();
    let due = CONNECTS_PER_SECOND * load.seconds;
    let success = (load.requests as f64 / due).min(1.0);
    Ok(FloodRun { success, offered_pps: measured?.offered_pps, load })
}

/// Returns one SYN segment of each source of the flood.
fn syn_frames(target: [u8; 6]) -> Vec<Vec<u8>> {
    let first = u32::from(FIRST_FLOOD_SOURCE);
    (0..FLOOD_SOURCES)
        .filter_map(|number| syn_frame(target, (first + number).into(), number))
        .collect()
}

fn syn_frame(target: [u8; 6], source: Ipv4Addr, number: u32) -> Option<Vec<u8>> {
    let port = 1024 + (number.wrapping_mul(7919) % 60_000) as u16;
    let segment = Segment {
        source: (MacAddr(LOAD_MAC), SocketAddrV4::new(source, port)),
        target: (MacAddr(target), SocketAddrV4::new(TIDEGATE_ADDRESS, ECHO_PORT)),
        sequence: number.wrapping_mul(0x9e37_79b9),
        acknowledgement: 0,
        flags: TcpFlags::SYN,
        payload: &[],
    };
    segment.frame()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_wire::tcp::verify_v4;
    use tidegate_wire::{EtherType, EthernetHeader, Ipv4Header, TcpHeader};

    #[test]
    fn flood_frames_are_valid_syn_segments() {
        let frames = syn_frames([2, 0, 0, 0, 0, 1]);
        assert_eq!(frames.len(), FLOOD_SOURCES as usize);
        let (ethernet, packet) = EthernetHeader::parse(&frames[8191]).unwrap();
        assert_eq!(ethernet.ethertype, EtherType::IPV4);
        let (ip, segment) = Ipv4Header::parse(packet).unwrap();
        assert!(verify_v4(ip.source, ip.destination, segment).is_ok());
        let (tcp, payload) = TcpHeader::parse(segment).unwrap();
        assert_eq!((tcp.flags, tcp.destination_port, payload.len()), (TcpFlags::SYN, ECHO_PORT, 0));
        assert_ne!(frames[0], frames[1]);
    }
}
