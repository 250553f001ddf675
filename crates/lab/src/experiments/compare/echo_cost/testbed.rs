//! Testbed of the experiment: a driver and an echo server at the two ends of an in-memory link.

use std::net::{IpAddr, SocketAddr};

use tidegate::device::mem::{MemConfig, MemDevice, wire};
use tidegate::{InPlaceRequest, IpCidr, Limits, Net, NetConfig, ServiceTimes, UdpSocket};
use tidegate_apps::DurationCounts;
use tidegate_load::template::{Addressing, FrameTemplate, fold, sum};
use tidegate_load::{neighbour, neighbour::NeighbourEvent};

use crate::error::LabError;

/// Maximum number of frames on the link at a time.
pub(super) const BURST_FRAMES: usize = 32;
const ECHO_PORT: u16 = 7777;
/// First port of the other sockets.
const FIRST_OTHER_PORT: u16 = 1_024;
/// Sockets for which one address is enough.
pub(super) const PORTS_PER_ADDRESS: usize = 50_000;
const DRIVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// Last part of the first of many addresses of the driver.
const FIRST_OF_MANY_HOSTS: u8 = 64;

/// Flows of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flows {
    /// One address and port.
    One,
    /// Each port of each address.
    Many { addresses: u32, ports: u16 },
}

/// Unit that fills in the checksums of the replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChecksumMode {
    /// The device. The in-memory link leaves them unfilled.
    Device,
    /// The stack.
    Software,
}

/// The driver's end of the link, and the echo server at the other end.
pub(super) struct EchoTestbed {
    pub(super) driver: MemDevice,
    net: Net,
    server: UdpSocket,
    checksums: ChecksumMode,
    /// Service times, measured as by a server with metrics.
    times: Option<(ServiceTimes, DurationCounts)>,
    pub(super) addressing: Addressing,
    _idle_sockets: Vec<UdpSocket>,
}

impl EchoTestbed {
    pub(super) fn new(ipv6: bool, flows: Flows, checksums: ChecksumMode) -> Result<Self, LabError> {
        Self::with_sockets(ipv6, flows, checksums, 1)
    }

    /// As [`EchoTestbed::new`], with `sockets` sockets: the echo server is one of them, and each port
    /// has one on each address.
    pub(super) fn with_sockets(
        ipv6: bool,
        flows: Flows,
        checksums: ChecksumMode,
        sockets: usize,
    ) -> Result<Self, LabError> {
        let config_error = |error: &dyn std::fmt::Display| LabError::Config(error.to_string());
        let config = MemConfig::default()
            .macs([DRIVER_MAC, SERVER_MAC])
            .capacity(256)
            .transmit_checksum(checksums == ChecksumMode::Device);
        let (driver, device) =
            wire(&config).map_err(LabError::io("cannot create an in-memory link"))?;
        let (driver_host, source_count, port_count) = match flows {
            Flows::One => (1, 1, 1),
            Flows::Many { addresses, ports } => (FIRST_OF_MANY_HOSTS, addresses, ports),
        };
        let (server_address, driver_address, cidr): (IpAddr, IpAddr, _) = if ipv6 {
            (
                [0xfd00, 0, 0, 0, 0, 0, 0, 2].into(),
                [0xfd00, 0, 0, 0, 0, 0, 0, driver_host.into()].into(),
                "fd00::2/64",
            )
        } else {
            ([10, 0, 0, 2].into(), [10, 0, 0, driver_host].into(), "10.0.0.2/24")
        };
        let cidr = cidr.parse().map_err(|error| config_error(&error))?;
        let mut limits = Limits::default();
        limits.sockets = limits.sockets.max(sockets);
        let mut config = NetConfig::new(device).address(cidr).seed([7; 16]).limits(limits);
        let others = other_addresses(cidr, sockets.div_ceil(PORTS_PER_ADDRESS).max(1) - 1);
        for other in &others {
            config = config.address(*other);
        }
        let net = Net::open(config).map_err(|error| config_error(&error))?;
        let target = SocketAddr::new(server_address, ECHO_PORT);
        let server = UdpSocket::bind(&net, target)
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
            .map_err(LabError::io("cannot bind the echo socket"))?;
        let addressing = Addressing {
            source_mac: DRIVER_MAC,
            target_mac: SERVER_MAC,
            source: driver_address,
            source_count,
            first_port: 40_000,
            port_count,
            target,
        };
        let addresses = std::iter::once(server_address).chain(others.iter().map(IpCidr::address));
        let addresses: Vec<IpAddr> = addresses.collect();
        let idle_sockets = bind_others(&net, &addresses, sockets - 1)?;
        let (times, _idle_sockets) = (None, idle_sockets);
        Ok(Self { driver, net, server, checksums, times, addressing, _idle_sockets })
    }

    /// Measures service times from now on.
    pub(super) fn measure_times(&mut self) {
        self.times = Some(Default::default());
    }

    /// Number of packets whose service times were measured.
    pub(super) fn timed_packets(&self) -> u64 {
        let buckets = self.times.iter().flat_map(|(_, durations)| durations.buckets());
        buckets.map(|(_, count)| count).sum()
    }

    /// Sends one packet from each of the driver's addresses, and replies to the server's ARP or NDP
    /// request for the address.
    pub(super) fn resolve_driver(&mut self) -> Result<(), LabError> {
        // The first flows are those of the first port, one for each address.
        (0..self.addressing.source_count).try_for_each(|flow| self.resolve_flow(flow))
    }

