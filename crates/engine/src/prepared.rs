//! The steps from a configuration to a running engine, one by one: for a process that takes over
//! from another one with minimal downtime.

use tidegate_device::netlink::{self, Interface};
use tidegate_device::{Burst, Device, HandoverState};
use tidegate_gate::Mode;
use tidegate_memory::{Arena, HEADROOM_BYTES};
use tidegate_stack::{AddressOwnership, Config, Route, Stack, StackSnapshot};
use tidegate_wire::{IpCidr, MacAddr};

use crate::open::{OpenHook, random_seed};
use crate::open_device::{open_wrapped_device, prepare_takeover};
use crate::placement::on_node;
use crate::{
    AddressReservations, DeviceConfig, Engine, IdleConfig, InheritedDevice, KernelNeighbours,
    NetConfig, OpenError, PortClaims,
};

/// Maximum number of frames received at once.
const MAX_BURST_FRAMES: usize = 256;

/// Maximum number of bursts received from the interim device: more than its socket can hold.
const MAX_INTERIM_BURSTS: usize = 1024;

/// A checked configuration with allocated packet buffers, before its device is open.
pub struct PreparedEngine {
    // Devices come first: they are closed before the arena is unmapped.
    device: Option<Box<dyn Device>>,
    /// Interim AF_PACKET device: receives while no AF_XDP device takes the frames.
    interim_device: Option<Box<dyn Device>>,
    /// State of a closed device, from which the new device continues.
    handover_state: Option<HandoverState>,
    arena: Arena,
    config: NetConfig,
    neighbours: Option<KernelNeighbours>,
    claims: PortClaims,
    reservations: AddressReservations,
}

impl PreparedEngine {
    /// Checks the configuration, reads what it needs from the kernel, and allocates packet buffers.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do.
    pub fn new(mut config: NetConfig) -> Result<Self, OpenError> {
        let shared = config.shares_kernel_addresses();
        let mode = config.engine.gate.config().mode;
        if config.admission.is_some() && !matches!(mode, Mode::Polled | Mode::Dedicated) {
            return Err(OpenError::AdmissionNeedsPolling(mode));
        }
        let mut neighbours = None;
        if shared {
            let interface =
                config.kernel_interface.as_deref().or(config.device.shareable_interface());
            let interface = Interface::by_name(interface.ok_or(OpenError::CannotShareAddress)?)?;
            neighbours =
                Some(KernelNeighbours::follow(interface.index, config.neighbour_resolver.take())?);
            config.addresses = netlink::addresses(interface.index)?;
            if config.addresses.is_empty() {
                return Err(OpenError::NoKernelAddress(interface.name));
            }
            let routes = netlink::routes(interface.index)?;
            let routes = routes
                .iter()
                .map(|route| Route { prefix: route.destination, gateway: route.gateway });
            config.routes.extend(routes);
        } else if config.addresses.is_empty() {
            return Err(OpenError::NoAddress);
        }
        let addresses = config.addresses.iter().filter(|_| shared);
        let addresses = addresses.map(IpCidr::address).collect();
        let claims = PortClaims::new(addresses, config.kernel_ports_bound);
        let arena = on_node(config.node, || Arena::new(config.arena))?;
        Ok(Self {
            device: None,
            interim_device: None,
            handover_state: None,
            arena,
            config,
            neighbours,
            claims,
            reservations: AddressReservations::default(),
        })
    }

