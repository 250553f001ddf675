//! Opens an AF_XDP device in the best mode that the interface supports.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aya::EbpfError;
use rustix::event::epoll;
use tidegate_memory::Arena;

use super::config::TargetInterface;
use super::core_queues::{CoreQueues, DataPath, OpenedQueues};
use super::holder;
use super::irq_deferral::IrqDeferral;
use super::napi::NapiPoller;
#[cfg(feature = "packet")]
use super::path_switch::PathSwitch;
use super::program::{SocketMap, SteeringProgram};
use super::queue::{Queue, QueueSettings};
use super::segment_sender::SegmentSender;
use super::socket::{Binding, XdpSocket};
use super::umem::Umem;
use super::{AttachMode, CopyMode, XdpConfig, XdpDevice, XdpError};
use crate::bpf::system_error;
use crate::capabilities::RequiredCapabilities;
use crate::rx_missed::RxMissedCounters;
use crate::{Capabilities, Medium};

/// Opens a device. On success `loaded` is left empty; on failure it holds the program.
pub(super) fn open(
    config: XdpConfig,
    loaded: &mut Option<SteeringProgram>,
    arena: &mut Arena,
) -> Result<XdpDevice, XdpError> {
    config.rings.validate()?;
    let target = TargetInterface::find(&config, &Umem::from_arena(arena))?;
    let mut program = match loaded.take() {
        Some(program) => program,
        None => load()?,
    };
    let was_attached = program.link().is_some();
    match take_into_service(config, target, &mut program, arena) {
        Ok(service) => Ok(XdpDevice {
            queues: service.queues,
            program,
            offered: service.offered,
            #[cfg(feature = "packet")]
            path_switch: service.path_switch,
        }),
        Err(error) => {
            if !was_attached {
                program.detach();
            }
            *loaded = Some(program);
            Err(error)
        }
    }
}

/// Loads the steering program, attached to no interface.
pub(super) fn load() -> Result<SteeringProgram, XdpError> {
    SteeringProgram::load().map_err(|error| load_error(error, RequiredCapabilities::XDP))
}

/// Queues of another network core, to be opened with its arena.
pub(super) struct QueueOffer {
    config: XdpConfig,
    target: TargetInterface,
    native: bool,
    copying: Copying,
    sockets: SocketMap,
}

impl QueueOffer {
    /// Opens the queues, whose frames are redirected from then on.
    ///
    /// # Errors
    /// As [`open`].
    pub(super) fn open(mut self, arena: &mut Arena) -> Result<CoreQueues, XdpError> {
        let Self { config, target, native, copying, .. } = &self;
        let sockets = bind_all(config, target, &Umem::from_arena(arena), *copying)?;
        let opened = open_queues(config, target, (*native, *copying), sockets, arena)?;
        let queues = CoreQueues::new(opened);
        let set = queues.set_sockets(&self.target.queues, &mut self.sockets);
        set.inspect_err(|_| arena.reclaim_all())?;
        Ok(queues)
    }
}

/// Parts of a device in service.
struct Service {
    queues: CoreQueues,
    /// Queues of the other network cores.
    offered: Vec<QueueOffer>,
    #[cfg(feature = "packet")]
    path_switch: Option<PathSwitch>,
}

/// Attaches the program and opens the queues of the first network core.
fn take_into_service(
    config: XdpConfig,
    target: TargetInterface,
    program: &mut SteeringProgram,
    arena: &mut Arena,
) -> Result<Service, XdpError> {
    if let Some(&queue) = target.queues.iter().find(|&&queue| queue >= program.max_queues()) {
        let interface = target.name.clone();
        return Err(XdpError::NoQueue { interface, queue, active: program.max_queues() });
    }
    let native = match program.link() {
        Some(link) => link.native(),
        None => {
            let link = |native| program.attach(target.index, native);
            attach(link, config.mode, (&target.name, target.index), RequiredCapabilities::XDP)?
        }
    };
    #[cfg(feature = "packet")]
    let path_switch = (native && config.mode == AttachMode::Auto)
        .then(|| PathSwitch::open(&target, &config.steering, arena))
        .flatten();
    let mut parts = target.share_out(config.cores, config.busy_poll.is_some()).into_iter();
    let own = parts
        .next()
        .ok_or_else(|| XdpError::InvalidQueues { interface: config.interface.clone() })?;
    let (sockets, copying) = bind(&config, &own, &Umem::from_arena(arena), native)?;
    let opened = open_queues(&config, &own, (native, copying), sockets, arena)?;
    let queues = CoreQueues::new(opened);
    #[cfg(feature = "packet")]
    let path_switch = path_switch.filter(|switch| {
        queues.keeps_settings() && switch.wake_fd().is_some_and(|fd| queues.wake_for(fd).is_ok())
    });
    // The rules first, the sockets last, so that no frame is redirected by an incomplete set of
    // rules.
    let started = program.set_steering(&config.steering).and_then(|()| {
        queues.set_sockets(&own.queues, program.sockets())?;
        program.stop_dropping()
    });
    let offered = started.and_then(|()| {
        parts
            .map(|target| {
                let (config, sockets) = (config.clone(), program.sockets().try_clone()?);
                Ok(QueueOffer { config, target, native, copying, sockets })
            })
            .collect()
    });
    match offered {
        Ok(offered) => Ok(Service {
            queues,
            offered,
            #[cfg(feature = "packet")]
            path_switch,
        }),
        Err(error) => {
            drop(queues);
            arena.reclaim_all();
            Err(error.into())
        }
    }
}

