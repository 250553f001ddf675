//! Stack handle shared by an application's sockets.

use std::io;
#[cfg(feature = "attach")]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate_device::{Capabilities, DeviceCounters};
use tidegate_engine::capture::{CaptureRequest, CaptureTap};
use tidegate_engine::{
    self as engine, Engine, EngineCounters, NetConfig, OpenError, PortClaims, ShardedStacks,
};
use tidegate_gate::admission::{self, ClassCounters};
use tidegate_gate::{GateCounters, Mode, Settings, transmit};
use tidegate_memory::lock_meter::LockStatistics;
#[cfg(feature = "attach")]
use tidegate_service::attachment::Attachment;
use tidegate_stack::{Counters, OwnAddresses, UdpId};
use tidegate_wire::Medium;

use crate::backend::Backend;
#[cfg(feature = "attach")]
use crate::backend::attached::fork::Fork;
#[cfg(feature = "attach")]
use crate::backend::attached::stack::AttachedStack;
use crate::backend::embedded::stack::{EmbeddedGuard, EmbeddedStack};
use crate::backend::embedded::threads;
use crate::types::deadline::Deadline;
use crate::types::errors::unsupported_when_attached;
use crate::types::exchange::Exchange;
use crate::types::sleeper::Sleeper;
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// Handle of a network stack: embedded in this process, or in a daemon that this process is
/// attached to.
///
/// Cheap to clone. All clones share one stack or one attachment, which ends when the last
/// clone and the last socket are dropped.
///
/// # Examples
/// ```
/// use tidegate::{Net, NetConfig};
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let config = NetConfig::new(device)
///     .address("192.0.2.1/24".parse().unwrap())
///     .address("2001:db8::1/64".parse().unwrap());
/// let net = Net::open(config)?;
/// assert!(!net.is_attached());
/// // An application with an event loop of its own drives the stack itself.
/// let received_frames = net.run_once()?;
/// # let _ = received_frames;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Net {
    backend: Backend,
}

/// Interval at which [`Net::wait_for_addresses`] looks at the addresses.
const ADDRESS_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Capabilities reported for an attached stack, whose device is the daemon's.
fn attached_capabilities() -> Capabilities {
    Capabilities {
        kind: "daemon",
        detail: "attached".to_owned(),
        medium: Medium::Ip,
        mac: [0; 6],
        mtu: 0,
        receive_checksum: false,
        transmit_checksum: false,
        segmentation: false,
        queues: 0,
    }
}

/// Counters of a stack since it was opened.
#[derive(Clone, Debug, Default)]
pub struct NetCounters {
    /// Rounds and sleeps of the engine.
    pub engine: EngineCounters,
    /// Turns, and how often receiving was paused.
    pub gate: GateCounters,
    /// Admitted and refused packets of each class; empty without admission control.
    pub classes: Vec<(String, ClassCounters)>,
    /// Packets per second that admission admits in all; `None` while it limits nothing.
    pub admission_limit_pps: Option<u64>,
    /// Frames of each transmit class; empty without classes.
    pub transmit_classes: Vec<(String, transmit::ClassCounters)>,
    /// Frames at the device.
    pub device: DeviceCounters,
    /// Packets in the stack.
    pub stack: Counters,
}

impl NetCounters {
    /// Every drop, at the device and in the stack, by reason.
    pub fn drops(&self) -> tidegate_wire::DropCounters {
        let mut drops = self.device.drops.clone();
        drops.merge(&self.stack.drops);
        drops.merge(&self.stack.transmit_drops);
        drops
    }
}

/// Settings of an embedded stack beside its engine.
struct StackSettings {
    thread_mode: Option<Mode>,
    has_lock_statistics: bool,
}

impl StackSettings {
    fn of(config: &NetConfig) -> Self {
        Self {
            thread_mode: config.thread_mode(),
            has_lock_statistics: config.has_lock_statistics(),
        }
    }

