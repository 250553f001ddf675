//! BPF program that steers frames, and its maps.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use aya::maps::{Map, MapData, MapError, PerCpuArray, XskMap};
use aya::programs::Xdp;
use aya::{Ebpf, EbpfError};

use super::SteeringCounters;
use super::admission::{AdmissionMaps, load_program, take_map};
use super::link::XdpLink;
use super::rules::{self, RuleMaps, SharedRuleMaps};
use super::steering::Steering;
use crate::admission::Limits;
use crate::steering::SteeringRule;

/// Built from `bpf/steer.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/steer.bpf.o");

/// Steering program in the kernel. Detached on drop.
pub(super) struct SteeringProgram {
    link: Option<XdpLink>,
    /// The inherited link still has the other process's program attached.
    awaits_takeover: bool,
    rules: SharedRuleMaps,
    sockets: SocketMap,
    counts: PerCpuArray<MapData, u64>,
    admission: AdmissionMaps,
    ebpf: Ebpf,
}

/// Socket of each queue to which its frames are redirected. The map belongs to the program; the
/// kernel removes sockets that are closed.
pub(super) struct SocketMap {
    sockets: XskMap<MapData>,
    fd: OwnedFd,
}

impl SocketMap {
    fn take(ebpf: &mut Ebpf) -> Result<Self, MapError> {
        let map: MapData = match ebpf.take_map("sockets") {
            Some(Map::XskMap(map)) => map,
            _ => return Err(MapError::InvalidName { name: "sockets".into() }),
        };
        let fd = map.fd().as_fd().try_clone_to_owned().map_err(io_error)?;
        Ok(Self { sockets: XskMap::try_from(Map::XskMap(map))?, fd })
    }

    /// A second handle of the same map.
    pub(super) fn try_clone(&self) -> Result<Self, MapError> {
        let clone = || self.fd.try_clone().map_err(io_error);
        let map = MapData::from_fd(clone()?)?;
        Ok(Self { sockets: XskMap::try_from(Map::XskMap(map))?, fd: clone()? })
    }

    /// Sets the socket to which frames of a queue are redirected.
    pub(super) fn set(&mut self, queue: u32, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.sockets.set(queue, fd.as_raw_fd(), 0)
    }
}

fn io_error(io_error: io::Error) -> MapError {
    MapError::IoError(io_error)
}

impl SteeringProgram {
    /// Loads the program, without rules and attached to no interface.
    pub(super) fn load() -> Result<Self, EbpfError> {
        let (mut ebpf, admission) = load_program(OBJECT, "steer")?;
        Ok(Self {
            link: None,
            awaits_takeover: false,
            rules: Arc::new(Mutex::new(RuleMaps::take(&mut ebpf)?)),
            sockets: SocketMap::take(&mut ebpf)?,
            counts: take_map(&mut ebpf, "counts")?,
            admission,
            ebpf,
        })
    }

