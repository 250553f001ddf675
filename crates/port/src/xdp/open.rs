//! Opening a port: the best way that the interface allows.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aya::EbpfError;
use aya::maps::MapError;
use aya::programs::ProgramError;
use rustix::event::epoll;
use tidegate_memory::Arena;

use super::alone::Alone;
use super::busy_poll::DeviceSettings;
use super::config::Target;
use super::napi::NapiPoller;
use super::program::Program;
use super::queue::Queue;
use super::ring_loss::RingLoss;
use super::socket::{Binding, Socket};
use super::traffic::Traffic;
use super::umem::Umem;
use super::{Copy, Mode, Way, XdpConfig, XdpError, XdpPort};
use crate::{Capabilities, Medium};

/// The program is taken out when the port is open.
pub(super) fn open(
    config: XdpConfig,
    loaded: &mut Option<Program>,
    arena: &mut Arena,
) -> Result<XdpPort, XdpError> {
    config.rings.check()?;
    let umem = Umem::of(arena);
    let target = Target::find(&config, &umem)?;
    let mut program = match loaded.take() {
        Some(program) => program,
        None => load()?,
    };
    let was_attached = program.link().is_some();
    let opened = take_into_service(&config, &target, &umem, &mut program, arena);
    let Parts { queues, way, poller, device, readiness } = match opened {
        Ok(parts) => parts,
        Err(error) => {
            if !was_attached {
                program.detach();
            }
            *loaded = Some(program);
            return Err(error);
        }
    };
    let mut port = XdpPort {
        capabilities: capabilities(&target),
        queues,
        program,
        poller,
        device,
        traffic: Traffic::new(),
        readiness,
        way,
        ring_loss: RingLoss::of(&target),
        alone: Alone::new(0, (0, 0)),
        next_receive: 0,
        next_transmit: 0,
        large_bursts: 0,
    };
    port.capabilities.detail = port.detail();
    Ok(port)
}

/// The program in the kernel, attached to nothing.
pub(super) fn load() -> Result<Program, XdpError> {
    Program::load().map_err(load_error)
}

/// What belongs to the interface in a port.
struct Parts {
    queues: Vec<Queue>,
    way: Way,
    poller: Option<NapiPoller>,
    device: Option<DeviceSettings>,
    readiness: OwnedFd,
}

fn take_into_service(
    config: &XdpConfig,
    target: &Target,
    umem: &Umem,
    program: &mut Program,
    arena: &mut Arena,
) -> Result<Parts, XdpError> {
    if let Some(&queue) = target.queues.iter().find(|&&queue| queue >= program.queue_limit()) {
        let interface = target.name.clone();
        return Err(XdpError::NoQueue { interface, queue, active: program.queue_limit() });
    }
    let native = match program.link() {
        Some(link) => link.native(),
        None => {
            let link = |native| program.attach(target.index, native);
            attach(link, config.mode, &target.name)?
        }
    };
    let (sockets, zero_copy) = bind(config, target, umem, native)?;

    let busy_poll = config.busy_poll.as_ref();
    if let Some(settings) = busy_poll {
        for socket in &sockets {
            socket.prefer_busy_poll(settings).map_err(XdpError::BusyPoll)?;
        }
    }
    let poller = busy_poll.and_then(|_| poller(target, &sockets));
    let device = busy_poll.and_then(|settings| DeviceSettings::set(target, settings).ok());

    let queues = queues(sockets, config, arena);
    let readiness = match start(config, target, program, &queues) {
        Ok(readiness) => readiness,
        Err(error) => {
            drop(queues);
            arena.reclaim_all();
            return Err(error);
        }
    };
    let way = Way { native, zero_copy, busy_poll: config.busy_poll };
    Ok(Parts { queues, way, poller, device, readiness })
}

/// What polls the device when the sockets do not know how to. Since the kernel
/// that has it, they know at once.
fn poller(target: &Target, sockets: &[Socket]) -> Option<NapiPoller> {
    if sockets.iter().all(Socket::runs_device) {
        return None;
    }
    NapiPoller::of(target.index).ok()
}

fn capabilities(target: &Target) -> Capabilities {
    Capabilities {
        kind: "xdp",
        detail: String::new(),
        medium: Medium::Ethernet,
        mac: target.mac,
        mtu: target.mtu as usize,
        receive_checksum: false,
        transmit_checksum: false,
        segmentation: false,
        queues: target.queues.len() as u32,
    }
}

/// Takes sockets into service. Half of the arena at most waits for packets; the
/// rest is for those that were received and those to be sent.
fn queues(sockets: Vec<Socket>, config: &XdpConfig, arena: &mut Arena) -> Vec<Queue> {
    let lent_target = (arena.capacity() / 2 / sockets.len().max(1)) as u32;
    let busy_poll = config.busy_poll.is_some();
    sockets.into_iter().map(|socket| Queue::new(socket, lent_target, busy_poll, arena)).collect()
}

