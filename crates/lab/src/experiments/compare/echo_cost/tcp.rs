//! Echoes of 64 bytes on TCP connections: two stacks exchange their frames in bursts.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, Fifo, Frame, FrameSize};
use tidegate_stack::{Config, Event, Stack, TcpId, TcpOptions};
use tidegate_wire::MacAddr;

use super::PAYLOAD_BYTES;
use crate::error::LabError;

/// Connections, each with one request on its way.
pub(super) const CONNECTIONS: usize = 32;
const SERVER_PORT: u16 = 7;
/// Time between two bursts: longer than the stacks need, and shorter than every timer.
const BURST_NS: u64 = 10_000;
const REQUEST: [u8; PAYLOAD_BYTES] = [7; PAYLOAD_BYTES];

/// Client and server, with one arena for both.
struct Hosts {
    arena: Arena,
    client: Stack,
    server: Stack,
    now_ns: u64,
    burst: Fifo<Frame>,
}

/// Exchanges at least `messages` messages and returns their number. Each is received from the device,
/// read from a socket, answered, and sent to the device: by the server, which echoes, and by the
/// client, whose answer is the next request.
pub(super) fn echo(messages: u64, ipv6: bool) -> Result<u64, LabError> {
    let mut hosts = Hosts::new(ipv6)?;
    let clients = hosts.connect(ipv6)?;
    let mut exchanged = 0;
    while exchanged < messages {
        hosts.exchange(&clients)?;
        exchanged += 2 * clients.len() as u64;
    }
    Ok(exchanged)
}

fn address(ipv6: bool, host: u8) -> IpAddr {
    match ipv6 {
        false => [10, 0, 0, host].into(),
        true => [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(host)].into(),
    }
}

impl Hosts {
    fn new(ipv6: bool) -> Result<Self, LabError> {
        let arena = ArenaConfig { frames: 1024, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(arena).map_err(LabError::io_other("no memory for frames"))?;
        let mac = |host: u8| MacAddr([2, 0, 0, 0, 0, host]);
        let mut host = |own: u8, peer: u8| {
            let failed = "cannot start a stack";
            let mut config = Config::ethernet(mac(own), [own; 16]);
            let bits = if ipv6 { 64 } else { 24 };
            let prefix = tidegate_wire::IpCidr::new(address(ipv6, own), bits);
            config.addresses = vec![prefix.map_err(LabError::io_other(failed))?];
            let mut stack = Stack::new(config, 0).map_err(LabError::io_other(failed))?;
            stack.set_neighbour(0, address(ipv6, peer), Some(mac(peer)), &mut arena);
            Ok::<_, LabError>(stack)
        };
        let (client, server) = (host(1, 2)?, host(2, 1)?);
        Ok(Self { arena, client, server, now_ns: 0, burst: Fifo::with_capacity(256) })
    }

    fn connect(&mut self, ipv6: bool) -> Result<Vec<TcpId>, LabError> {
        let failed = "the stacks do not connect";
        let options = TcpOptions::default().no_delay(true);
        let server = SocketAddr::new(address(ipv6, 2), SERVER_PORT);
        let listener = self.server.tcp_listen(server, CONNECTIONS, options);
        let listener = listener.map_err(LabError::io_other(failed))?;
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            let Self { client, arena, now_ns, .. } = self;
            let id = client.tcp_connect(*now_ns, arena, None, server, options);
            clients.push(id.map_err(LabError::io_other(failed))?);
            for _ in 0..3 {
                self.exchange_frames();
            }
            self.server.tcp_accept(listener).map_err(LabError::io_other(failed))?;
            while self.client.poll_event().is_some() || self.server.poll_event().is_some() {}
        }
        Ok(clients)
    }

    fn exchange_frames(&mut self) {
        let Self { arena, client, server, now_ns, burst } = self;
        *now_ns += BURST_NS;
        burst.extend(client.transmit_queue().drain(..));
        server.handle_timeout(*now_ns, arena);
        server.handle_burst(*now_ns, burst, arena);
        burst.extend(server.transmit_queue().drain(..));
        client.handle_timeout(*now_ns, arena);
        client.handle_burst(*now_ns, burst, arena);
    }

    /// Sends a request on each connection and reads the echoes.
    fn exchange(&mut self, clients: &[TcpId]) -> Result<(), LabError> {
        // Made only for an error: the measured loop allocates nothing.
        let failed = |error| LabError::io_other("an echo failed")(error);
        for &id in clients {
            self.client.tcp_send_unflushed(id, &REQUEST).map_err(failed)?;
        }
        self.client.tcp_flush(self.now_ns, &mut self.arena);
        self.exchange_frames();
        while let Some(event) = self.server.poll_event() {
            let Event::TcpReadable(id) = event else { continue };
            let request = read(&mut self.server, self.now_ns, id)?;
            self.server.tcp_send_unflushed(id, &request).map_err(failed)?;
        }
        self.server.tcp_flush(self.now_ns, &mut self.arena);
        self.exchange_frames();
        let mut answers = 0;
        while let Some(event) = self.client.poll_event() {
            let Event::TcpReadable(id) = event else { continue };
            answers += usize::from(read(&mut self.client, self.now_ns, id)? == REQUEST);
        }
        if answers != clients.len() {
            return Err(super::missing_echoes(clients.len(), answers));
        }
        Ok(())
    }
}

/// Reads a whole message.
fn read(stack: &mut Stack, now_ns: u64, id: TcpId) -> Result<[u8; PAYLOAD_BYTES], LabError> {
    let mut message = [0; PAYLOAD_BYTES];
    let received = stack.tcp_recv_unflushed(now_ns, id, &mut message);
    let failed = |error| LabError::io_other("a stack gives no bytes")(error);
    match received.map_err(failed)? {
        PAYLOAD_BYTES => Ok(message),
        part => Err(LabError::Config(format!("{part} bytes of a message of {PAYLOAD_BYTES}"))),
    }
}
