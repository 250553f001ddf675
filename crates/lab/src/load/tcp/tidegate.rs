//! Connections on a Tidegate stack of the generator's own.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tidegate::port::dpdk::DpdkConfig;
use tidegate::port::packet::PacketConfig;
use tidegate::port::xdp::{BusyPoll, XdpConfig};
use tidegate::{
    Batch, FrameSize, Interest, IpCidr, Net, NetConfig, Poll, PortConfig, TcpOptions, TcpStream,
    Token,
};

use super::{Calls, Streams, TcpLoadConfig, source};
use crate::error::LabError;
use crate::load::LinkKind;

/// Connections that are served while the stack is held. What they send leaves then: few,
/// so that the server works on the first requests while the last ones are made.
const BATCH: usize = 8;

const FRAMES: u32 = 16_384;

/// Connections on Tidegate.
pub(super) struct OwnStreams<'c> {
    net: Net,
    poll: Poll,
    ready: Vec<Token>,
    config: &'c TcpLoadConfig,
    streams: Vec<Option<TcpStream>>,
}

impl<'c> OwnStreams<'c> {
    pub(super) fn open(config: &'c TcpLoadConfig) -> Result<Self, LabError> {
        let missing = |what: &str| LabError::Config(what.to_owned());
        let interface = config.interface.clone();
        let interface = interface.ok_or_else(|| missing("give the interface to send through"))?;
        if config.source.is_none() {
            return Err(missing("give the source address, one that the kernel does not have"));
        }
        let port: PortConfig = match config.link {
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
        let mut net = NetConfig::new(port).frames(FRAMES, FrameSize::K2);
        for slot in 0..config.sources as usize {
            let address = source(config, slot).and_then(|ip| IpCidr::new(ip, config.prefix).ok());
            net = net.address(address.ok_or_else(|| missing("the source address makes no sense"))?);
        }
        let net = Net::open(net).map_err(LabError::io_other("load"))?;
        let poll = Poll::new(&net);
        let streams = (0..config.connections).map(|_| None).collect();
        Ok(Self { net, poll, ready: Vec::new(), config, streams })
    }

    pub(super) fn name(&self) -> String {
        let capabilities = self.net.capabilities();
        format!("{} ({})", capabilities.kind, capabilities.detail)
    }
}

impl Streams for OwnStreams<'_> {
    fn turn(
        &mut self,
        timeout_ns: u64,
        each: &mut dyn FnMut(&mut dyn Calls, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { net, poll, ready, config, streams } = self;
        poll.wait(ready, Some(Duration::from_nanos(timeout_ns)))?;
        for burst in ready.chunks(BATCH) {
            net.batch(|batch| {
                let mut calls = OwnCalls { batch, poll, config, streams };
                burst.iter().try_for_each(|token| each(&mut calls, token.0))
            })??;
        }
        Ok(())
    }

    fn calls(&mut self, work: &mut dyn FnMut(&mut dyn Calls) -> io::Result<()>) -> io::Result<()> {
        let Self { net, poll, config, streams, .. } = self;
        net.batch(|batch| work(&mut OwnCalls { batch, poll, config, streams }))?
    }
}

struct OwnCalls<'t, 'b> {
    batch: &'t mut Batch<'b>,
    poll: &'t Poll,
    config: &'t TcpLoadConfig,
    streams: &'t mut Vec<Option<TcpStream>>,
}

fn open(stream: &Option<TcpStream>) -> io::Result<&TcpStream> {
    stream.as_ref().ok_or(ErrorKind::NotConnected.into())
}

impl Calls for OwnCalls<'_, '_> {
    fn connect(&mut self, slot: usize) -> io::Result<()> {
        let options = TcpOptions { no_delay: true, ..TcpOptions::default() };
        let local = source(self.config, slot).map(|source| SocketAddr::new(source, 0));
        let stream = self.batch.connect(local, self.config.target, options)?;
        self.batch.register(self.poll, &stream, Token(slot), Interest::Both)?;
        self.streams[slot] = Some(stream);
        Ok(())
    }

    fn finish_connect(&mut self, slot: usize) -> io::Result<()> {
        self.batch.finish_connect(open(&self.streams[slot])?)
    }

    fn send(&mut self, slot: usize, data: &[u8]) -> io::Result<usize> {
        self.batch.send(open(&self.streams[slot])?, data)
    }

    fn recv(&mut self, slot: usize, buf: &mut [u8]) -> io::Result<usize> {
        self.batch.recv(open(&self.streams[slot])?, buf)
    }

    fn want_room(&mut self, slot: usize, wanted: bool) -> io::Result<()> {
        let interest = if wanted { Interest::Both } else { Interest::Readable };
        let Ok(stream) = open(&self.streams[slot]) else { return Ok(()) };
        self.batch.reregister(self.poll, stream, Token(slot), interest)
    }

    fn close(&mut self, slot: usize, abrupt: bool) {
        if let Some(stream) = self.streams[slot].take() {
            stream.set_abrupt(abrupt);
        }
    }
}
