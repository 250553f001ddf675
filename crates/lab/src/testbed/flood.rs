//! Testbed for floods: the veth link to the server, and the accounting of CPU time.
//!
//! One core generates the flood and receives the replies. The other core does all other work:
//! the receive work of the server's device, the softirqs, the service.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use tidegate_apps::ServeCounters;
use tidegate_load::Addressing;

use crate::error::LabError;
use crate::testbed::cpu::{CoreTicks, CoreUsage};
use crate::testbed::load::arp_responder::ArpResponder;
use crate::testbed::load::flood::{self, Flood};
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::receive_timer;
use crate::testbed::receive_work::ReceiveWork;

/// Kernel address for clients at the load generator's end of the link.
pub(crate) const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
pub(crate) const LOAD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
pub(crate) const TIDEGATE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
pub(crate) const PREFIX_BITS: u8 = 24;
/// A hardware address of no device: the kernel drops frames to it before any protocol work.
pub(crate) const LOAD_MAC: [u8; 6] = [2, 0xf1, 0x00, 0xd0, 0, 1];
const FLOW_COUNT: u16 = 64;
const FIRST_SOURCE_PORT: u16 = 20_000;

/// Limit of the wait for the first frame of a flood.
const FLOOD_TIMEOUT: Duration = Duration::from_secs(60);

/// The receiver of the packets for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The kernel's NAPI context, in softirqs of the server's core.
    Kernel,
    /// The server itself, through AF_XDP.
    Server,
}

/// Two namespaces, a veth pair between them, and one core for each.
pub(crate) struct FloodTestbed {
    /// The load generator is in `a`, the servers are in `b`.
    pub(crate) pair: VethPair,
    /// The core that runs the server.
    pub(crate) server_core: usize,
    /// The core that generates the load.
    pub(crate) load_core: usize,
    _responder: ArpResponder,
}

/// Measurement of a server under one load.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct FloodMeasurement {
    /// Packets offered per second.
    pub offered_pps: f64,
    /// Packets per second that the application processed. For a server without readable
    /// counters: replies sent per second.
    pub goodput_pps: f64,
    /// CPU usage of the server's core.
    pub server_core: CoreUsage,
    /// CPU usage of the load generator's core.
    pub load_core: CoreUsage,
}

impl FloodMeasurement {
    /// Mean of several measurements of equal length.
    pub(crate) fn mean(runs: &[Self]) -> Self {
        let mean =
            |figure: fn(&Self) -> f64| runs.iter().map(figure).sum::<f64>() / runs.len() as f64;
        let cores = |core: fn(&Self) -> CoreUsage| CoreUsage::mean(runs.iter().map(core));
        Self {
            offered_pps: mean(|run| run.offered_pps),
            goodput_pps: mean(|run| run.goodput_pps),
            server_core: cores(|run| run.server_core),
            load_core: cores(|run| run.load_core),
        }
    }
}

/// Source of a server's goodput count.
#[derive(Clone, Debug)]
pub(crate) enum GoodputMeter {
    /// The file in which the server keeps its counters.
    CounterFile(PathBuf),
    /// The server's device: every frame that it transmits is a reply.
    TransmittedFrames,
}

/// Source addresses of a flood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FloodSource {
    /// One host with several ports.
    #[default]
    OneHost,
    /// As many hosts as frames, from another network (the addresses of RFC 2544).
    UnknownSources,
    /// This many hosts of that network, with one port each.
    Sources(u32),
}

/// Frames of 64 bytes per second that fill a line of 1 Gb/s. Each frame takes 20 further bytes
/// on the wire (RFC 2544, section 20).
pub(crate) const GIGABIT_LINE_PPS: f64 = 1_488_095.0;

/// Number of unknown sources.
pub(crate) const UNKNOWN_SOURCE_COUNT: u32 = 8192;
const FIRST_UNKNOWN_SOURCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The network of the unknown sources.
pub(crate) const UNKNOWN_SOURCES_NETWORK: &str = "198.18.0.0/15";

impl FloodSource {
    fn addressing(self, target: SocketAddr, target_mac: [u8; 6]) -> Addressing {
        let (source, source_count, port_count) = match self {
            Self::OneHost => (LOAD_ADDRESS, 1, FLOW_COUNT),
            Self::UnknownSources => (FIRST_UNKNOWN_SOURCE, UNKNOWN_SOURCE_COUNT, 1),
            Self::Sources(count) => (FIRST_UNKNOWN_SOURCE, count, 1),
        };
        Addressing {
            source_mac: LOAD_MAC,
            target_mac,
            source: IpAddr::V4(source),
            source_count,
            first_port: FIRST_SOURCE_PORT,
            port_count,
            target,
        }
    }

    /// Number of distinct flows in a flood.
    pub(crate) fn flow_count(self) -> usize {
        match self {
            Self::OneHost => FLOW_COUNT.into(),
            Self::UnknownSources => UNKNOWN_SOURCE_COUNT as usize,
            Self::Sources(count) => count as usize,
        }
    }
}

