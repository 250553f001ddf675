//! `lab syn-flood`: whether one can still connect while strangers send as many
//! SYN segments as they can.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_wire::{MacAddr, TcpFlags};

use super::{PORT, TcpConfig, cores, median};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::{
    Bench, CLIENT_ADDRESS, GIGABIT_LINE_PPS, LOAD_ADDRESS, LOAD_MAC, Meter, OWN_ADDRESS, PREFIX,
    ReceiveWork, Receiver,
};
use crate::livelock::subject::this_program;
use crate::load::segment::Segment;
use crate::load::{LinkKind, TcpLoadConfig, TcpLoadReport, load_tcp};
use crate::process::Process;

/// Connections per second of the client.
const CONNECTS_PER_SECOND: f64 = 100.0;
/// Its connections at the same time: more than are due in the time that a lost
/// segment costs.
const SLOTS: usize = 1_000;
/// A source is known when it was seen in two periods of a second in a row, and
/// the first one is not whole.
const LEARNING_SECONDS: f64 = 4.0;
/// From the beginning of the flood to that of the measurement.
const SETTLING_SECONDS: f64 = 2.0;
/// A segment that is lost costs a second: a shorter look would miss what comes
/// of it.
const LEAST_SECONDS: f64 = 5.0;
/// Who sends the flood: RFC 2544's addresses.
const FIRST_STRANGER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const STRANGERS: u32 = 8_192;

/// A way to serve, and how fast strangers send meanwhile: `None` is as fast as
/// they can, which may be more than anybody can look at.
struct Way {
    name: &'static str,
    figure: &'static str,
    flags: &'static [&'static str],
    flood_pps: Option<f64>,
    runs: Vec<Run>,
}

struct Run {
    success: f64,
    offered_pps: f64,
    load: TcpLoadReport,
}

/// A client that connects all through the flood.
///
/// # Errors
/// When namespaces cannot be made or the server does not start.
pub fn run(config: &TcpConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let way = |name, figure, flags, flood_pps| {
        let runs = Vec::new();
        Way { name, figure, flags, flood_pps, runs }
    };
    let (admission, line) = (&["--admission"][..], Some(GIGABIT_LINE_PPS));
    let mut ways = [
        way("admission", "connect_success", admission, line),
        way("drop-tail", "connect_success_droptail", &[], line),
        way("admission, overrun", "connect_success_overrun", admission, None),
        way("drop-tail, overrun", "connect_success_droptail_overrun", &[], None),
    ];
    for repeat in 1..=config.repeats {
        for way in &mut ways {
            let run = measure(&bench, way, config.seconds)?;
            eprintln!(
                "{repeat} {:<20} {:.2} % of {CONNECTS_PER_SECOND} connections/s, p50 {:.0} us, p99 \
                 {:.0} us; {:.0} SYN/s",
                way.name,
                run.success * 100.0,
                run.load.connect_latency.p50_us,
                run.load.connect_latency.p99_us,
                run.offered_pps
            );
            way.runs.push(run);
        }
    }
    let mut result = Experiment::new("syn-flood");
    for way in &ways {
        let of = |figure: fn(&Run) -> f64| median(way.runs.iter().map(figure));
        result.figure(way.figure, of(|run| run.success));
        result.rows.push(json!({
            "server": way.name,
            "syn_per_second": of(|run| run.offered_pps).round(),
            "connect_success": of(|run| run.success),
            "connect_p50_us": of(|run| run.load.connect_latency.p50_us),
            "connect_p99_us": of(|run| run.load.connect_latency.p99_us),
            "broken": way.runs.iter().map(|run| run.load.broken).sum::<u64>(),
        }));
    }
    result.note(format!(
        "a client on kernel sockets makes {CONNECTS_PER_SECOND} connections/s, sends 64 bytes on \
         each and reads them back, for {} s and 5 at least, while {STRANGERS} strangers send SYN \
         segments as fast as a line of 1 Gb/s is, or, in an overrun, as core 0 can; core 1 serves; \
         success is what was answered over what was due",
        config.seconds
    ));
    Ok(result)
}

fn measure(bench: &Bench, way: &Way, seconds: f64) -> Result<Run, LabError> {
    bench.prepare(Receiver::Server)?;
    let end = &bench.pair.b;
    let (core, port) = (bench.server_core.to_string(), PORT.to_string());
    let address = format!("{OWN_ADDRESS}/{PREFIX}");
    // So that answers to strangers find a way out.
    let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
    let mut command = end.namespace.command_on_core(bench.server_core, this_program()?);
    command.args(["serve", "echo", "--tcp", "--listen", &port, "--json", "--cpu", &core]);
    command.args(["--iface", &end.device, "--address", &address, "--route", &route]);
    let mut server = Process::start("tidegate", command.args(way.flags))?;
    server.wait_for_line()?;
    let seconds = seconds.max(LEAST_SECONDS);
    let mut flood = bench.flood_frames(&frames(bench.pair.b.mac), ReceiveWork::Server)?;
    let load = TcpLoadConfig {
        connections: SLOTS,
        connect_each: true,
        source: Some(CLIENT_ADDRESS.into()),
        rate_per_second: Some(CONNECTS_PER_SECOND),
        // Known before the flood, and measured all through it.
        warm_up_seconds: LEARNING_SECONDS + SETTLING_SECONDS,
        seconds,
        core: Some(bench.load_core),
        ..TcpLoadConfig::new(LinkKind::Kernel, (OWN_ADDRESS, PORT).into())
    };
    let client = bench.pair.a.namespace.spawn(move || load_tcp(&load))?;
    thread::sleep(Duration::from_secs_f64(LEARNING_SECONDS));
    let time = Duration::from_secs_f64(seconds + SETTLING_SECONDS);
    let measured = bench.measure(&mut flood, &Meter::Answers, way.flood_pps, Duration::ZERO, time);
    let load = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    flood.set_rate(Some(0.0))?;
    server.stop();
    let due = CONNECTS_PER_SECOND * load.seconds;
    let success = (load.requests as f64 / due).min(1.0);
    Ok(Run { success, offered_pps: measured?.offered_pps, load })
}

/// SYN segments of all strangers.
fn frames(target: [u8; 6]) -> Vec<Vec<u8>> {
    let first = u32::from(FIRST_STRANGER);
    (0..STRANGERS).filter_map(|number| syn(target, (first + number).into(), number)).collect()
}

fn syn(target: [u8; 6], source: Ipv4Addr, number: u32) -> Option<Vec<u8>> {
    let port = 1024 + (number.wrapping_mul(7919) % 60_000) as u16;
    let segment = Segment {
        source: (MacAddr(LOAD_MAC), SocketAddrV4::new(source, port)),
        target: (MacAddr(target), SocketAddrV4::new(OWN_ADDRESS, PORT)),
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
    fn a_stranger_sends_a_whole_segment() {
        let frames = frames([2, 0, 0, 0, 0, 1]);
        assert_eq!(frames.len(), STRANGERS as usize);
        let (ethernet, packet) = EthernetHeader::parse(&frames[8191]).unwrap();
        assert_eq!(ethernet.ethertype, EtherType::IPV4);
        let (ip, segment) = Ipv4Header::parse(packet).unwrap();
        assert!(verify_v4(ip.source, ip.destination, segment).is_ok());
        let (tcp, payload) = TcpHeader::parse(segment).unwrap();
        assert_eq!((tcp.flags, tcp.destination_port, payload.len()), (TcpFlags::SYN, PORT, 0));
        assert_ne!(frames[0], frames[1]);
    }
}
