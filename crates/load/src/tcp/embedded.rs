//! TCP connections on an embedded Tidegate stack of the generator.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tidegate::device::dpdk::DpdkConfig;
use tidegate::device::packet::PacketConfig;
use tidegate::device::xdp::{BusyPoll, XdpConfig};
use tidegate::{
    Batch, DeviceConfig, FrameSize, Interest, IpCidr, Net, NetConfig, Poll, TcpOptions, TcpStream,
    Token,
};

use super::{ConnectionOps, ConnectionSet, TcpLoadConfig, source_address};
use crate::LinkKind;
use crate::error::LoadError;

/// Connections served while the stack is locked. Their segments leave at the end of the batch.
/// Small batches let the server process the first requests while the generator builds the rest.
const BATCH_CONNECTIONS: usize = 8;

/// Frames in the arena.
const ARENA_FRAMES: u32 = 16_384;

/// Connections on an embedded Tidegate stack.
pub(super) struct EmbeddedConnections<'c> {
    net: Net,
    poll: Poll,
    ready: Vec<Token>,
    config: &'c TcpLoadConfig,
    streams: Vec<Option<TcpStream>>,
}

impl<'c> EmbeddedConnections<'c> {
    pub(super) fn open(config: &'c TcpLoadConfig) -> Result<Self, LoadError> {
        let missing = |what: &str| LoadError::Config(what.to_owned());
        let interface = config.interface.clone();
        let interface =
            interface.ok_or_else(|| missing("give --iface, the interface to send on"))?;
        if config.source.is_none() {
            return Err(missing("give --source, an address that the kernel does not have"));
        }
        let device: DeviceConfig = match config.link {
            LinkKind::Packet => PacketConfig::new(interface).into(),
            LinkKind::Dpdk => {
                let Ok(config) = interface.parse::<DpdkConfig>();
                config.into()
            }
            LinkKind::Xdp | LinkKind::Kernel => {
                let mut xdp = XdpConfig::new(interface);
                xdp.busy_poll = Some(BusyPoll::default());
                xdp.into()
            }
        };
        let mut net = NetConfig::new(device).frames(ARENA_FRAMES, FrameSize::K2);
        for slot in 0..config.source_count as usize {
            let address =
                source_address(config, slot).and_then(|ip| IpCidr::new(ip, config.prefix_len).ok());
            net =
                net.address(address.ok_or_else(|| {
                    missing("the prefix length is not valid for the source address")
                })?);
        }
        let net = Net::open(net)
            .map_err(LoadError::io_other("cannot open the load generator's stack"))?;
        let poll = Poll::new(&net);
        let streams = (0..config.connections).map(|_| None).collect();
        Ok(Self { net, poll, ready: Vec::new(), config, streams })
    }

    pub(super) fn describe(&self) -> String {
        let capabilities = self.net.capabilities();
        format!("{} ({})", capabilities.kind, capabilities.detail)
    }
}

impl ConnectionSet for EmbeddedConnections<'_> {
    fn wait_ready(
        &mut self,
        timeout_ns: u64,
        on_ready: &mut dyn FnMut(&mut dyn ConnectionOps, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { net, poll, ready, config, streams } = self;
        poll.wait(ready, Some(Duration::from_nanos(timeout_ns)))?;
        for ready_batch in ready.chunks(BATCH_CONNECTIONS) {
            net.batch(|batch| {
                let mut ops = EmbeddedOps { batch, poll, config, streams };
                ready_batch.iter().try_for_each(|token| on_ready(&mut ops, token.0))
            })??;
        }
        Ok(())
    }

    fn with_ops(
        &mut self,
        action: &mut dyn FnMut(&mut dyn ConnectionOps) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { net, poll, config, streams, .. } = self;
        net.batch(|batch| action(&mut EmbeddedOps { batch, poll, config, streams }))?
    }
}

struct EmbeddedOps<'t, 'b> {
    batch: &'t mut Batch<'b>,
    poll: &'t Poll,
    config: &'t TcpLoadConfig,
    streams: &'t mut Vec<Option<TcpStream>>,
}

fn connected_stream(stream: &Option<TcpStream>) -> io::Result<&TcpStream> {
    stream.as_ref().ok_or(ErrorKind::NotConnected.into())
}

impl ConnectionOps for EmbeddedOps<'_, '_> {
    fn connect(&mut self, slot: usize) -> io::Result<()> {
        let options = TcpOptions::default().no_delay(true);
        let local = source_address(self.config, slot).map(|source| SocketAddr::new(source, 0));
        let stream = self.batch.connect(local, self.config.target, options)?;
        self.batch.register(self.poll, &stream, Token(slot), Interest::Both)?;
        self.streams[slot] = Some(stream);
        Ok(())
    }

    fn finish_connect(&mut self, slot: usize) -> io::Result<()> {
        self.batch.finish_connect(connected_stream(&self.streams[slot])?)
    }

    fn send(&mut self, slot: usize, data: &[u8]) -> io::Result<usize> {
        self.batch.send(connected_stream(&self.streams[slot])?, data)
    }

    fn recv(&mut self, slot: usize, buf: &mut [u8]) -> io::Result<usize> {
        self.batch.recv(connected_stream(&self.streams[slot])?, buf)
    }

    fn set_write_interest(&mut self, slot: usize, wanted: bool) -> io::Result<()> {
        let interest = if wanted { Interest::Both } else { Interest::Readable };
        let Ok(stream) = connected_stream(&self.streams[slot]) else { return Ok(()) };
        self.batch.reregister(self.poll, stream, Token(slot), interest)
    }

    fn close(&mut self, slot: usize, reset: bool) {
        if let Some(stream) = self.streams[slot].take() {
            stream.set_reset_on_close(reset);
        }
    }
}
