//! Echo, sink and source server on smoltcp, which never sleeps: a peer of `tidegate-lab peers`.
//!
//! `--iface NAME --address ADDRESS/BITS --port NUMBER --role echo|sink|source --connections COUNT`

mod device;
mod sys;

use std::error::Error;
use std::io::Write;
use std::str::FromStr;

use smoltcp::iface::{Config, Interface, PollIngressSingleResult, SocketHandle, SocketSet};
use smoltcp::socket::{tcp, udp};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpCidr};

use device::PacketDevice;
use sys::PacketSocket;

/// Bytes of a buffer of an echoing connection.
const ECHO_BYTES: usize = 64 << 10;
/// Bytes of a buffer of a stream.
const STREAM_BYTES: usize = 1 << 20;
/// Bytes and datagrams of a buffer of the UDP socket.
const DATAGRAM_BYTES: usize = 256 << 10;
const DATAGRAMS: usize = 512;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// TCP and UDP echo.
    Echo,
    /// TCP server that only receives.
    Sink,
    /// TCP server that only sends.
    Source,
}

struct Arguments {
    interface: String,
    address: IpCidr,
    port: u16,
    role: Role,
    connections: usize,
}

impl Arguments {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let given: Vec<String> = std::env::args().skip(1).collect();
        let value = |name: &str| -> Result<&str, String> {
            let pair = given.chunks_exact(2).find(|pair| pair[0] == name);
            pair.map(|pair| pair[1].as_str()).ok_or_else(|| format!("{name} is missing"))
        };
        let role = match value("--role")? {
            "echo" => Role::Echo,
            "sink" => Role::Sink,
            "source" => Role::Source,
            other => return Err(format!("--role is echo, sink or source, not {other}").into()),
        };
        let address = value("--address")?;
        Ok(Self {
            interface: value("--iface")?.to_owned(),
            address: IpCidr::from_str(address).map_err(|()| {
                format!("--address is an address and a prefix length, not {address}")
            })?,
            port: value("--port")?.parse()?,
            role,
            connections: value("--connections")?.parse()?,
        })
    }
}

/// The server's sockets. smoltcp has no queue of connections: a listening socket becomes the
/// connection, so that there are as many as there will be connections.
struct Server {
    role: Role,
    port: u16,
    connections: Vec<SocketHandle>,
    datagrams: Option<SocketHandle>,
    /// Bytes on their way from one buffer to another, or those that a source sends.
    scratch: Vec<u8>,
}

impl Server {
    fn new(arguments: &Arguments, sockets: &mut SocketSet<'_>) -> Result<Self, Box<dyn Error>> {
        let Arguments { port, role, connections, .. } = *arguments;
        let bytes = if role == Role::Echo { ECHO_BYTES } else { STREAM_BYTES };
        let buffer = || tcp::SocketBuffer::new(vec![0; bytes]);
        let mut handles = Vec::new();
        for _ in 0..connections {
            let mut socket = tcp::Socket::new(buffer(), buffer());
            socket.set_nagle_enabled(false);
            socket.listen(port)?;
            handles.push(sockets.add(socket));
        }
        let mut datagrams = None;
        if role == Role::Echo {
            let buffer = || {
                let metadata = vec![udp::PacketMetadata::EMPTY; DATAGRAMS];
                udp::PacketBuffer::new(metadata, vec![0; DATAGRAM_BYTES])
            };
            let mut socket = udp::Socket::new(buffer(), buffer());
            socket.bind(port)?;
            datagrams = Some(sockets.add(socket));
        }
        let scratch = vec![0; STREAM_BYTES];
        Ok(Self { role, port, connections: handles, datagrams, scratch })
    }

    fn serve(&mut self, sockets: &mut SocketSet<'_>) -> Result<(), Box<dyn Error>> {
        for &handle in &self.connections {
            let socket = sockets.get_mut::<tcp::Socket>(handle);
            match self.role {
                Role::Echo => echo(socket, &mut self.scratch)?,
                Role::Sink => {
                    while socket.can_recv() {
                        socket.recv(|bytes| (bytes.len(), ()))?;
                    }
                }
                Role::Source => {
                    while socket.can_send() {
                        socket.send_slice(&self.scratch)?;
                    }
                }
            }
            match socket.state() {
                tcp::State::CloseWait => socket.close(),
                tcp::State::Closed => socket.listen(self.port)?,
                _ => {}
            }
        }
        if let Some(handle) = self.datagrams {
            let socket = sockets.get_mut::<udp::Socket>(handle);
            while socket.can_recv() && socket.can_send() {
                let (len, from) = socket.recv_slice(&mut self.scratch)?;
                // A datagram that finds no room is lost.
                let _ = socket.send_slice(&self.scratch[..len], from);
            }
        }
        Ok(())
    }
}

fn echo(socket: &mut tcp::Socket<'_>, scratch: &mut [u8]) -> Result<(), Box<dyn Error>> {
    while socket.can_recv() && socket.can_send() {
        let free = socket.send_capacity() - socket.send_queue();
        let len = socket.recv_slice(&mut scratch[..free])?;
        socket.send_slice(&scratch[..len])?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse()?;
    let socket = PacketSocket::open(&arguments.interface)?;
    let mac = EthernetAddress(socket.mac);
    let mut device = PacketDevice(socket);
    let mut interface = Interface::new(Config::new(mac.into()), &mut device, Instant::now());
    let mut is_added = false;
    interface.update_ip_addrs(|addresses| is_added = addresses.push(arguments.address).is_ok());
    if !is_added {
        return Err("the interface takes no address".into());
    }
    let mut sockets = SocketSet::new(Vec::new());
    let mut server = Server::new(&arguments, &mut sockets)?;
    println!("ready");
    std::io::stdout().flush()?;
    loop {
        device.0.receive()?;
        let now = Instant::now();
        while interface.poll_ingress_single(now, &mut device, &mut sockets)
            != PollIngressSingleResult::None
        {}
        server.serve(&mut sockets)?;
        interface.poll_egress(now, &mut device, &mut sockets);
        device.0.transmitter().flush();
    }
}
