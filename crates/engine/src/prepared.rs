//! The steps from a configuration to a running engine, one by one: for who takes
//! over from another process and must be quick about it.

use tidegate_gate::Mode;
use tidegate_memory::{Arena, HEADROOM_BYTES};
use tidegate_port::netlink::{self, Interface};
use tidegate_port::packet::{PacketConfig, PacketPort};
use tidegate_port::xdp::XdpPort;
use tidegate_port::{Burst, Left, Port, dpdk};
use tidegate_stack::{Config, Ownership, Route, SavedStack, Stack};
use tidegate_wire::{IpCidr, MacAddr};

use crate::open::{open_port, packet_steering, random_seed};
use crate::{
    Claims, Engine, IdleConfig, Inherited, KernelNeighbours, NetConfig, OpenError, PortConfig,
};

/// Frames that are taken out of a port at once.
const BURST: usize = 256;

/// The most bursts that are taken up of what arrived before the port was open:
/// more than the catching socket can hold.
const CAUGHT_BURSTS: usize = 1024;

/// A configuration that was checked, with memory for packets, before its port is
/// open.
pub struct Prepared {
    // Ports come first: they are closed before the arena is unmapped.
    port: Option<Box<dyn Port>>,
    /// Gets what arrives while no AF_XDP port takes it.
    catching: Option<PacketPort>,
    /// What the port goes on with.
    left: Option<Left>,
    arena: Arena,
    config: NetConfig,
    neighbours: Option<KernelNeighbours>,
    claims: Claims,
}