    /// Starts a stack, with threads of its own in some modes; on a secondary core with the stack of
    /// the primary one.
    fn start(
        &self,
        (engine, claims): (Engine, PortClaims),
        primary: Option<&Net>,
    ) -> Result<Net, OpenError> {
        let meter = self.has_lock_statistics.then(Box::default);
        let primary = primary.and_then(Net::embedded).map(Arc::clone);
        let shared = EmbeddedStack::new(engine, claims, meter, primary).map_err(OpenError::Io)?;
        let shared = Arc::new(shared);
        let start = |mode| threads::start(&shared, mode);
        let threads = self.thread_mode.map(start).transpose().map_err(OpenError::Io)?;
        Ok(Net { backend: Backend::Embedded { shared, threads: threads.map(Arc::new) } })
    }
}

impl Net {
    /// Opens the device and starts a stack on it.
    ///
    /// # Errors
    /// [`OpenError`] states the cause and the remedy; everything opened so far is released.
    pub fn open(config: NetConfig) -> Result<Self, OpenError> {
        let settings = StackSettings::of(&config);
        settings.start(engine::open(config)?, None)
    }

    /// Opens the device for `cores` threads, and starts a stack for each: for programs that serve
    /// from several threads without a lock between them. All stacks have the same addresses. Each
    /// reads its own receive queue if the device has as many; otherwise the first one reads for all.
    ///
    /// A port belongs to the stack that binds it. Sockets with option `reuse_port`, one on each
    /// stack, share a port: every flow stays with one of them. Each stack must be run: as long as a
    /// thread does not, the frames in its queue wait, those for the other stacks too. The first stack
    /// ends after the others, whichever is dropped first.
    ///
    /// # Errors
    /// As [`Net::open`].
    ///
    /// # Examples
    /// ```
    /// use tidegate::{Net, NetConfig, UdpOptions, UdpSocket};
    ///
    /// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
    /// let config = NetConfig::new(device).address("192.0.2.1/24".parse()?);
    /// let shared = UdpOptions::default().reuse_port(true);
    /// for net in Net::open_cores(config, 2)? {
    ///     // One thread each.
    ///     let socket = UdpSocket::bind_with(&net, "192.0.2.1:53", shared)?;
    ///     assert_eq!(socket.local_addr()?.port(), 53);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_cores(config: NetConfig, cores: usize) -> Result<Vec<Self>, OpenError> {
        let settings = StackSettings::of(&config);
        let ShardedStacks { stacks, flow_steering } = engine::open_sharded(config, cores)?;
        // Each resolves its own neighbours.
        if let Some(flow_steering) = flow_steering {
            (0..cores).for_each(|core| flow_steering.set_active(core));
        }
        let mut nets = Vec::with_capacity(cores);
        for stack in stacks {
            let net = settings.start(stack, nets.first())?;
            nets.push(net);
        }
        Ok(nets)
    }

    /// Attaches to the daemon that listens at `path` (`tidegate daemon`). The daemon lists
    /// this process as `name`. Sockets of this [`Net`] live in the daemon, and end with the
    /// daemon or with this process.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] and [`io::ErrorKind::ConnectionRefused`] when no daemon
    /// listens at `path`, [`io::ErrorKind::PermissionDenied`] when this user may not attach.
    #[cfg(feature = "attach")]
    pub fn attach(path: impl AsRef<Path>, name: &str) -> io::Result<Self> {
        let attachment = Attachment::connect(path.as_ref(), name)?;
        Ok(Self { backend: Backend::Attached(Arc::new(AttachedStack::new(attachment)?)) })
    }

    /// True if the stack is in a daemon. Such a [`Net`] has no device information and no
    /// counters: `tidegate ss` reports them.
    pub fn is_attached(&self) -> bool {
        self.embedded().is_none()
    }

    /// Prepares a fork of this process, if it is attached to a daemon: the child gets all
    /// sockets of this [`Net`], and a socket is closed when no process holds it any more.
    /// Returns `None` for an embedded stack, which the child must not use.
    #[cfg(feature = "attach")]
    pub fn prepare_fork(&self) -> Option<Fork<'_>> {
        self.attached().map(|attached| Fork::prepare(attached))
    }

    /// Prepares a filter of system calls (seccomp) in a process that is attached to a daemon and
    /// shares its connections with other processes: they are no longer locked against those by system
    /// calls. No other process may use these connections at the same time. Waiting, reading, writing and
    /// closing then take only `read`, `write`, `close`, `poll`, `ppoll` and futexes.
    #[cfg(feature = "attach")]
    pub fn prepare_system_call_filter(&self) {
        if let Some(attached) = self.attached() {
            attached.prepare_system_call_filter();
        }
    }

    /// Receive-scheduling settings in force.
    pub fn gate(&self) -> Settings {
        self.lock_embedded()
            .map_or_else(Settings::default, |mut core| core.engine.gate().settings().clone())
    }

    /// Changes the receive-scheduling settings.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode, because the mode's threads are
    /// started when the stack is opened. [`io::ErrorKind::Unsupported`] when the stack is in
    /// a daemon.
    pub fn set_gate(&self, settings: Settings) -> io::Result<()> {
        let mut core =
            self.lock_embedded().ok_or_else(|| unsupported_when_attached("receive scheduling"))?;
        core.engine.set_gate(settings)
    }

    /// Enables admission control, or replaces its configuration. Sources have to become known
    /// again.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an invalid configuration.
    /// [`io::ErrorKind::Unsupported`] when the stack is in a daemon. Another kind when the device
    /// rejects the configuration.
    pub fn set_admission(&self, config: &admission::Config) -> io::Result<()> {
        let mut core =
            self.lock_embedded().ok_or_else(|| unsupported_when_attached("admission control"))?;
        core.engine.change_admission(config)
    }

    /// Sends by transmit classes from now on, or by others. A stack of several network cores gets its
    /// part of all ceilings ([`transmit::Config::divided`]).
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an invalid configuration.
    /// [`io::ErrorKind::Unsupported`] when the stack is in a daemon.
    pub fn set_transmit_classes(&self, config: &transmit::Config) -> io::Result<()> {
        let mut core =
            self.lock_embedded().ok_or_else(|| unsupported_when_attached("transmit classes"))?;
        core.engine.change_transmit_classes(config)
    }

    /// Begins a capture of the frames of an embedded stack, as core `core` of `request`.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when the stack is in a daemon. Another kind when the memory
    /// is too small or too many captures run.
    pub fn start_capture(&self, request: &CaptureRequest, core: usize) -> io::Result<()> {
        let tap = CaptureTap::new(request, core)?;
        let mut core = self.lock_embedded().ok_or_else(|| unsupported_when_attached("capture"))?;
        core.engine.start_capture(tap)
    }

    /// Ends capture `number`, if it runs.
    pub fn end_capture(&self, number: u64) {
        if let Some(mut core) = self.lock_embedded() {
            core.engine.end_capture(number);
        }
    }

    /// Waits until the own addresses of an embedded stack are known to be unique: at once, or 0.2 s
    /// after the stack was opened, or some seconds with [`AddressProbe::Rfc`]. Sockets work
    /// meanwhile. Addresses of a daemon are the daemon's to check.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another host has claimed one of them. The stack has given
    /// it up then.
    ///
    /// [`AddressProbe::Rfc`]: tidegate_stack::AddressProbe::Rfc
    pub fn wait_for_addresses(&self) -> io::Result<()> {
        loop {
            let Some(addresses) = self.lock_embedded().map(|core| core.own_addresses()) else {
                return Ok(());
            };
            match addresses {
                OwnAddresses::Unique => return Ok(()),
                OwnAddresses::Taken(conflict) => return Err(conflict.into()),
                OwnAddresses::Probing => {}
            }
            let step = Deadline::after(Some(ADDRESS_CHECK_INTERVAL));
            match self.wait_until(&[], step, |_| None::<io::Result<()>>) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    /// True if dedicated threads drive the stack. Otherwise the calls that wait for a socket
    /// drive it.
    pub fn has_threads(&self) -> bool {
        matches!(self.backend, Backend::Embedded { threads: Some(_), .. })
    }

    /// Capabilities of the device.
    pub fn capabilities(&self) -> Capabilities {
        self.lock_embedded()
            .map_or_else(attached_capabilities, |core| core.engine.capabilities().clone())
    }

    /// Counters so far; all zero for an attached stack.
    pub fn counters(&self) -> NetCounters {
        let Some(mut core) = self.lock_embedded() else { return NetCounters::default() };
        let gate = *core.engine.gate().counters();
        let classes = core.engine.class_counters();
        let admission_limit_pps = core.engine.admission_limit_pps();
        let transmit_classes = core.engine.transmit_class_counters();
        let (engine, device, stack) = core.engine.counters();
        let stack = stack.clone();
        NetCounters { engine, gate, classes, admission_limit_pps, transmit_classes, device, stack }
    }

    /// Lock statistics since the stack was opened, if [`NetConfig::lock_statistics`] enabled
    /// them.
    pub fn lock_statistics(&self) -> Option<LockStatistics> {
        self.lock_embedded()?.meter.as_ref().map(|meter| meter.statistics())
    }

    /// Number of frames that are neither in use nor owned by the device.
    pub fn frames_available(&self) -> usize {
        self.lock_embedded().map_or(0, |core| core.engine.frames_available())
    }

    /// Runs the stack once: receive, process, transmit. Returns the number of received
    /// frames. For applications with an event loop of their own; blocking calls on sockets
    /// run the stack by themselves.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn run_once(&self) -> io::Result<usize> {
        match &self.backend {
            Backend::Embedded { shared, .. } => shared.lock().run(),
            #[cfg(feature = "attach")]
            Backend::Attached(attached) => attached.lock().poll_daemon().map(|_| 0),
        }
    }

    /// Runs the stack once for a call that does not wait and has found nothing, unless a wait has
    /// just run the stack. Returns true if the stack ran.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn run_if_due(&self) -> io::Result<bool> {
        match &self.backend {
            Backend::Embedded { shared, .. } => {
                let mut core = shared.lock();
                if !core.needs_round() {
                    return Ok(false);
                }
                core.run_briefly()?;
            }
            #[cfg(feature = "attach")]
            Backend::Attached(attached) => _ = attached.lock().poll_daemon()?,
        }
        Ok(true)
    }

    /// Finishes closed connections, for at most 2 s: for a process that exits without
    /// dropping its last handle of the stack.
    pub fn finish(&self) {
        if let Some(shared) = self.embedded() {
            shared.finish_connections();
        }
    }

    /// The embedded stack, if there is one.
    pub(crate) fn embedded(&self) -> Option<&Arc<EmbeddedStack>> {
        match &self.backend {
            Backend::Embedded { shared, .. } => Some(shared),
            #[cfg(feature = "attach")]
            Backend::Attached(_) => None,
        }
    }

    /// The attachment, if the stack is in a daemon.
    #[cfg(feature = "attach")]
    pub(crate) fn attached(&self) -> Option<&Arc<AttachedStack>> {
        match &self.backend {
            Backend::Embedded { .. } => None,
            Backend::Attached(attached) => Some(attached),
        }
    }

    /// Locks the embedded stack, if there is one.
    pub(crate) fn lock_embedded(&self) -> Option<EmbeddedGuard<'_>> {
        self.embedded().map(|shared| shared.lock())
    }

    /// Location of the stack.
    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Runs `call` on the locked stack, embedded or attached.
    #[inline]
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut dyn SocketOps) -> R) -> R {
        self.backend.with(call)
    }

    /// Runs the stack until `ready` returns a value or the deadline passes; see
    /// [`Backend::wait_until`].
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        self.backend.wait_until(sockets, deadline, ready)
    }

    /// Runs the stack until `ready` returns true, or `sleeper` has found an event of its own; see
    /// [`Backend::wait`].
    pub(crate) fn wait_for(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: impl FnMut(&mut dyn SocketOps) -> bool,
    ) -> io::Result<bool> {
        self.backend.wait(sockets, deadline, sleeper, ready)
    }

    /// Waits for datagrams of a socket, and answers a batch of them; see
    /// [`Backend::udp_exchange`].
    pub(crate) fn udp_exchange(
        &self,
        id: UdpId,
        deadline: Deadline,
        exchange: &mut impl Exchange,
    ) -> io::Result<usize> {
        self.backend.udp_exchange(id, deadline, exchange)
    }

    /// True if both handles are of one stack.
    pub fn is_same(&self, other: &Net) -> bool {
        self.backend.is_same(&other.backend)
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.backend {
            Backend::Embedded { shared, .. } => shared.fmt(f),
            #[cfg(feature = "attach")]
            Backend::Attached(_) => f.debug_struct("Net").field("device", &"daemon's").finish(),
        }
    }
}
