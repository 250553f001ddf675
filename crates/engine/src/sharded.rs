//! Several cores behind one device, each with its own engine and stack.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};

use tidegate_device::Device;
use tidegate_device::sharded::{CoreDevice, Flow, FlowSteering, LocalPort, shard};
use tidegate_device::steering::TransportProtocol;
use tidegate_stack::{PortGroups, StackSnapshot, Transport};
use tidegate_wire::MacAddr;

use crate::claim::PortClaims;
use crate::open::{NetConfig, OpenError, OpenHook};
use crate::prepared::{PreparedEngine, call_hook, open_secondary};
use crate::{DeviceConfig, Engine, EngineConfig, IdleConfig};

/// Engines and stacks that share one device.
pub struct ShardedStacks {
    /// Engine and port claims of each core; the first is the primary core, which owns the device.
    pub stacks: Vec<(Engine, PortClaims)>,
    /// Steering of flows to cores; `None` with one core.
    pub flow_steering: Option<Arc<FlowSteering>>,
}

/// Opens the device of a configuration for `cores` network cores.
///
/// # Errors
/// As [`crate::open()`]; and if the device cannot be sharded.
pub fn open_sharded(config: NetConfig, cores: usize) -> Result<ShardedStacks, OpenError> {
    let mut prepared = PreparedEngines::new(config, cores)?;
    prepared.primary().open_alone()?;
    prepared.begin()
}

/// Flow steering and devices of the secondary cores, sent when the primary device is open.
type SecondaryDevices = (Arc<FlowSteering>, Vec<CoreDevice>);

/// As [`PreparedEngine`], for one core or several.
pub struct PreparedEngines {
    primary: PreparedEngine,
    secondaries: Vec<NetConfig>,
    /// Receives the secondary devices; `None` with one core.
    secondary_devices: Option<mpsc::Receiver<SecondaryDevices>>,
    /// Called once the devices of all cores are open.
    open_hook: Option<OpenHook>,
}

impl PreparedEngines {
    /// As [`PreparedEngine::new`].
    ///
    /// # Errors
    /// As [`PreparedEngine::new`].
    pub fn new(mut config: NetConfig, cores: usize) -> Result<Self, OpenError> {
        if cores == 1 {
            let primary = PreparedEngine::new(config)?;
            return Ok(Self {
                primary,
                secondaries: Vec::new(),
                secondary_devices: None,
                open_hook: None,
            });
        }
        // Cores share no state, so each has a part of the link.
        config.transmit = config.transmit.map(|transmit| transmit.divided(cores));
        let secondaries = (1..cores).map(|_| secondary_config(&config)).collect();
        let open_hook = config.open_hook.take();
        let (sender, receiver) = mpsc::channel();
        // A wrapper sees the frames of one queue only.
        if config.wrappers.is_empty() {
            config.device.share_queues(cores);
        }
        config = config.wrap(Box::new(move |device| {
            let mut secondaries = shard(device, cores)?;
            let primary = secondaries.remove(0);
            // The thread that opens the device waits for this message.
            let _ = sender.send((primary.flow_steering(), secondaries));
            Ok(Box::new(primary) as Box<dyn Device>)
        }));
        Ok(Self {
            primary: PreparedEngine::new(config)?,
            secondaries,
            secondary_devices: Some(receiver),
            open_hook,
        })
    }

    /// The primary core, whose device is to be opened.
    pub fn primary(&mut self) -> &mut PreparedEngine {
        &mut self.primary
    }

    /// Keeps the hardware address `mac` of another process, if the device has a new one each time
    /// that it is opened and none is configured.
    pub fn keep_mac(&mut self, mac: MacAddr) {
        if self.primary.keep_mac(mac) {
            self.secondaries
                .iter_mut()
                .for_each(|secondary| secondary.mac = secondary.mac.or(Some(mac)));
        }
    }

    /// Starts all engines with empty stacks.
    ///
    /// # Errors
    /// As [`PreparedEngine::begin`].
    pub fn begin(self) -> Result<ShardedStacks, OpenError> {
        self.start(PreparedEngine::begin)
    }

    /// As [`PreparedEngines::begin`], but the primary core continues with the stack that another
    /// process saved.
    ///
    /// # Errors
    /// As [`PreparedEngine::restore`].
    pub fn go_on(self, snapshot: StackSnapshot<'_>) -> Result<ShardedStacks, OpenError> {
        self.start(|primary| primary.restore(snapshot))
    }

    fn start(
        self,
        start_primary: impl FnOnce(PreparedEngine) -> Result<(Engine, PortClaims), OpenError>,
    ) -> Result<ShardedStacks, OpenError> {
        let Self { primary, secondaries, secondary_devices, open_hook } = self;
        let stacks = start_secondaries(start_primary(primary)?, secondaries, secondary_devices)?;
        call_hook(open_hook)?;
        Ok(stacks)
    }
}

