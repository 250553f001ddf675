//! The wire that servers are flooded over, and who pays for what.
//!
//! One core sends and takes the answers off the wire. The other does all the
//! rest: the receive work of the server's device, the softirqs, the service.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use tidegate_apps::ServeCounters;

use crate::cpu::{self, CoreTicks, CoreUse};
use crate::error::LabError;
use crate::load::Addressing;
use crate::load::flood::{self, Flood};
use crate::load::responder::Responder;
use crate::netns::{VethConfig, VethPair};

/// The kernel's, at the flood's end of the wire: for clients.
pub(crate) const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
pub(crate) const LOAD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
pub(crate) const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
pub(crate) const PREFIX: u8 = 24;
/// Nobody's: the kernel drops frames to it at its first look.
pub(crate) const LOAD_MAC: [u8; 6] = [2, 0xf1, 0x00, 0xd0, 0, 1];
const FLOWS: u16 = 64;
const FIRST_PORT: u16 = 20_000;

/// A timer polls the device so often when it has no work: what a card's
/// interrupts with coalescing do.
const POLL_EVERY_NS: u64 = 20_000;
/// How many polls without work before the device asks for an interrupt again,
/// which would come on the sender's core.
const NEVER: u32 = i32::MAX as u32;
/// How long to look which core the timer is on.
const LOOK: Duration = Duration::from_millis(20);
/// How long to wait for a flood to send anything.
const FLOOD_PATIENCE: Duration = Duration::from_secs(60);
/// How often to try to get it on the server's core.
const RECEIVE_TRIES: usize = 20;

/// Who receives for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The kernel's NAPI context, in softirqs of the server's core.
    Kernel,
    /// The server itself, through AF_XDP.
    Server,
}

/// What makes the receive work of the server's device run on its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveWork {
    /// The server polls the device itself.
    Server,
    /// A timer polls it in softirqs, as a card with coalescing would be.
    Timer,
    /// Each arrival wakes a thread that runs before everything but the handler
    /// of the interrupt: a card without coalescing.
    Interrupt,
    /// Each arrival wakes a thread like any other.
    Thread,
    /// The sender's core, up to where receive packet steering hands a packet to
    /// the server's core.
    Steered,
}

/// Two namespaces, a wire, two cores.
pub(crate) struct Bench {
    /// Load in `a`, servers in `b`.
    pub(crate) pair: VethPair,
    /// The core that serves.
    pub(crate) server_core: usize,
    /// The core that sends.
    pub(crate) load_core: usize,
    _responder: Responder,
}

/// What a server did with a load.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Measured {
    /// Packets offered per second.
    pub offered_pps: f64,
    /// Packets that the application worked on per second; of a server that
    /// cannot be asked, the answers that it sent.
    pub goodput_pps: f64,
    /// The core that serves.
    pub server_core: CoreUse,
    /// The core that sends.
    pub load_core: CoreUse,
}

impl Measured {
    /// What several measurements of the same length come to.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean =
            |figure: fn(&Self) -> f64| all.iter().map(figure).sum::<f64>() / all.len() as f64;
        let cores = |core: fn(&Self) -> CoreUse| CoreUse::mean(all.iter().map(core));
        Self {
            offered_pps: mean(|one| one.offered_pps),
            goodput_pps: mean(|one| one.goodput_pps),
            server_core: cores(|one| one.server_core),
            load_core: cores(|one| one.load_core),
        }
    }
}

/// Where a server's goodput is read.
#[derive(Clone, Debug)]
pub(crate) enum Meter {
    /// In the file where it keeps its counters.
    Counters(PathBuf),
    /// At its device: every frame that it sends is an answer.
    Answers,
}

/// Who a flood comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// One host, with some ports.
    #[default]
    OneHost,
    /// As many hosts as there are frames, from elsewhere (RFC 2544's
    /// addresses).
    Strangers,
}