    /// Does the slow steps that are possible while another process has the device, and starts to
    /// keep arriving frames for this engine.
    ///
    /// So no frame is lost between the last poll of the old process and the first poll of this one:
    /// - AF_PACKET: the device itself is opened, since an interface takes any number of them.
    /// - AF_XDP, which takes one process only: an interim AF_PACKET device receives the frames that
    ///   no program takes, in a build with feature `packet`.
    /// - TAP: the kernel device queues the frames.
    /// - Other devices lose frames meanwhile, as a wire may. So does a device that shares the
    ///   kernel's addresses: the kernel would answer the same frames.
    ///
    /// # Errors
    /// As [`PreparedEngine::open_device`].
    pub fn start_interim_capture(&mut self) -> Result<(), OpenError> {
        if self.config.device.allows_other_process() {
            return self.open_device();
        }
        let prepared = prepare_takeover(&self.config, &mut self.arena)?;
        self.interim_device = prepared.interim_device;
        self.handover_state = prepared.handover_state;
        Ok(())
    }

    /// Discards the frames kept so far: the other process has received them too.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn discard_interim_frames(&mut self) -> Result<(), OpenError> {
        let device = self.interim_device.as_mut().or(self.device.as_mut());
        let Some(device) = device else { return Ok(()) };
        let discard = |burst: &mut Burst, arena: &mut Arena| {
            while let Some(frame) = burst.pop_front() {
                arena.free(frame);
            }
        };
        drain_device(&mut **device, &mut self.arena, discard)
    }

    /// Sets the kernel object that the device inherits from the other process. The device uses it
    /// from [`Engine::take_over`] on. Ignored for a device of another kind.
    pub fn inherit(&mut self, inherited: InheritedDevice) {
        inherited.apply_to(&mut self.handover_state);
    }

    /// Continues the reservations of own addresses of the other process, whose
    /// [`Engine::reservations`] they are.
    pub fn inherit_reservations(&mut self, reservations: AddressReservations) {
        self.reservations = reservations;
    }

    /// Reserves the own addresses among the programs on the interface, and opens the device.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do.
    pub(crate) fn open_alone(&mut self) -> Result<(), OpenError> {
        let NetConfig { ownership, device, vlan, addresses, .. } = &self.config;
        if let (AddressOwnership::Exclusive, Some(interface)) = (ownership, device.interface()) {
            let addresses = addresses.iter().map(IpCidr::address);
            self.reservations = AddressReservations::reserve(interface, *vlan, addresses)?;
        }
        self.open_device()
    }

    /// As [`crate::PreparedEngines::keep_mac`]; returns true if the device has a new address each
    /// time.
    pub(crate) fn keep_mac(&mut self, mac: MacAddr) -> bool {
        let mac_changes_on_open = matches!(self.config.device, DeviceConfig::Dpdk(_));
        if mac_changes_on_open {
            self.config.mac = self.config.mac.or(Some(mac));
        }
        mac_changes_on_open
    }

    /// Opens the device unless it is open. The call can be repeated.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do.
    pub fn open_device(&mut self) -> Result<(), OpenError> {
        if self.device.is_none() {
            let Self { config, handover_state, arena, .. } = self;
            self.device = Some(open_wrapped_device(config, handover_state, arena)?);
            call_hook(config.open_hook.take())?;
        }
        Ok(())
    }

    /// Starts the engine with an empty stack, which probes and announces its own addresses. Also
    /// returns its port claims.
    ///
    /// # Errors
    /// If the stack rejects the configuration, or the device is not open.
    pub fn begin(self) -> Result<(Engine, PortClaims), OpenError> {
        let probe = self.config.probe;
        self.start(|config, now_ns, _| {
            let mut stack = Stack::new(config, now_ns)?;
            stack.claim_addresses(now_ns, probe);
            Ok(stack)
        })
    }

    /// As [`PreparedEngine::begin`], with the stack that another process saved.
    ///
    /// # Errors
    /// As [`PreparedEngine::begin`], and if the saved state cannot be restored.
    pub fn restore(self, snapshot: StackSnapshot<'_>) -> Result<(Engine, PortClaims), OpenError> {
        self.start(|config, now_ns, arena| Ok(Stack::restore(config, snapshot, now_ns, arena)?))
    }

    fn start(
        self,
        stack: impl FnOnce(Config, u64, &mut Arena) -> Result<Stack, OpenError>,
    ) -> Result<(Engine, PortClaims), OpenError> {
        let Self { device, interim_device, mut arena, mut config, neighbours, .. } = self;
        if config.device.is_fed_by_kernel() && config.engine.idle == IdleConfig::default() {
            // The kernel's receive work may need this core: a pause yields to it.
            config.engine.idle.spin_ns = 0;
        }
        let not_open = || OpenError::Io(std::io::Error::other("the device was not opened"));
        let device = device.ok_or_else(not_open)?;
        let seed = config.seed.map_or_else(random_seed, Ok)?;
        let clock = config.clock;
        let stack_config = stack_config(&config, &*device, seed);
        let mut stack = stack(stack_config, clock.now_ns(), &mut arena)?;
        if let Some(transmit) = &config.transmit {
            stack.set_transmit_classes(transmit)?;
        }
        if let Some(mut interim_device) = interim_device {
            drain_device(&mut *interim_device, &mut arena, |burst, arena| {
                stack.handle_burst(clock.now_ns(), burst, arena);
            })?;
        }
        let mut engine = Engine::new(device, arena, stack, clock, neighbours, config.engine);
        if let Some(admission) = &config.admission {
            engine.set_admission(admission, seed)?;
        }
        engine.reservations = self.reservations;
        engine.device_node = config.node;
        Ok((engine, self.claims))
    }
}