/// Opens the stacks of the secondary cores.
fn start_secondaries(
    primary: (Engine, PortClaims),
    secondaries: Vec<NetConfig>,
    secondary_devices: Option<mpsc::Receiver<SecondaryDevices>>,
) -> Result<ShardedStacks, OpenError> {
    let Some(secondary_devices) = secondary_devices else {
        return Ok(ShardedStacks { stacks: vec![primary], flow_steering: None });
    };
    let (mut engine, primary_claims) = primary;
    let secrets = engine.parts().0.tcp_secrets();
    let opened =
        secondary_devices.recv().map_err(|_| io::Error::other("the device was not opened"));
    let (flow_steering, devices) = opened.map_err(OpenError::Io)?;
    let claims = |core| primary_claims.for_core(Arc::clone(&flow_steering), core);
    let mut all = vec![(engine, claims(0))];
    for (mut config, mut device) in secondaries.into_iter().zip(devices) {
        config.device = DeviceConfig::Custom(Box::new(move |arena| {
            device.open_queue(arena)?;
            Ok(Box::new(device))
        }));
        let (mut engine, _) = open_secondary(config)?;
        // Values derived from these secrets that one stack sent to a peer bind all stacks.
        engine.parts().0.set_tcp_secrets(secrets);
        all.push((engine, claims(all.len())));
    }
    let mut engines = all.iter_mut().map(|(engine, _)| engine);
    if let Some(primary) = engines.next() {
        primary.lead_admission(engines);
    }
    for (core, (engine, _)) in all.iter_mut().enumerate() {
        let port_groups = CorePortGroups { flow_steering: Arc::clone(&flow_steering), core };
        let (stack, _, _) = engine.parts();
        stack.set_port_groups(Arc::new(port_groups.clone()));
        stack.set_reserved_ports(move |transport, port| {
            port_groups
                .flow_steering
                .is_claimed_elsewhere(port_groups.core, (protocol(transport), port))
        });
    }
    Ok(ShardedStacks { stacks: all, flow_steering: Some(flow_steering) })
}

/// Port groups of one core, backed by the flow steering.
#[derive(Clone)]
struct CorePortGroups {
    flow_steering: Arc<FlowSteering>,
    core: usize,
}

impl PortGroups for CorePortGroups {
    fn join(&self, transport: Transport, local: SocketAddr, owner: u64) {
        self.flow_steering.join(self.core, local_port(transport, local), local.ip(), owner);
    }

    fn leave(&self, transport: Transport, local: SocketAddr, owner: u64) {
        self.flow_steering.leave(self.core, local_port(transport, local), local.ip(), owner);
    }

    fn begin_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool {
        self.flow_steering.begin_flow(self.core, Flow::new(protocol(transport), local, remote))
    }

    fn take_over_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
        self.flow_steering.take_over_flow(self.core, Flow::new(protocol(transport), local, remote));
    }

    fn end_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
        self.flow_steering.end_flow(self.core, Flow::new(protocol(transport), local, remote));
    }
}

fn protocol(transport: Transport) -> TransportProtocol {
    match transport {
        Transport::Udp => TransportProtocol::Udp,
        Transport::Tcp => TransportProtocol::Tcp,
    }
}

fn local_port(transport: Transport, local: SocketAddr) -> LocalPort {
    (protocol(transport), local.port())
}

/// Configuration of a secondary core: same addresses, without the device.
fn secondary_config(config: &NetConfig) -> NetConfig {
    let mut idle = config.engine.idle;
    if config.device.is_fed_by_kernel() && idle == IdleConfig::default() {
        // As on the primary core.
        idle.spin_ns = 0;
    }
    let not_open = || io::Error::other("this device was not created");
    NetConfig {
        device: DeviceConfig::Custom(Box::new(move |_| Err(not_open()))),
        node: config.node,
        wrappers: Vec::new(),
        open_hook: None,
        addresses: config.addresses.clone(),
        routes: config.routes.clone(),
        ownership: config.ownership,
        probe: config.probe,
        neighbour_resolver: config.neighbour_resolver.clone(),
        kernel_interface: config.device.shareable_interface().map(str::to_owned),
        mac: config.mac,
        vlan: config.vlan,
        limits: config.limits.clone(),
        arena: config.arena,
        engine: EngineConfig { gate: config.engine.gate.clone(), idle },
        own_thread: config.own_thread,
        lock_statistics: config.lock_statistics,
        kernel_ports_bound: config.kernel_ports_bound,
        // The primary core refuses frames for all cores.
        admission: None,
        transmit: config.transmit.clone(),
        // Each core chooses its own ports.
        seed: None,
        // Migrated sockets keep their times.
        clock: config.clock,
    }
}

#[cfg(test)]
mod tests;
