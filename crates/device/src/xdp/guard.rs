//! Admission control in front of the kernel's own stack, without a device.

use std::io;
use std::os::fd::AsFd;

use aya::maps::{Array, MapData};
use aya::programs::{ProgramError, Xdp};
use aya::{Ebpf, EbpfError};

use super::admission::{AdmissionMaps, load_program, take_map};
use super::open::{attach, load_error};
use super::{AttachMode, XdpError, XdpLink, sys};
use crate::admission::{ClassCounts, Classifier, EarlyDrop, Limits, MAX_CLASSES};
use crate::capabilities::RequiredCapabilities;
use crate::interface_settings::restore_left_behind;
use crate::netlink::Interface;

/// Built from `bpf/guard.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/guard.bpf.o");

/// Name of the program in the object.
const PROGRAM: &str = "guard_kernel";

/// `SEEN` of the BPF program: slots of its table of seen sources.
const SEEN_SOURCES: usize = 4096;

/// XDP program that drops frames that are not admitted, and passes all others to the
/// kernel's stack unchanged.
///
/// A BPF link attaches the program. The kernel detaches the program as soon as the process
/// exits, for whatever reason.
pub struct XdpGuard {
    link: Option<XdpLink>,
    guard: Array<MapData, [u64; 1]>,
    seen: Array<MapData, [u64; SEEN_SOURCES]>,
    maps: AdmissionMaps,
    ebpf: Ebpf,
}

impl XdpGuard {
    /// Loads the program, attached to no interface and admitting every frame.
    ///
    /// # Errors
    /// [`XdpError`] names the cause and the remedy.
    pub fn load() -> Result<Self, XdpError> {
        Self::try_load().map_err(|error| load_error(error, RequiredCapabilities::XDP_GUARD))
    }

    fn try_load() -> Result<Self, EbpfError> {
        let (mut ebpf, maps) = load_program(OBJECT, PROGRAM)?;
        Ok(Self {
            link: None,
            guard: take_map(&mut ebpf, "guard")?,
            seen: take_map(&mut ebpf, "seen_sources")?,
            maps,
            ebpf,
        })
    }

    /// Attaches the program to an interface of the calling thread's network namespace. Returns
    /// true if attached in the driver (native XDP), false if generic.
    ///
    /// # Errors
    /// [`XdpError`] names the cause and the remedy.
    pub fn attach(&mut self, interface: &str, mode: AttachMode) -> Result<bool, XdpError> {
        let index = Interface::by_name(interface)?.index;
        restore_left_behind();
        let required = RequiredCapabilities::XDP_GUARD;
        attach(|native| self.attach_to(index, native), mode, (interface, index), required)
    }

    fn attach_to(&mut self, interface_index: u32, native: bool) -> io::Result<()> {
        let program = xdp(&mut self.ebpf).map_err(io::Error::other)?;
        let fd = program.fd().map_err(io::Error::other)?;
        self.link = Some(XdpLink::create(fd.as_fd(), interface_index, native)?);
        Ok(())
    }

    /// Returns true if a frame would be admitted now. The frame counts like a received frame.
    ///
    /// # Errors
    /// The kernel refuses, for example a frame of fewer than 14 bytes.
    pub fn try_frame(&mut self, frame: &[u8]) -> io::Result<bool> {
        let program = xdp(&mut self.ebpf).map_err(io::Error::other)?;
        let fd = program.fd().map_err(io::Error::other)?;
        let action = sys::test_run(fd.as_fd(), frame)?;
        Ok(action == sys::XDP_PASS)
    }

    /// Reports the sources last seen while every frame was admitted, and clears their table.
    /// Each source is the number that the rules hash: an IPv4 address with bit 32 set, or the
    /// upper half of an IPv6 address.
    ///
    /// # Errors
    /// The kernel refuses access to the table.
    pub fn take_seen(&mut self, mut on_source: impl FnMut(u64)) -> io::Result<()> {
        let seen = self.seen.get(&0, 0).map_err(io::Error::other)?;
        self.seen.set(0, [0; SEEN_SOURCES], 0).map_err(io::Error::other)?;
        seen.into_iter().filter(|&source| source != 0).for_each(&mut on_source);
        Ok(())
    }
}

fn xdp(ebpf: &mut Ebpf) -> Result<&mut Xdp, ProgramError> {
    ebpf.program_mut(PROGRAM).ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

impl EarlyDrop for XdpGuard {
    fn set_classifier(&mut self, program: &Classifier) -> io::Result<()> {
        self.maps.set_classifier(program)
    }

    fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()> {
        self.maps.set_known_sources(words)
    }

    fn set_limits(&mut self, limits: Option<&Limits>) -> io::Result<()> {
        if let Some(limits) = limits {
            self.maps.set_limits(limits)?;
        }
        self.guard.set(0, [limits.is_some().into()], 0).map_err(io::Error::other)
    }

    fn counts(&mut self) -> io::Result<[ClassCounts; MAX_CLASSES]> {
        self.maps.counts()
    }
}