/// Frames of 64 bytes per second that fill a line of 1 Gb/s: each takes 20
/// bytes more on the wire (RFC 2544, section 20).
pub(crate) const GIGABIT_LINE_PPS: f64 = 1_488_095.0;

/// How many strangers there are.
pub(crate) const STRANGERS: u32 = 8192;
const FIRST_STRANGER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Where they are.
pub(crate) const STRANGERS_NETWORK: &str = "198.18.0.0/15";

impl Source {
    fn addressing(self, target: SocketAddr, target_mac: [u8; 6]) -> Addressing {
        let (source, sources, ports) = match self {
            Self::OneHost => (LOAD_ADDRESS, 1, FLOWS),
            Self::Strangers => (FIRST_STRANGER, STRANGERS, 1),
        };
        Addressing {
            source_mac: LOAD_MAC,
            target_mac,
            source: IpAddr::V4(source),
            sources,
            first_port: FIRST_PORT,
            ports,
            target,
        }
    }

    /// How many different senders a frame can have.
    pub(crate) fn flows(self) -> usize {
        match self {
            Self::OneHost => FLOWS.into(),
            Self::Strangers => STRANGERS as usize,
        }
    }
}

impl Bench {
    pub(crate) fn new(server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let config = VethConfig {
            a: vec![format!("{CLIENT_ADDRESS}/{PREFIX}")],
            b: vec![format!("{KERNEL_ADDRESS}/{PREFIX}")],
        };
        let pair = VethPair::new(&config)?;
        // Answers are taken off the wire by the core that sends.
        pair.a.set_rps(Some(load_core))?;
        let nobody = SocketAddr::new(KERNEL_ADDRESS.into(), 0);
        let addressing = Source::OneHost.addressing(nobody, pair.b.mac);
        let responder = Responder::new(&pair.a, &addressing, load_core)?;
        Ok(Self { pair, server_core, load_core, _responder: responder })
    }

    /// Makes ready for a server that is about to start.
    pub(crate) fn prepare(&self, receiver: Receiver) -> Result<(), LabError> {
        let end = &self.pair.b;
        // Knot DNS leaves its XDP program behind.
        end.namespace.ip(&["link", "set", "dev", &end.device, "xdp", "off"])?;
        end.set_deferral(0, 0)?;
        end.set_rps(None)?;
        // GRO gives a veth the NAPI context that every card has.
        end.ethtool(&["gro", if receiver == Receiver::Kernel { "on" } else { "off" }])
    }