/// Opens a device and starts an engine with an empty stack. Also returns its port claims.
///
/// # Errors
/// [`OpenError`] says what is wrong and what to do; nothing stays behind.
pub fn open(config: NetConfig) -> Result<(Engine, PortClaims), OpenError> {
    let mut prepared = PreparedEngine::new(config)?;
    prepared.open_alone()?;
    prepared.begin()
}

/// Opens the device of a secondary core. The primary core probes and announces the addresses
/// of both.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_secondary(config: NetConfig) -> Result<(Engine, PortClaims), OpenError> {
    let mut prepared = PreparedEngine::new(config)?;
    prepared.open_device()?;
    prepared.start(|config, now_ns, _| Ok(Stack::new(config, now_ns)?))
}

/// Calls the hook of an open device, if it has one.
///
/// # Errors
/// That of the hook.
pub(crate) fn call_hook(hook: Option<OpenHook>) -> Result<(), OpenError> {
    hook.map_or(Ok(()), |hook| hook()).map_err(OpenError::Io)
}

/// Receives all waiting frames of a device, burst by burst.
fn drain_device(
    device: &mut dyn Device,
    arena: &mut Arena,
    mut on_burst: impl FnMut(&mut Burst, &mut Arena),
) -> Result<(), OpenError> {
    let mut burst = Burst::with_capacity(MAX_BURST_FRAMES);
    for _ in 0..MAX_INTERIM_BURSTS {
        let frames = device.receive(arena, &mut burst, MAX_BURST_FRAMES).map_err(OpenError::Io)?;
        on_burst(&mut burst, arena);
        if frames < MAX_BURST_FRAMES {
            break;
        }
    }
    Ok(())
}

fn stack_config(config: &NetConfig, device: &dyn Device, seed: [u8; 16]) -> Config {
    let capabilities = device.capabilities();
    let mac = config.mac.unwrap_or(MacAddr(capabilities.mac));
    let max_tso_bytes = match capabilities.segmentation {
        // Headers are prepended.
        true => usize::from(u16::MAX - HEADROOM_BYTES),
        false => 0,
    };
    Config::ethernet(mac, seed)
        .medium(capabilities.medium)
        .mtu(capabilities.mtu)
        .vlan(config.vlan)
        .addresses(config.addresses.clone())
        .routes(config.routes.clone())
        .ownership(config.ownership)
        .limits(config.limits.clone())
        .transmit_checksum(capabilities.transmit_checksum)
        .max_tso_bytes(max_tso_bytes)
}