/// Opens queues on bound sockets.
fn open_queues(
    config: &XdpConfig,
    target: &TargetInterface,
    (native, copying): (bool, Copying),
    sockets: Vec<XdpSocket>,
    arena: &mut Arena,
) -> Result<OpenedQueues, XdpError> {
    let busy_poll = config.busy_poll.as_ref();
    if let Some(settings) = busy_poll {
        for socket in &sockets {
            socket.prefer_busy_poll(settings).map_err(busy_poll_error)?;
        }
    }
    let poller = busy_poll.and_then(|_| poller(target, &sockets));
    let irq_deferral = busy_poll.and_then(|settings| IrqDeferral::set(target, settings).ok());
    let readiness = readiness(&sockets)
        .map_err(|source| XdpError::Interface { interface: target.name.clone(), source })?;
    let data_path = DataPath {
        native,
        zero_copy: copying == Copying::None,
        splits: copying == Copying::MultiBuffer,
        local_peers: target.has_local_peers,
        busy_poll: config.busy_poll,
    };
    // A NIC that reads frames from the arena sends them at once; for others the kernel copies.
    let segment_sender = match copying {
        Copying::None => None,
        _ => SegmentSender::open(target.index).ok(),
    };
    Ok(OpenedQueues {
        segment_sender,
        queues: queues(sockets, config, target, arena),
        poller,
        irq_deferral,
        readiness,
        data_path,
        rx_missed: RxMissedCounters::open(&target.name, target.id(), target.is_veth),
        capabilities: capabilities(target),
    })
}

fn busy_poll_error(source: io::Error) -> XdpError {
    match source.raw_os_error() {
        Some(libc::EPERM) => XdpError::NotPermitted {
            step: "enable busy polling",
            why: RequiredCapabilities::XDP.explain(),
        },
        _ => XdpError::BusyPoll(source),
    }
}

/// Creates the NAPI poller if the sockets cannot poll the driver. Kernels that
/// support the poller (6.13) know a socket's NAPI instance right after bind.
fn poller(target: &TargetInterface, sockets: &[XdpSocket]) -> Option<NapiPoller> {
    if sockets.iter().all(XdpSocket::can_poll_driver) {
        return None;
    }
    let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    NapiPoller::new(target.index, target.napis.as_deref(), &sockets).ok()
}

fn capabilities(target: &TargetInterface) -> Capabilities {
    Capabilities {
        kind: "xdp",
        detail: String::new(),
        medium: Medium::Ethernet,
        mac: target.mac,
        mtu: target.mtu as usize,
        receive_checksum: target.has_local_peers,
        transmit_checksum: false,
        segmentation: false,
        queues: target.queues.len() as u32,
    }
}

/// Creates the queues of the sockets. At most half of the arena is lent for receiving; the
/// rest holds received frames and frames to send.
fn queues(
    sockets: Vec<XdpSocket>,
    config: &XdpConfig,
    target: &TargetInterface,
    arena: &mut Arena,
) -> Vec<Queue> {
    let settings = QueueSettings {
        lent_target: (arena.capacity() / 2 / sockets.len().max(1)) as u32,
        busy_poll: config.busy_poll.is_some(),
        local_peers: target.has_local_peers,
        mtu: target.mtu as usize,
    };
    sockets.into_iter().map(|socket| Queue::new(socket, settings, arena)).collect()
}

/// Creates an epoll descriptor that is readable while any socket has received frames.
fn readiness(sockets: &[XdpSocket]) -> io::Result<OwnedFd> {
    let readiness = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (index, socket) in sockets.iter().enumerate() {
        let data = epoll::EventData::new_u64(index as u64);
        epoll::add(&readiness, socket, data, epoll::EventFlags::IN)?;
    }
    Ok(readiness)
}

