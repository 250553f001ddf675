//! The BPF program that steers frames, its maps, and the link that holds it to
//! the interface.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, XskMap};
use aya::programs::{ProgramError, Xdp};
use aya::{Ebpf, EbpfError};

use super::admission::{AdmissionMaps, take_map};
use super::steering::Steering;
use super::{SteeringCounters, sys};
use crate::admission::ClassLimit;
use crate::steering::Rule;

/// Built from `bpf/steer.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/steer.bpf.o");

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `linux/if_link.h`.
const GENERIC_FLAG: u32 = 1 << 1;
const NATIVE_FLAG: u32 = 1 << 2;

/// How to attach: in the driver, or in front of the kernel's stack.
pub(super) const fn flags(native: bool) -> u32 {
    if native { NATIVE_FLAG } else { GENERIC_FLAG }
}

/// The program in the kernel. Dropping it detaches it.
pub(super) struct Program {
    link: Option<OwnedFd>,
    settings: Array<MapData, [u32; 2]>,
    addresses: HashMap<MapData, [u8; 20], u32>,
    ports: HashMap<MapData, [u8; 20], u32>,
    sockets: XskMap<MapData>,
    counts: PerCpuArray<MapData, u64>,
    admission: AdmissionMaps,
    /// Whether the program asks its classes at all.
    limiting: bool,
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
            settings: take_map(&mut ebpf, "settings")?,
            addresses: take_map(&mut ebpf, "addresses")?,
            ports: take_map(&mut ebpf, "ports")?,
            sockets: take_map(&mut ebpf, "sockets")?,
            counts: take_map(&mut ebpf, "counts")?,
            admission: AdmissionMaps::take(&mut ebpf)?,
            limiting: false,
            ebpf,
        })
    }

    /// Attaches the program, in the driver or in front of the kernel's stack.
    pub(super) fn attach(&mut self, interface_index: u32, native: bool) -> io::Result<()> {
        let program: &Xdp = self
            .ebpf
            .program("steer")
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| io::Error::other("the program is not loaded"))?;
        let fd = program.fd().map_err(io::Error::other)?;
        self.link = Some(sys::link_xdp(fd.as_fd(), interface_index, flags(native))?);
        Ok(())
    }

    /// Takes it off the interface. It stays in the kernel, and lets everything in.
    pub(super) fn detach(&mut self) {
        (self.link, self.limiting) = (None, false);
    }

    /// The most receive queues that sockets can be set for.
    pub(super) fn queue_limit(&self) -> u32 {
        self.sockets.len()
    }

    /// Sends what is taken from a queue to a socket.
    pub(super) fn set_socket(&mut self, queue: u32, fd: BorrowedFd<'_>) -> Result<(), MapError> {
        self.sockets.set(queue, fd.as_raw_fd(), 0)
    }

    /// Adds a rule to the maps. It counts once [`Program::apply`] was called.
    pub(super) fn insert(&mut self, rule: &Rule) -> Result<(), MapError> {
        if let Some(key) = rule.address_key() {
            self.addresses.insert(key, 1, 0)?;
        }
        rule.port_keys().try_for_each(|key| self.ports.insert(key, 1, 0))
    }

    /// Takes a rule out of the maps.
    pub(super) fn remove(&mut self, rule: &Rule) -> Result<(), MapError> {
        if let Some(key) = rule.address_key() {
            absent_is_fine(self.addresses.remove(&key))?;
        }
        rule.port_keys().try_for_each(|key| absent_is_fine(self.ports.remove(&key)))
    }

    /// Tells the program which kinds of rules there are.
    pub(super) fn apply(&mut self, steering: &Steering) -> Result<(), MapError> {
        self.settings.set(0, steering.settings(self.limiting), 0)
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
    pub(super) fn set_limits(
        &mut self,
        limits: Option<&[ClassLimit]>,
        steering: &Steering,
    ) -> io::Result<()> {
        if let Some(limits) = limits {
            self.admission.set_limits(limits)?;
        }
        if self.limiting != limits.is_some() {
            self.limiting = limits.is_some();
            self.apply(steering).map_err(io::Error::other)?;
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
