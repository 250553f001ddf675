//! A guard in front of the kernel's own stack: admission without a port.

use std::io;
use std::os::fd::AsFd;

use aya::maps::{Array, MapData};
use aya::programs::{ProgramError, Xdp};
use aya::{Ebpf, EbpfError};

use super::admission::{AdmissionMaps, take_map};
use super::open::{attach, load_error};
use super::{Link, Mode, XdpError, sys};
use crate::admission::{CLASSES_MAX, ClassCounts, ClassLimit, Early, Program};
use crate::netlink::Interface;

/// Built from `bpf/guard.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/guard.bpf.o");

/// `SEEN` of the program.
const SEEN: usize = 4096;

/// Drops frames that are not admitted; the kernel gets all others as if nothing
/// were there.
///
/// The program hangs on a link: it is off the interface as soon as the process
/// is gone, however it ended.
pub struct Guard {
    link: Option<Link>,
    guard: Array<MapData, [u64; 1]>,
    seen: Array<MapData, [u64; SEEN]>,
    maps: AdmissionMaps,
    ebpf: Ebpf,
}

impl Guard {
    /// Loads the program. It is attached to nothing and admits everything.
    ///
    /// # Errors
    /// [`XdpError`] names what was wrong and the next step.
    pub fn load() -> Result<Self, XdpError> {
        Self::try_load().map_err(load_error)
    }

    fn try_load() -> Result<Self, EbpfError> {
        let mut ebpf = Ebpf::load(OBJECT)?;
        xdp(&mut ebpf)?.load()?;
        Ok(Self {
            link: None,
            guard: take_map(&mut ebpf, "guard")?,
            seen: take_map(&mut ebpf, "seen_sources")?,
            maps: AdmissionMaps::take(&mut ebpf)?,
            ebpf,
        })
    }

    /// Attaches the program to an interface of the calling thread's network
    /// namespace, and returns whether in the driver (native).
    ///
    /// # Errors
    /// [`XdpError`] names what was wrong and the next step.
    pub fn attach(&mut self, interface: &str, mode: Mode) -> Result<bool, XdpError> {
        let index = Interface::by_name(interface)?.index;
        attach(|native| self.link_to(index, native), mode, interface)
    }

    fn link_to(&mut self, interface_index: u32, native: bool) -> io::Result<()> {
        let program = xdp(&mut self.ebpf).map_err(io::Error::other)?;
        let fd = program.fd().map_err(io::Error::other)?;
        self.link = Some(Link::create(fd.as_fd(), interface_index, native)?);
        Ok(())
    }

    /// Whether a frame would be let in right now. It is counted like one that
    /// arrived.
    ///
    /// # Errors
    /// When the kernel refuses: frames under 14 bytes cannot be tried.
    pub fn try_frame(&mut self, frame: &[u8]) -> io::Result<bool> {
        let program = xdp(&mut self.ebpf).map_err(io::Error::other)?;
        let fd = program.fd().map_err(io::Error::other)?;
        let action = sys::test_run(fd.as_fd(), frame)?;
        Ok(action == sys::XDP_PASS)
    }

    /// Tells the last senders that were seen while everything was admitted, and
    /// forgets them. The numbers are those that rules are hashed by: an IPv4
    /// address with bit 32 set, or the upper half of an IPv6 address.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn take_seen(&mut self, mut tell: impl FnMut(u64)) -> io::Result<()> {
        let seen = self.seen.get(&0, 0).map_err(io::Error::other)?;
        self.seen.set(0, [0; SEEN], 0).map_err(io::Error::other)?;
        seen.into_iter().filter(|&source| source != 0).for_each(&mut tell);
        Ok(())
    }
}

fn xdp(ebpf: &mut Ebpf) -> Result<&mut Xdp, ProgramError> {
    ebpf.program_mut("guard_kernel").ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

impl Early for Guard {
    fn set_program(&mut self, program: &Program) -> io::Result<()> {
        self.maps.set_program(program)
    }

    fn set_known(&mut self, words: &[u64]) -> io::Result<()> {
        self.maps.set_known(words)
    }

    fn set_limits(&mut self, limits: Option<&[ClassLimit]>) -> io::Result<()> {
        if let Some(limits) = limits {
            self.maps.set_limits(limits)?;
        }
        self.guard.set(0, [limits.is_some().into()], 0).map_err(io::Error::other)
    }

    fn counts(&mut self) -> io::Result<[ClassCounts; CLASSES_MAX]> {
        self.maps.counts()
    }
}