impl Prepared {
    /// Checks the configuration, asks the kernel what is needed of it, and makes
    /// the memory for packets.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do.
    pub fn new(mut config: NetConfig) -> Result<Self, OpenError> {
        let shared = config.ownership == Ownership::Shared;
        let mode = config.engine.gate.config().mode;
        if config.admission.is_some() && !matches!(mode, Mode::Polled | Mode::Dedicated) {
            return Err(OpenError::AdmissionNeedsPolling(mode));
        }
        let mut neighbours = None;
        if shared {
            let PortConfig::Xdp(xdp) = &config.port else { return Err(OpenError::CannotShare) };
            let interface = Interface::by_name(&xdp.interface)?;
            neighbours = Some(KernelNeighbours::follow(interface.index)?);
            config.addresses = netlink::addresses(interface.index)?;
            if config.addresses.is_empty() {
                return Err(OpenError::NothingToShare(interface.name));
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
        let claims = Claims::new(addresses, config.ports_are_held);
        let kernel_receives = matches!(config.port, PortConfig::Packet(_) | PortConfig::Tap(_));
        if kernel_receives && config.engine.idle == IdleConfig::default() {
            // Its work may need this core: a pause lets it have it.
            config.engine.idle.spin_ns = 0;
        }
        let arena = Arena::new(config.arena)?;
        Ok(Self { port: None, catching: None, left: None, arena, config, neighbours, claims })
    }

    /// Does what takes long and can be done while another process has the port.
    /// From now on what arrives is kept for the engine, although another process
    /// still has the port: nothing is lost between its last look and our first.
    /// An AF_PACKET port is opened for that, one more is no hindrance; for
    /// AF_XDP, which only one can have, an AF_PACKET socket sees what no program
    /// takes. A TAP device keeps what arrives. Other ports lose what comes meanwhile, as
    /// a wire may, and so does one on the kernel's addresses: the kernel would answer
    /// what it saw.
    ///
    /// # Errors
    /// As [`Prepared::open_port`].
    pub fn catch(&mut self) -> Result<(), OpenError> {
        match &self.config.port {
            PortConfig::Packet(_) => self.open_port(),
            PortConfig::Xdp(xdp) => {
                self.left = Some(Left::Xdp(Box::new(XdpPort::load()?)));
                if self.config.ownership == Ownership::Shared {
                    return Ok(());
                }
                let steering = packet_steering(&self.config.addresses, self.config.vlan);
                let config = PacketConfig { steering, ..PacketConfig::new(&xdp.interface) };
                self.catching = Some(PacketPort::open(&config, &mut self.arena)?);
                Ok(())
            }
            PortConfig::Dpdk(config) => Ok(dpdk::start(config)?),
            _ => Ok(()),
        }
    }

    /// Forgets what was caught so far: the other process has read it too.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn forget_caught(&mut self) -> Result<(), OpenError> {
        let catching = self.catching.as_mut().map(|port| port as &mut dyn Port);
        let Some(port) = catching.or(self.port.as_deref_mut()) else { return Ok(()) };
        let forget = |burst: &mut Burst, arena: &mut Arena| {
            while let Some(frame) = burst.pop_front() {
                arena.free(frame);
            }
        };
        take_caught(port, &mut self.arena, forget)
    }

    /// The port is to go on with what the other process has left, from
    /// [`Engine::go_live`] on. Does nothing for a port of another kind.
    pub fn inherit(&mut self, inherited: Inherited) {
        match (inherited, &mut self.left) {
            (Inherited::Link(link), Some(Left::Xdp(loaded))) => loaded.inherit(link),
            (Inherited::Tap(device), left @ None) => *left = Some(Left::Tap(device)),
            _ => {}
        }
    }

    /// As [`crate::PreparedCores::keep_mac`]; says whether the device is one of those.
    pub(crate) fn keep_mac(&mut self, mac: MacAddr) -> bool {
        let is_new_each_time = matches!(self.config.port, PortConfig::Dpdk(_));
        if is_new_each_time {
            self.config.mac = self.config.mac.or(Some(mac));
        }
        is_new_each_time
    }

    /// Opens the port, unless it is open. It may be tried again.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do.
    pub fn open_port(&mut self) -> Result<(), OpenError> {
        if self.port.is_none() {
            let Self { config, left, arena, .. } = self;
            self.port = Some(open_wrapped(config, left, arena)?);
        }
        Ok(())
    }

    /// Begins with an empty stack. Also gives the addresses that are shared with
    /// the kernel, if any.
    ///
    /// # Errors
    /// When the stack does not take the configuration, or the port is not open.
    pub fn begin(self) -> Result<(Engine, Claims), OpenError> {
        self.join(|config, now_ns, _| Ok(Stack::new(config, now_ns)?))
    }

    /// As [`Prepared::begin`], with the stack that another process has saved.
    ///
    /// # Errors
    /// As [`Prepared::begin`], and when the state cannot be taken up.
    pub fn go_on(self, saved: SavedStack) -> Result<(Engine, Claims), OpenError> {
        self.join(|config, now_ns, arena| Ok(Stack::restore(config, saved, now_ns, arena)?))
    }

    fn join(
        self,
        stack: impl FnOnce(Config, u64, &mut Arena) -> Result<Stack, OpenError>,
    ) -> Result<(Engine, Claims), OpenError> {
        let Self { port, catching, mut arena, config, neighbours, claims, .. } = self;
        let not_open = || OpenError::Io(std::io::Error::other("the port was not opened"));
        let port = port.ok_or_else(not_open)?;
        let seed = config.seed.map_or_else(random_seed, Ok)?;
        let clock = config.clock;
        let stack_config = stack_config(&config, &*port, seed);
        let mut stack = stack(stack_config, clock.now_ns(), &mut arena)?;
        if let Some(mut catching) = catching {
            take_caught(&mut catching, &mut arena, |burst, arena| {
                stack.ingest_burst(clock.now_ns(), burst, arena);
            })?;
        }
        let mut engine = Engine::new(port, arena, stack, clock, neighbours, config.engine);
        if let Some(admission) = &config.admission {
            engine.set_admission(admission, seed)?;
        }
        Ok((engine, claims))
    }
}

/// Opens the port and joins it to a stack. Also gives the addresses that are
/// shared with the kernel, if any.
///
/// # Errors
/// [`OpenError`] says what is wrong and what to do; nothing stays behind.
pub fn open(config: NetConfig) -> Result<(Engine, Claims), OpenError> {
    let mut prepared = Prepared::new(config)?;
    prepared.open_port()?;
    prepared.begin()
}

/// Takes what has arrived at a port, burst by burst.
fn take_caught(
    port: &mut dyn Port,
    arena: &mut Arena,
    mut take: impl FnMut(&mut Burst, &mut Arena),
) -> Result<(), OpenError> {
    let mut burst = Burst::with_capacity(BURST);
    for _ in 0..CAUGHT_BURSTS {
        let frames = port.receive(arena, &mut burst, BURST).map_err(OpenError::Io)?;
        take(&mut burst, arena);
        if frames < BURST {
            break;
        }
    }
    Ok(())
}

/// Opens the port of a configuration with all that is around it.
pub(crate) fn open_wrapped(
    config: &mut NetConfig,
    left: &mut Option<Left>,
    arena: &mut Arena,
) -> Result<Box<dyn Port>, OpenError> {
    let mut port = open_port(config, left, arena)?;
    for wrap in std::mem::take(&mut config.wraps) {
        port = wrap(port).map_err(OpenError::Io)?;
    }
    Ok(port)
}

fn stack_config(config: &NetConfig, port: &dyn Port, seed: [u8; 16]) -> Config {
    let capabilities = port.capabilities();
    let mac = config.mac.unwrap_or(MacAddr(capabilities.mac));
    Config {
        medium: capabilities.medium,
        mtu: capabilities.mtu,
        vlan: config.vlan,
        addresses: config.addresses.clone(),
        routes: config.routes.clone(),
        ownership: config.ownership,
        limits: config.limits.clone(),
        transmit_checksum: capabilities.transmit_checksum,
        segmentation_bytes: match capabilities.segmentation {
            // Headers go in front.
            true => usize::from(u16::MAX - HEADROOM_BYTES),
            false => 0,
        },
        ..Config::ethernet(mac, seed)
    }
}