    pub(super) fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let program: &Xdp = self
            .ebpf
            .program("steer")
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| io::Error::other("the program is not loaded"))?;
        Ok(program.fd().map_err(io::Error::other)?.as_fd())
    }

    /// Attaches the program in the driver (`native`) or in front of the kernel's stack.
    pub(super) fn attach(&mut self, interface_index: u32, native: bool) -> io::Result<()> {
        self.link = Some(XdpLink::create(self.fd()?, interface_index, native)?);
        Ok(())
    }

    /// Sets the link of another process's program, which [`Application::take_over`] will replace.
    pub(super) fn inherit(&mut self, link: XdpLink) {
        (self.link, self.awaits_takeover) = (Some(link), true);
    }

    /// Replaces the program of the inherited link; does nothing without such a link.
    pub(super) fn take_over(&mut self) -> io::Result<()> {
        if let Some(link) = self.link.as_ref().filter(|_| self.awaits_takeover) {
            link.replace(self.fd()?)?;
            self.awaits_takeover = false;
        }
        Ok(())
    }

    /// Link to the interface; `None` while detached.
    pub(super) fn link(&self) -> Option<&XdpLink> {
        self.link.as_ref()
    }

    /// Takes the link, which the program needs no more or is to get again by
    /// [`SteeringProgram::set_link`].
    #[cfg(feature = "packet")]
    pub(super) fn take_link(&mut self) -> Option<XdpLink> {
        self.link.take()
    }

    /// Sets a new link of the program.
    #[cfg(feature = "packet")]
    pub(super) fn set_link(&mut self, link: XdpLink) {
        self.link = Some(link);
    }

    /// Detaches the program. The program stays loaded; its rules are removed, and its limits reset.
    pub(super) fn detach(&mut self) {
        (self.link, self.awaits_takeover) = (None, false);
        rules::lock(&self.rules).clear();
    }

    /// Keeps the program attached, and drops every frame that matches a rule until
    /// [`Application::stop_dropping`].
    pub(super) fn start_dropping(&mut self) -> Result<(), MapError> {
        let mut rules = rules::lock(&self.rules);
        rules.set_limiting(false)?;
        rules.set_dropping(true)
    }

    /// Stops dropping: the rules' frames have sockets again.
    pub(super) fn stop_dropping(&mut self) -> Result<(), MapError> {
        rules::lock(&self.rules).set_dropping(false)
    }

    /// Maximum number of receive queues: size of the socket map.
    pub(super) fn max_queues(&self) -> u32 {
        self.sockets.sockets.len()
    }

    /// Sockets to which frames are redirected.
    pub(super) fn sockets(&mut self) -> &mut SocketMap {
        &mut self.sockets
    }

    /// Current rules and VLAN.
    pub(super) fn steering(&self) -> Steering {
        rules::lock(&self.rules).steering().clone()
    }

    /// Adds the rules of `steering` to the current rules, and sets its VLAN.
    pub(super) fn set_steering(&mut self, steering: &Steering) -> Result<(), MapError> {
        let mut rules = rules::lock(&self.rules);
        rules.set_vlan(steering.vlan)?;
        steering.rules.iter().try_for_each(|rule| rules.steer(rule))
    }

    /// True if these are the rules.
    #[cfg(feature = "packet")]
    pub(super) fn has_rules(&self, rules: &[SteeringRule]) -> bool {
        rules::lock(&self.rules).steering().rules == rules
    }

    /// Rules for other threads.
    pub(super) fn shared_rules(&self) -> SharedRuleMaps {
        Arc::clone(&self.rules)
    }

    /// As [`RuleMaps::steer`].
    pub(super) fn steer(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        rules::lock(&self.rules).steer(rule)
    }

    /// As [`RuleMaps::unsteer`].
    pub(super) fn unsteer(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        rules::lock(&self.rules).unsteer(rule)
    }

    /// Admission maps.
    pub(super) fn admission(&mut self) -> &mut AdmissionMaps {
        &mut self.admission
    }

    /// Sets the rate limits of the classes; `None` admits every frame.
    pub(super) fn set_limits(&mut self, limits: Option<&Limits>) -> io::Result<()> {
        if let Some(limits) = limits {
            self.admission.set_limits(limits)?;
        }
        rules::lock(&self.rules).set_limiting(limits.is_some()).map_err(io::Error::other)
    }

    /// Counters of the program so far, summed over all CPUs.
    pub(super) fn counters(&self) -> Result<SteeringCounters, MapError> {
        let sum =
            |index: u32| -> Result<u64, MapError> { Ok(self.counts.get(&index, 0)?.iter().sum()) };
        Ok(SteeringCounters {
            redirected: sum(0)?,
            passed_not_steered: sum(1)?,
            passed_other_protocol: sum(2)?,
            passed_other_vlan: sum(3)?,
            passed_fragment: sum(4)?,
            passed_extension: sum(5)?,
            passed_malformed: sum(6)?,
            passed_no_socket: sum(7)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Instructions that the verifier may read: each start of a device waits for it.
    const MAX_VERIFIED_INSTRUCTIONS: u32 = 50_000;

    #[test]
    fn verifier_reads_admission_once() {
        let program = match SteeringProgram::load() {
            Ok(program) => program,
            Err(error) => return tidegate_needs::skip("root", error),
        };
        let info = program.ebpf.program("steer").unwrap().info().unwrap();
        let count = info.verified_instruction_count().expect("Linux 5.16");
        assert!(count < MAX_VERIFIED_INSTRUCTIONS, "{count}");
    }
}
