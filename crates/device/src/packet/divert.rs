//! BPF programs that divert ports from the kernel's own stack to a packet socket.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, ProgramError, SchedClassifier, SocketFilter, TcAttachType};
use aya::{Ebpf, EbpfError};

use super::config::PacketError;
use crate::bpf::{self, system_error};
use crate::capabilities::RequiredCapabilities;
use crate::xdp::rules::{RuleMaps, SharedRuleMaps};

/// Built from `bpf/divert.bpf.c` by `make -C bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/divert.bpf.o");

/// Diverts the ports of steering rules: the packet socket receives their packets, the kernel's
/// stack does not. The kernel removes the programs when the process ends, for whatever reason.
pub struct PortDiverter {
    rules: SharedRuleMaps,
    ebpf: Ebpf,
}

impl PortDiverter {
    /// Attaches the program that keeps diverted packets from the kernel's stack, without rules.
    pub(super) fn attach(interface: &str, vlan: Option<u16>) -> Result<Self, PacketError> {
        Self::try_attach(interface, vlan).map_err(|error| {
            let required = RequiredCapabilities::PACKET_SHARED;
            match system_error(&error) {
                Some(libc::EPERM | libc::EACCES) => PacketError::Permission(required.explain()),
                _ => {
                    PacketError::Divert { interface: interface.to_owned(), source: Box::new(error) }
                }
            }
        })
    }

    fn try_attach(interface: &str, vlan: Option<u16>) -> Result<Self, EbpfError> {
        let mut ebpf = bpf::load(OBJECT, &[])?;
        filter(&mut ebpf)?.load()?;
        let divert: &mut SchedClassifier =
            ebpf.program_mut("divert").ok_or(ProgramError::UnexpectedProgramType)?.try_into()?;
        divert.load()?;
        // Before the programs of others, which would process the frames too.
        let order = TcAttachOptions::TcxOrder(LinkOrder::first());
        divert.attach_with_options(interface, TcAttachType::Ingress, order)?;
        let mut rules = RuleMaps::take(&mut ebpf)?;
        rules.set_vlan(vlan)?;
        Ok(Self { rules: Arc::new(Mutex::new(rules)), ebpf })
    }

    /// Makes a packet socket receive diverted packets only.
    pub(super) fn filter(&mut self, socket: impl AsFd) -> io::Result<()> {
        let filter = filter(&mut self.ebpf).map_err(io::Error::other)?;
        filter.attach(socket).map_err(io::Error::other)
    }

    /// Rules for other threads.
    pub(super) fn shared_rules(&self) -> SharedRuleMaps {
        Arc::clone(&self.rules)
    }
}

fn filter(ebpf: &mut Ebpf) -> Result<&mut SocketFilter, ProgramError> {
    ebpf.program_mut("keep").ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}
