//! Linux's own forwarding in the router's namespace, with the receive work on the router's core.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::testbed::{ROUTER_LEFT, ROUTER_RIGHT, RouterTestbed};
use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::load::flood::Flood;
use crate::testbed::netns::run_to_end;

/// Interval at which a timer polls the idle device, in nanoseconds: stands for the interrupt
/// coalescing of a NIC.
const POLL_INTERVAL_NS: &str = "20000";
/// Polls without work before an interrupt is enabled: the maximum value. The interrupt of a veth
/// would run on the sender's core.
const MAX_DEFERRED_POLLS: &str = "2147483647";
/// Sampling time to find the core on which the timer runs.
const SAMPLE_TIME: Duration = Duration::from_millis(20);
/// Receive softirqs in the sampling time that show the timer: a tenth of its polls.
const MIN_SOFTIRQS: u64 = 100;
/// Attempts to place the timer on the router's core.
const MAX_PLACEMENT_TRIES: usize = 20;

/// Mechanism that runs Linux's forwarding on the router's core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelWay {
    /// A timer polls the device in softirqs, like a NIC with interrupt coalescing.
    Timer,
    /// NAPI threads of ordinary priority.
    Thread,
    /// The sender's core receives, up to where RPS hands a packet to the router's core.
    Rps,
}

impl KernelWay {
    pub(super) const ALL: [Self; 3] = [Self::Timer, Self::Thread, Self::Rps];

    /// Name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Timer => "kernel",
            Self::Thread => "kernel-thread",
            Self::Rps => "kernel-rps",
        }
    }

    /// The name as a part of the name of a figure.
    pub(super) fn figure_name(self) -> String {
        self.name().replace('-', "_")
    }
}

/// Running forwarding; ended on drop.
pub(super) struct KernelForwarding<'a> {
    hosts: &'a RouterTestbed,
}

/// Cores of the router and of the sender.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    pub(super) server: usize,
    pub(super) load: usize,
}

impl<'a> KernelForwarding<'a> {
    /// Gives the router's addresses to the kernel, turns forwarding on, and places the receive work.
    /// `new_flood` returns a flood to the sink, sent from a core.
    pub(super) fn start(
        hosts: &'a RouterTestbed,
        way: KernelWay,
        cores: Cores,
        new_flood: impl Fn(usize) -> Result<Flood, LabError>,
    ) -> Result<Self, LabError> {
        // Undone on drop, also after an error.
        let forwarding = Self { hosts };
        for (device, [address, _]) in forwarding.devices() {
            hosts.router.ip(&["addr", "add", &format!("{address}/24"), "dev", device])?;
            // GRO gives a veth device a NAPI context, which every NIC has.
            forwarding.set_gro(device, "on")?;
        }
        forwarding.set_forwarding("1")?;
        match way {
            KernelWay::Timer => forwarding.forward_by_timer(cores, || new_flood(cores.server))?,
            KernelWay::Thread => {
                for (device, _) in forwarding.devices() {
                    hosts.router.write_device_file(device, "threaded", "1")?;
                }
                let threads = forwarding.napi_threads();
                if threads.is_empty() {
                    return Err(LabError::Config(format!(
                        "{} has no NAPI thread",
                        hosts.left_device
                    )));
                }
                for thread in threads {
                    cpu::pin_process(thread, cores.server)?;
                }
            }
            KernelWay::Rps => {
                let mask = format!("{:x}", 1u32 << (cores.server % 32));
                forwarding.write_left("queues/rx-0/rps_cpus", &mask)?;
            }
        }
        Ok(forwarding)
    }

    fn devices(&self) -> [(&'a str, [&'static str; 2]); 2] {
        let hosts = self.hosts;
        [(&hosts.left_device, ROUTER_LEFT), (&hosts.right_device, ROUTER_RIGHT)]
    }

    /// NAPI threads of both devices, by process identifier.
    pub(super) fn napi_threads(&self) -> Vec<i32> {
        self.devices().iter().flat_map(|(device, _)| cpu::napi_threads(device)).collect()
    }

    fn write_left(&self, file: &str, value: &str) -> Result<(), LabError> {
        self.hosts.router.write_device_file(&self.hosts.left_device, file, value)
    }

    fn set_deferral(&self, polls: &str, interval_ns: &str) -> Result<(), LabError> {
        self.write_left("napi_defer_hard_irqs", polls)?;
        self.write_left("gro_flush_timeout", interval_ns)
    }

    fn set_gro(&self, device: &str, value: &str) -> Result<(), LabError> {
        let mut command: Command = self.hosts.router.command("ethtool");
        run_to_end(command.args(["-K", device, "gro", value]), "ethtool").map(drop)
    }

    fn set_forwarding(&self, value: &str) -> Result<(), LabError> {
        let setting = format!("net.ipv4.ip_forward={value}");
        let mut command = self.hosts.router.command("sysctl");
        run_to_end(command.args(["-qw", &setting]), "procps").map(drop)
    }

    /// Makes a timer on the router's core poll the left device. The timer stays on the core of the
    /// first poll, which is the core that sent the first packet: the router's core sends that
    /// packet, unless another core was faster.
    fn forward_by_timer(
        &self,
        cores: Cores,
        new_flood: impl Fn() -> Result<Flood, LabError>,
    ) -> Result<(), LabError> {
        for _ in 0..MAX_PLACEMENT_TRIES {
            self.set_deferral(MAX_DEFERRED_POLLS, POLL_INTERVAL_NS)?;
            let mut flood = new_flood()?;
            flood.set_rate(Some(10.0))?;
            let began = Instant::now();
            while flood.offered()? == 0 && began.elapsed() < Duration::from_secs(5) {
                thread::sleep(Duration::from_millis(1));
            }
            drop(flood);
            let read = || -> Result<(u64, u64), LabError> {
                Ok((cpu::receive_softirqs(cores.server)?, cpu::receive_softirqs(cores.load)?))
            };
            let before = read()?;
            thread::sleep(SAMPLE_TIME);
            let after = read()?;
            if after.0 - before.0 > MIN_SOFTIRQS && after.1 - before.1 < MIN_SOFTIRQS {
                return Ok(());
            }
            // Stops the timer; the next packet starts a new one.
            self.set_deferral("0", "0")?;
            thread::sleep(SAMPLE_TIME);
        }
        Err(LabError::Config(format!(
            "the receive work cannot be placed on core {}: other cores send too; stop other users of \
             the network namespaces of this experiment",
            cores.server
        )))
    }
}

impl Drop for KernelForwarding<'_> {
    fn drop(&mut self) {
        let router = &self.hosts.router;
        // A setting that was never made is restored too; the namespace goes at the end anyway.
        let _ = self.set_forwarding("0");
        let _ = self.write_left("queues/rx-0/rps_cpus", "0");
        let _ = self.set_deferral("0", "0");
        for (device, [address, _]) in self.devices() {
            let _ = router.write_device_file(device, "threaded", "0");
            let _ = self.set_gro(device, "off");
            let _ = router.ip(&["addr", "del", &format!("{address}/24"), "dev", device]);
        }
    }
}