    fn resolve_flow(&mut self, flow: u32) -> Result<(), LabError> {
        let template = FrameTemplate::new(&self.addressing);
        let mut frame = vec![0; template.header_bytes()];
        template.write_headers(flow, &mut frame, 0);
        self.driver.stage(0, &frame);
        self.driver.flush(1);
        for _ in 0..100 {
            self.serve_once()?;
            let mut reply = None;
            let mut echoed = false;
            self.driver.receive_bytes(BURST_FRAMES, |bytes| {
                match neighbour::parse(bytes, &self.addressing, self.addressing.target.ip()) {
                    Some(NeighbourEvent::Reply(frame)) => reply = Some(frame),
                    Some(NeighbourEvent::Resolved(_)) => {}
                    None => echoed |= bytes.get(12..14) == frame.get(12..14),
                }
            });
            if let Some(reply) = reply {
                self.driver.stage(0, &reply);
                self.driver.flush(1);
            } else if echoed {
                return Ok(());
            }
        }
        Err(LabError::Config("the echo server did not reply to the first packet".into()))
    }

    /// The expected echo frame of a flow, to the last byte. Where the server's stack leaves the UDP
    /// checksum to the device, the field holds the sum of the pseudo-header: the in-memory device
    /// computes no checksum.
    pub(super) fn expected_echo(&self, flow: u32, payload: &[u8]) -> Vec<u8> {
        let Addressing { source_count, first_port, target, .. } = self.addressing;
        let driver_port = first_port + (flow / source_count) as u16;
        let driver = SocketAddr::new(self.addressing.source_at(flow % source_count), driver_port);
        let template = FrameTemplate::new(&Addressing {
            source_mac: SERVER_MAC,
            target_mac: DRIVER_MAC,
            source: target.ip(),
            source_count: 1,
            first_port: target.port(),
            port_count: 1,
            target: driver,
        });
        let mut frame = vec![0; template.header_bytes()];
        frame.extend(payload);
        template.write_headers(0, &mut frame, sum(payload));
        if self.checksums == ChecksumMode::Device {
            let udp = template.header_bytes() - 8;
            let addresses = if target.is_ipv6() { 22..54 } else { 26..34 };
            let pseudo = sum(&frame[addresses]) + 17 + (payload.len() + 8) as u32;
            frame[udp + 6..udp + 8].copy_from_slice(&fold(pseudo).to_be_bytes());
        }
        frame
    }

    /// Receives the echoed frames and returns the number of correct echoes. Also replies to the
    /// ARP or NDP requests that the server repeats from time to time.
    pub(super) fn receive_echoes(&mut self, expected: &[u8]) -> usize {
        self.receive_each(|_| expected)
    }

    /// As [`EchoTestbed::receive_echoes`], with the expected frame of each echo, by its number among
    /// the correct echoes.
    pub(super) fn receive_each<'e>(&mut self, expected: impl Fn(usize) -> &'e [u8]) -> usize {
        let (mut echoes, mut others) = (0, Vec::new());
        self.driver.receive_bytes(2 * BURST_FRAMES, |bytes| {
            if bytes == expected(echoes) {
                echoes += 1;
            } else {
                store_frame(&mut others, bytes);
            }
        });
        for frame in others {
            let event = neighbour::parse(&frame, &self.addressing, self.addressing.target.ip());
            if let Some(NeighbourEvent::Reply(reply)) = event {
                self.driver.stage(0, &reply);
                self.driver.flush(1);
            }
        }
        echoes
    }

    /// Lets the server echo `burst` packets.
    pub(super) fn serve(&mut self, burst: usize) -> Result<(), LabError> {
        let mut served = 0;
        // Each call takes up to a quota. Too few replies mean that packets were lost, which the
        // caller detects.
        for _ in 0..2 * BURST_FRAMES {
            served += self.serve_once()?;
            if served >= burst {
                break;
            }
        }
        Ok(())
    }

    /// Receives and replies once; returns the number of packets echoed.
    fn serve_once(&mut self) -> Result<usize, LabError> {
        // The error text is built only on an error.
        self.net.run_once().map_err(|error| LabError::io("the device failed")(error))?;
        let answer = |request: InPlaceRequest<'_>| Some(request.len);
        let answered = match &mut self.times {
            None => self.server.exchange_in_place(answer),
            Some((times, durations)) => {
                let answered = self.server.exchange_in_place_timed(times, answer);
                durations.record_last(times);
                answered
            }
        };
        match answered {
            Ok(count) => Ok(count),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(LabError::io("the echo socket failed")(error)),
        }
    }
}

/// Addresses beside `first`, each in a network of its own, so that none is preferred for packets to
/// the driver.
fn other_addresses(first: IpCidr, count: usize) -> Vec<IpCidr> {
    let of_network = |number: usize| match first.address() {
        IpAddr::V4(_) => IpAddr::from([10, 0, number as u8, 2]),
        IpAddr::V6(_) => IpAddr::from([0xfd00, 0, 0, number as u16, 0, 0, 0, 2]),
    };
    let cidr = |number| IpCidr::new(of_network(number), first.prefix_bits()).ok();
    (1..=count).filter_map(cidr).collect()
}

/// Binds `count` sockets, each port on all addresses before the next, but for the echo server's.
fn bind_others(net: &Net, addresses: &[IpAddr], count: usize) -> Result<Vec<UdpSocket>, LabError> {
    let all = (FIRST_OTHER_PORT..=u16::MAX)
        .flat_map(|port| addresses.iter().map(move |&address| SocketAddr::new(address, port)));
    let others = all.filter(|local| *local != SocketAddr::new(addresses[0], ECHO_PORT)).take(count);
    let bind = |local| UdpSocket::bind(net, local);
    others.map(bind).collect::<Result<_, _>>().map_err(LabError::io("cannot bind a socket"))
}

#[cold]
fn store_frame(others: &mut Vec<Vec<u8>>, frame: &[u8]) {
    others.push(frame.to_vec());
}