    /// Makes a flood of `payloads` from `source` to `target`, and the server's core pay for
    /// receiving it. The server runs.
    pub(crate) fn flood<'p>(
        &self,
        source: Source,
        target: SocketAddr,
        payloads: impl IntoIterator<Item = &'p [u8]>,
        receive_work: ReceiveWork,
    ) -> Result<Flood, LabError> {
        let frames = flood::frames(&source.addressing(target, self.pair.b.mac), payloads);
        self.flood_frames(&frames, receive_work)
    }

    /// As [`Bench::flood`], with frames that are made already.
    pub(crate) fn flood_frames(
        &self,
        frames: &[Vec<u8>],
        receive_work: ReceiveWork,
    ) -> Result<Flood, LabError> {
        let end = &self.pair.b;
        // A NAPI context may have the thread that the last one had in its
        // place: the kernel keeps that. Fails where there is none.
        let _ = end.set_softirq_napi();
        match receive_work {
            ReceiveWork::Server => {}
            ReceiveWork::Timer => self.receive_by_timer(&frames[..1])?,
            ReceiveWork::Interrupt => {
                let threads = end.set_threaded_napi(self.server_core)?;
                threads.into_iter().try_for_each(cpu::run_as_interrupt)?;
            }
            ReceiveWork::Thread => drop(end.set_threaded_napi(self.server_core)?),
            ReceiveWork::Steered => end.set_rps(Some(self.server_core))?,
        }
        Flood::new(&self.pair.a, frames, self.load_core)
    }

    /// Makes a timer on the server's core poll its device. The timer stays on
    /// the core of the first poll, which is the core of the first packet: one
    /// like `first`, if no other core sent one before.
    fn receive_by_timer(&self, first: &[Vec<u8>]) -> Result<(), LabError> {
        let end = &self.pair.b;
        for _ in 0..RECEIVE_TRIES {
            end.set_deferral(NEVER, POLL_EVERY_NS)?;
            let mut flood = Flood::new(&self.pair.a, first, self.server_core)?;
            flood.set_rate(Some(10.0))?;
            let began = Instant::now();
            while flood.sent()? == 0 && began.elapsed() < Duration::from_secs(5) {
                thread::sleep(Duration::from_millis(1));
            }
            drop(flood);
            if self.server_core_receives()? {
                return Ok(());
            }
            // So the timer ends, and the next packet begins anew.
            end.set_deferral(0, 0)?;
            thread::sleep(LOOK);
        }
        Err(LabError::Config(format!(
            "core {} does not receive for its server: other cores send to it; end what else uses \
             the network namespaces of this experiment",
            self.server_core
        )))
    }

    /// Whether the timer runs on the server's core, and not on the load's if that is
    /// another.
    fn server_core_receives(&self) -> Result<bool, LabError> {
        let read = || -> Result<(u64, u64), LabError> {
            let received = cpu::receive_softirqs;
            Ok((received(self.server_core)?, received(self.load_core)?))
        };
        let before = read()?;
        thread::sleep(LOOK);
        let after = read()?;
        // A part of those that the timer makes tell it from all else. It may be
        // late each time: an idle core has to wake up.
        let many = (LOOK.as_nanos() as u64 / POLL_EVERY_NS) / 10;
        let elsewhere = self.load_core != self.server_core && after.1 - before.1 >= many;
        Ok(after.0 - before.0 > many && !elsewhere)
    }

    /// Offers a load and measures what comes of it. A flood takes only the time
    /// that its core has left: on a busy machine it is waited for.
    pub(crate) fn measure(
        &self,
        flood: &mut Flood,
        meter: &Meter,
        rate_pps: Option<f64>,
        warm_up: Duration,
        time: Duration,
    ) -> Result<Measured, LabError> {
        flood.set_rate(rate_pps)?;
        thread::sleep(warm_up);
        let before = self.read(flood, meter)?;
        thread::sleep(time);
        let mut after = self.read(flood, meter)?;
        while rate_pps != Some(0.0) && after.sent == before.sent {
            if before.at.elapsed() > FLOOD_PATIENCE {
                return Err(LabError::Config(format!(
                    "core {} has no time left to send: end what else runs on it",
                    self.load_core
                )));
            }
            thread::sleep(time);
            after = self.read(flood, meter)?;
        }
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Ok(Measured {
            offered_pps: (after.sent - before.sent) as f64 / seconds,
            goodput_pps: (after.good - before.good) as f64 / seconds,
            server_core: after.server_core.since(before.server_core),
            load_core: after.load_core.since(before.load_core),
        })
    }

    /// What the server has done so far.
    pub(crate) fn good(&self, meter: &Meter) -> Result<u64, LabError> {
        match meter {
            Meter::Counters(path) => {
                Ok(ServeCounters::read_file(path).map_err(LabError::file(path))?[0])
            }
            Meter::Answers => self.pair.b.transmitted(),
        }
    }

    fn read(&self, flood: &mut Flood, meter: &Meter) -> Result<Reading, LabError> {
        Ok(Reading {
            at: Instant::now(),
            sent: flood.sent()?,
            good: self.good(meter)?,
            server_core: CoreTicks::read(self.server_core)?,
            load_core: CoreTicks::read(self.load_core)?,
        })
    }
}

struct Reading {
    at: Instant,
    sent: u64,
    good: u64,
    server_core: CoreTicks,
    load_core: CoreTicks,
}
