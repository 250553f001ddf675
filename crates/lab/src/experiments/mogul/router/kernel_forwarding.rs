//! Linux's own forwarding in the router's namespace, with the receive work on the router's core.

use std::process::Command;

use super::testbed::{ROUTER_LEFT, ROUTER_RIGHT, RouterTestbed};
use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::load::flood::Flood;
use crate::testbed::netns::run_to_end;
use crate::testbed::receive_timer;

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
            KernelWay::Timer => receive_timer::place(
                (cores.server, cores.load),
                |idle_polls, interval_ns| forwarding.set_deferral(idle_polls, interval_ns),
                || new_flood(cores.server),
            )?,
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

    fn set_deferral(&self, idle_polls: u32, interval_ns: u64) -> Result<(), LabError> {
        self.write_left("napi_defer_hard_irqs", &idle_polls.to_string())?;
        self.write_left("gro_flush_timeout", &interval_ns.to_string())
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
}

impl Drop for KernelForwarding<'_> {
    fn drop(&mut self) {
        let router = &self.hosts.router;
        // A setting that was never made is restored too; the namespace goes at the end anyway.
        let _ = self.set_forwarding("0");
        let _ = self.write_left("queues/rx-0/rps_cpus", "0");
        let _ = self.set_deferral(0, 0);
        for (device, [address, _]) in self.devices() {
            let _ = router.write_device_file(device, "threaded", "0");
            let _ = self.set_gro(device, "off");
            let _ = router.ip(&["addr", "del", &format!("{address}/24"), "dev", device]);
        }
    }
}