impl FloodTestbed {
    pub(crate) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let config = VethConfig {
            a: vec![format!("{CLIENT_ADDRESS}/{PREFIX_BITS}")],
            b: vec![format!("{KERNEL_ADDRESS}/{PREFIX_BITS}")],
        };
        let pair = VethPair::as_on_a_wire(&config)?;
        // The load generator's core receives the replies.
        pair.a.set_rps(&[load_core])?;
        let unused_target = SocketAddr::new(KERNEL_ADDRESS.into(), 0);
        let addressing = FloodSource::OneHost.addressing(unused_target, pair.b.mac);
        let responder = ArpResponder::new(&pair.a, &addressing, load_core)?;
        Ok(Self { pair, server_core, load_core, _responder: responder })
    }

    /// Gives the kernel's server a route to the unknown sources, without which it would answer none
    /// of them.
    pub(crate) fn route_unknown_sources(&self) -> Result<(), LabError> {
        let gateway = LOAD_ADDRESS.to_string();
        self.pair.b.namespace.ip(&["route", "add", UNKNOWN_SOURCES_NETWORK, "via", &gateway])?;
        Ok(())
    }

    /// Prepares the server's device for the next server.
    pub(crate) fn prepare(&self, receiver: Receiver) -> Result<(), LabError> {
        let end = &self.pair.b;
        // Knot DNS leaves its XDP program attached.
        end.remove_xdp_program()?;
        ReceiveWork::reset(end)?;
        // GRO gives a veth device a NAPI context, which every NIC has.
        end.ethtool(&["gro", if receiver == Receiver::Kernel { "on" } else { "off" }])
    }

    /// Creates a flood of `payloads` from `source` to `target`, and makes the server's core do the
    /// receive work. The server must be running.
    pub(crate) fn flood<'p>(
        &self,
        source: FloodSource,
        target: SocketAddr,
        payloads: impl IntoIterator<Item = &'p [u8]>,
        receive_work: ReceiveWork,
    ) -> Result<Flood, LabError> {
        let frames = flood::frames(&source.addressing(target, self.pair.b.mac), payloads);
        self.flood_frames(&frames, receive_work)
    }

    /// Like [`FloodTestbed::flood`], with prebuilt frames.
    pub(crate) fn flood_frames(
        &self,
        frames: &[Vec<u8>],
        receive_work: ReceiveWork,
    ) -> Result<Flood, LabError> {
        let end = &self.pair.b;
        // The server's own settings stay. The kernel keeps threaded NAPI across NAPI contexts, so a
        // new context may still have the thread of the previous one. The call fails without one.
        let _ = end.set_softirq_napi();
        match receive_work {
            ReceiveWork::Timer => receive_timer::place(
                (self.server_core, self.load_core),
                |idle_polls, interval_ns| end.set_deferral(idle_polls, interval_ns),
                || Flood::new(&self.pair.a, &frames[..1], self.server_core),
            )?,
            work => work.place(end, self.server_core)?,
        }
        Flood::new(&self.pair.a, frames, self.load_core)
    }

    /// Offers a load and measures the result. A flood gets only the idle time of its core, so on a
    /// busy machine the measurement waits for it.
    pub(crate) fn measure(
        &self,
        flood: &mut Flood,
        meter: &GoodputMeter,
        rate_pps: Option<f64>,
        warm_up: Duration,
        time: Duration,
    ) -> Result<FloodMeasurement, LabError> {
        flood.set_rate(rate_pps)?;
        thread::sleep(warm_up);
        let before = self.read_counters(flood, meter)?;
        thread::sleep(time);
        let mut after = self.read_counters(flood, meter)?;
        while rate_pps != Some(0.0) && after.sent == before.sent {
            if before.at.elapsed() > FLOOD_TIMEOUT {
                return Err(LabError::Config(format!(
                    "no CPU time left on core {} to send: stop other processes on it",
                    self.load_core
                )));
            }
            thread::sleep(time);
            after = self.read_counters(flood, meter)?;
        }
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Ok(FloodMeasurement {
            offered_pps: (after.sent - before.sent) as f64 / seconds,
            goodput_pps: (after.goodput_packets - before.goodput_packets) as f64 / seconds,
            server_core: after.server_core.since(before.server_core),
            load_core: after.load_core.since(before.load_core),
        })
    }

    /// Packets that the server has processed so far.
    pub(crate) fn goodput_packets(&self, meter: &GoodputMeter) -> Result<u64, LabError> {
        match meter {
            GoodputMeter::CounterFile(path) => {
                Ok(ServeCounters::read_file(path).map_err(LabError::file(path))?[0])
            }
            GoodputMeter::TransmittedFrames => self.pair.b.tx_packets(),
        }
    }

    fn read_counters(&self, flood: &mut Flood, meter: &GoodputMeter) -> Result<Reading, LabError> {
        Ok(Reading {
            at: Instant::now(),
            sent: flood.offered()?,
            goodput_packets: self.goodput_packets(meter)?,
            server_core: CoreTicks::read(self.server_core)?,
            load_core: CoreTicks::read(self.load_core)?,
        })
    }
}

struct Reading {
    at: Instant,
    sent: u64,
    goodput_packets: u64,
    server_core: CoreTicks,
    load_core: CoreTicks,
}
