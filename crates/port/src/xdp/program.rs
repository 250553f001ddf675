//! The BPF program that steers frames, and its maps.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, XskMap};
use aya::programs::{ProgramError, Xdp};
use aya::{Ebpf, EbpfError};

use super::SteeringCounters;
use super::admission::{AdmissionMaps, take_map};
use super::link::Link;
use super::steering::Steering;
use crate::admission::ClassLimit;
use crate::steering::Rule;

/// Built from `bpf/steer.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/steer.bpf.o");

/// The program in the kernel. Dropping it detaches it.
pub(super) struct Program {
    link: Option<Link>,
    /// The link holds another program still.
    waits: bool,
    /// What it takes.
    steering: Steering,
    settings: Array<MapData, [u32; 2]>,
    addresses: HashMap<MapData, [u8; 20], u32>,
    ports: HashMap<MapData, [u8; 20], u32>,
    sockets: XskMap<MapData>,
    counts: PerCpuArray<MapData, u64>,
    admission: AdmissionMaps,
    /// Whether the program asks its classes at all.
    limiting: bool,
    /// Whether the program drops what it takes where there is no socket.
    holding: bool,
    ebpf: Ebpf,
}

impl Program {
    /// Loads the program; it takes nothing yet and is attached to nothing.
    pub(super) fn load() -> Result<Self, EbpfError> {
        let mut ebpf = Ebpf::load(OBJECT)?;
        let program: &mut Xdp =
            ebpf.program_mut("steer").ok_or(ProgramError::UnexpectedProgramType)?.try_into()?;
        program.load()?;
        Ok(Self {
            link: None,
            waits: false,
            steering: Steering::default(),
            settings: take_map(&mut ebpf, "settings")?,
            addresses: take_map(&mut ebpf, "addresses")?,
            ports: take_map(&mut ebpf, "ports")?,
            sockets: take_map(&mut ebpf, "sockets")?,
            counts: take_map(&mut ebpf, "counts")?,
            admission: AdmissionMaps::take(&mut ebpf)?,
            limiting: false,
            holding: false,
            ebpf,
        })
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let program: &Xdp = self
            .ebpf
            .program("steer")
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| io::Error::other("the program is not loaded"))?;
        Ok(program.fd().map_err(io::Error::other)?.as_fd())
    }

    /// Attaches the program, in the driver or in front of the kernel's stack.
    pub(super) fn attach(&mut self, interface_index: u32, native: bool) -> io::Result<()> {
        self.link = Some(Link::create(self.fd()?, interface_index, native)?);
        Ok(())
    }

    /// It is to take the place of the program that another process has on an
    /// interface, when [`Program::go_live`] says so.
    pub(super) fn inherit(&mut self, link: Link) {
        (self.link, self.waits) = (Some(link), true);
    }

    /// Takes the place of the program whose link was inherited, if one was.
    pub(super) fn go_live(&mut self) -> io::Result<()> {
        if let Some(link) = self.link.as_ref().filter(|_| self.waits) {
            link.replace(self.fd()?)?;
            self.waits = false;
        }
        Ok(())
    }

    /// What holds it to an interface, if it is at one.
    pub(super) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// Takes it off the interface. It stays in the kernel, and lets everything in.
    pub(super) fn detach(&mut self) {
        (self.link, self.waits, self.limiting, self.holding) = (None, false, false, false);
        self.steering = Steering::default();
    }

    /// Leaves it on the interface, where it drops all that it takes from now on, until
    /// [`Program::release`].
    pub(super) fn hold(&mut self) -> Result<(), MapError> {
        (self.limiting, self.holding) = (false, true);
        self.apply()
    }

    /// There are sockets for what it takes.
    pub(super) fn release(&mut self) -> Result<(), MapError> {
        self.holding = false;
        self.apply()
    }

    /// The most receive queues that sockets can be set for.
    pub(super) fn queue_limit(&self) -> u32 {
        self.sockets.len()
    }

    /// Sends what is taken from a queue to a socket.
    pub(super) fn set_socket(&mut self, queue: u32, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.sockets.set(queue, fd.as_raw_fd(), 0)
    }

    /// What it takes.
    pub(super) fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Takes this too, beside what it takes already.
    pub(super) fn set_steering(&mut self, steering: &Steering) -> Result<(), MapError> {
        self.steering.vlan = steering.vlan;
        self.apply()?;
        steering.rules.iter().try_for_each(|rule| self.steer(rule))
    }

    /// Takes one thing more, from now on.
    pub(super) fn steer(&mut self, rule: &Rule) -> Result<(), MapError> {
        if self.steering.rules.contains(rule) {
            return Ok(());
        }
        if let Some(key) = rule.address_key() {
            self.addresses.insert(key, 1, 0)?;
        }
        rule.port_keys().try_for_each(|key| self.ports.insert(key, 1, 0))?;
        self.steering.rules.push(*rule);
        self.apply()
    }

    /// Takes one thing less, from now on.
    pub(super) fn unsteer(&mut self, rule: &Rule) -> Result<(), MapError> {
        self.steering.rules.retain(|other| other != rule);
        self.apply()?;
        if let Some(key) = rule.address_key() {
            absent_is_fine(self.addresses.remove(&key))?;
        }
        rule.port_keys().try_for_each(|key| absent_is_fine(self.ports.remove(&key)))
    }

    /// Tells the program which kinds of rules there are.
    fn apply(&mut self) -> Result<(), MapError> {
        self.settings.set(0, self.steering.settings(self.limiting, self.holding), 0)
    }

    /// The maps of admission.
    pub(super) fn admission(&mut self) -> &mut AdmissionMaps {
        &mut self.admission
    }

    /// Whether less than everything is let in.
    pub(super) fn is_limiting(&self) -> bool {
        self.limiting
    }

    /// Sets how much of each class is let in; `None` is everything.
    pub(super) fn set_limits(&mut self, limits: Option<&[ClassLimit]>) -> io::Result<()> {
        if let Some(limits) = limits {
            self.admission.set_limits(limits)?;
        }
        if self.limiting != limits.is_some() {
            self.limiting = limits.is_some();
            self.apply().map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// What the program did so far, over all processors.
    pub(super) fn counters(&self) -> Result<SteeringCounters, MapError> {
        let sum =
            |index: u32| -> Result<u64, MapError> { Ok(self.counts.get(&index, 0)?.iter().sum()) };
        Ok(SteeringCounters {
            taken: sum(0)?,
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

fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        other => other,
    }
}