/// Attaches a program by `link`, whose argument selects native mode. Returns true if native
/// mode succeeded.
pub(super) fn attach(
    mut link: impl FnMut(bool) -> io::Result<()>,
    mode: AttachMode,
    (interface, index): (&str, u32),
    required: RequiredCapabilities,
) -> Result<bool, XdpError> {
    let (modes, tried): (&[bool], _) = match mode {
        AttachMode::Auto => (&[true, false], "neither native nor generic"),
        AttachMode::Native => (&[true], "native"),
        AttachMode::Generic => (&[false], "generic"),
    };
    let mut refusals = Vec::new();
    for &native in modes {
        match link(native) {
            Ok(()) => return Ok(native),
            Err(error) => match error.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => {
                    return Err(XdpError::AlreadyAttached {
                        interface: interface.to_owned(),
                        holder: holder::of_interface(index),
                    });
                }
                Some(libc::EPERM | libc::EACCES) => {
                    let (step, why) = ("attach an XDP program", required.explain());
                    return Err(XdpError::NotPermitted { step, why });
                }
                Some(libc::ENODEV) => return Err(XdpError::InterfaceGone(interface.to_owned())),
                _ => refusals.push(error),
            },
        }
    }
    let source = refusals.pop().unwrap_or_else(|| io::Error::other("no mode was tried"));
    let hint = match source.raw_os_error() {
        Some(libc::ERANGE) => {
            "; the MTU of the interface or of its veth peer is too large: `ip link set dev DEV mtu 1500`"
        }
        Some(libc::ENOSPC) => {
            "; a veth needs as many receive queues as its peer has transmit queues: `ethtool -L PEER tx 1`"
        }
        Some(libc::EOPNOTSUPP) if mode == AttachMode::Native => {
            "; the driver has no native XDP: use generic mode"
        }
        Some(libc::EINVAL) => "; BPF links for XDP need Linux 5.9",
        _ => "",
    };
    Err(XdpError::Attach { interface: interface.to_owned(), tried, source, hint })
}

/// Copy mode of bound sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copying {
    /// Zero-copy.
    None,
    /// The kernel copies each packet into one buffer.
    SingleBuffer,
    /// The kernel copies each packet into as many buffers as it needs (Linux 6.6).
    MultiBuffer,
}

/// Opens a socket for each queue; returns the sockets and their copy mode. Each attempt creates
/// new sockets: a failed bind leaves a socket and its umem unusable.
fn bind(
    config: &XdpConfig,
    target: &TargetInterface,
    umem: &Umem,
    native: bool,
) -> Result<(Vec<XdpSocket>, Copying), XdpError> {
    // A native program makes the kernel segment before the frames reach the driver. The generic
    // path takes frames of local senders as they are.
    let modes: &[Copying] = match (config.copy, native) {
        (CopyMode::ZeroCopy, _) => &[Copying::None],
        (CopyMode::Auto, true) => &[Copying::None, Copying::SingleBuffer],
        (CopyMode::Copy, true) => &[Copying::SingleBuffer],
        (_, false) => &[Copying::MultiBuffer, Copying::SingleBuffer],
    };
    let mut refusal = None;
    for &copying in modes {
        match bind_all(config, target, umem, copying) {
            Ok(sockets) => return Ok((sockets, copying)),
            // The last attempt reports the error, unless the copy mode was the cause.
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| XdpError::InvalidQueues { interface: target.name.clone() }))
}

fn bind_all(
    config: &XdpConfig,
    target: &TargetInterface,
    umem: &Umem,
    copying: Copying,
) -> Result<Vec<XdpSocket>, XdpError> {
    let mut sockets: Vec<XdpSocket> = Vec::with_capacity(target.queues.len());
    for &queue in &target.queues {
        let binding = Binding {
            interface_index: target.index,
            queue,
            zero_copy: copying == Copying::None,
            multi_buffer: copying == Copying::MultiBuffer,
        };
        let socket = XdpSocket::open(umem, sockets.first(), &config.rings, binding)
            .map_err(|error| socket_error(error, target, umem, queue))?;
        sockets.push(socket);
    }
    Ok(sockets)
}

fn socket_error(source: io::Error, target: &TargetInterface, umem: &Umem, queue: u32) -> XdpError {
    let interface = target.name.clone();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => XdpError::NotPermitted {
            step: "open an AF_XDP socket",
            why: RequiredCapabilities::XDP.explain(),
        },
        Some(libc::EBUSY) => XdpError::QueueBusy { interface, queue },
        Some(libc::ENOBUFS | libc::ENOMEM) => XdpError::Memory { bytes: umem.len(), source },
        _ => XdpError::Socket { interface, queue, source },
    }
}

pub(super) fn load_error(error: EbpfError, required: RequiredCapabilities) -> XdpError {
    let not_permitted =
        || XdpError::NotPermitted { step: "load a BPF program", why: required.explain() };
    match system_error(&error) {
        Some(libc::EPERM) => not_permitted(),
        // The verifier refuses instructions that need another capability.
        Some(libc::EACCES | libc::EINVAL) if !required.are_in_effect() => not_permitted(),
        _ => XdpError::Load(Box::new(error)),
    }
}