/// Fills the program's maps: the rules first, the sockets last, so that nothing
/// is taken by half of the rules.
fn start(
    config: &XdpConfig,
    target: &Target,
    program: &mut Program,
    queues: &[Queue],
) -> Result<OwnedFd, XdpError> {
    program.set_steering(&config.steering)?;
    for (queue, &index) in queues.iter().zip(&target.queues) {
        program.set_socket(index, queue.socket().as_fd())?;
    }
    program.release()?;
    readiness(queues)
        .map_err(|source| XdpError::Interface { interface: target.name.clone(), source })
}

/// A descriptor that is readable when any socket has received something.
fn readiness(queues: &[Queue]) -> io::Result<OwnedFd> {
    let readiness = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (index, queue) in queues.iter().enumerate() {
        let data = epoll::EventData::new_u64(index as u64);
        epoll::add(&readiness, queue.socket(), data, epoll::EventFlags::IN)?;
    }
    Ok(readiness)
}

/// Attaches a program by `link`, which is told whether to do so in the driver;
/// returns whether it was.
pub(super) fn attach(
    mut link: impl FnMut(bool) -> io::Result<()>,
    mode: Mode,
    interface: &str,
) -> Result<bool, XdpError> {
    let (modes, tried): (&[bool], _) = match mode {
        Mode::Auto => (&[true, false], "neither native nor generic"),
        Mode::Native => (&[true], "native"),
        Mode::Generic => (&[false], "generic"),
    };
    let mut refusals = Vec::new();
    for &native in modes {
        match link(native) {
            Ok(()) => return Ok(native),
            Err(error) => match error.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => {
                    return Err(XdpError::AlreadyAttached(interface.to_owned()));
                }
                Some(libc::EPERM | libc::EACCES) => {
                    return Err(XdpError::NotPermitted("attach an XDP program"));
                }
                Some(libc::ENODEV) => return Err(XdpError::Gone(interface.to_owned())),
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
        Some(libc::EOPNOTSUPP) if mode == Mode::Native => {
            "; the driver has no native XDP: use generic mode"
        }
        Some(libc::EINVAL) => "; links to interfaces need Linux 5.9",
        _ => "",
    };
    Err(XdpError::Attach { interface: interface.to_owned(), tried, source, hint })
}

/// Opens a socket for each queue; returns them and whether they are zero-copy.
/// Everything is made anew for each attempt: a failed bind leaves a socket and
/// its umem of no use.
fn bind(
    config: &XdpConfig,
    target: &Target,
    umem: &Umem,
    native: bool,
) -> Result<(Vec<Socket>, bool), XdpError> {
    if config.copy == Copy::Zero || (config.copy == Copy::Auto && native) {
        match bind_all(config, target, umem, true) {
            Ok(sockets) => return Ok((sockets, true)),
            Err(error) if config.copy == Copy::Zero => return Err(error),
            // The next attempt says what is wrong, if it is not this.
            Err(_) => {}
        }
    }
    Ok((bind_all(config, target, umem, false)?, false))
}

fn bind_all(
    config: &XdpConfig,
    target: &Target,
    umem: &Umem,
    zero_copy: bool,
) -> Result<Vec<Socket>, XdpError> {
    let mut sockets: Vec<Socket> = Vec::with_capacity(target.queues.len());
    for &queue in &target.queues {
        let binding = Binding { interface_index: target.index, queue, zero_copy };
        let socket = Socket::open(umem, sockets.first(), &config.rings, binding)
            .map_err(|error| socket_error(error, target, umem, queue))?;
        sockets.push(socket);
    }
    Ok(sockets)
}

fn socket_error(source: io::Error, target: &Target, umem: &Umem, queue: u32) -> XdpError {
    let interface = target.name.clone();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => XdpError::NotPermitted("open an AF_XDP socket"),
        Some(libc::EBUSY) => XdpError::QueueBusy { interface, queue },
        Some(libc::ENOBUFS | libc::ENOMEM) => XdpError::Memory { bytes: umem.len(), source },
        _ => XdpError::Socket { interface, queue, source },
    }
}

pub(super) fn load_error(error: EbpfError) -> XdpError {
    let refused = match &error {
        EbpfError::ProgramError(ProgramError::LoadError { io_error, .. })
        | EbpfError::MapError(MapError::CreateError { io_error, .. }) => io_error.raw_os_error(),
        EbpfError::ProgramError(ProgramError::SyscallError(error))
        | EbpfError::MapError(MapError::SyscallError(error)) => error.io_error.raw_os_error(),
        _ => None,
    };
    match refused {
        Some(libc::EPERM) => XdpError::NotPermitted("load a BPF program"),
        _ => XdpError::Load(Box::new(error)),
    }
}
