//! The whole receive path over one device: the same sender, the same veth, and a socket's receive
//! call for each packet, on kernel sockets and on Tidegate.
//!
//! One thread sends and receives. The time of a round in which the far end drops the packets at its
//! first check is the sender's part; the rest is the receiver's.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use tidegate::device::xdp::{BusyPoll, XdpConfig};
use tidegate::{Net, NetConfig};

use super::{BURST_PACKETS, ReceiveTraceConfig};
use crate::LabError;
use crate::stats::median;
use crate::testbed::cpu;
use crate::testbed::netns::{VethConfig, VethPair};

const UDP_PORT: u16 = 7777;
/// Rounds that resolve the neighbours and fill caches.
const WARM_UP_ROUNDS: usize = 100;
/// Limit of a receive call, which includes the resolution of the neighbour before the first.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// A hardware address of no device.
const UNUSED_MAC: &str = "02:f1:00:d0:00:09";

/// Addresses of one family on the link.
struct Addresses {
    sender: &'static str,
    kernel: &'static str,
    tidegate: &'static str,
    /// Has a neighbour entry with the hardware address of no device.
    nobody: &'static str,
    prefix_bits: u8,
}

const V4: Addresses = Addresses {
    sender: "10.77.0.1",
    kernel: "10.77.0.2",
    tidegate: "10.77.0.3",
    nobody: "10.77.0.9",
    prefix_bits: 24,
};
const V6: Addresses = Addresses {
    sender: "fd77::1",
    kernel: "fd77::2",
    tidegate: "fd77::3",
    nobody: "fd77::9",
    prefix_bits: 64,
};

/// Times of one packet, in nanoseconds: medians of the rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PathTimes {
    /// Sent, and dropped by the far end at its first check.
    pub(super) sent_ns: f64,
    /// Sent and received on a kernel socket.
    pub(super) kernel_ns: f64,
    /// Sent and received on a socket of Tidegate on AF_XDP.
    pub(super) tidegate_ns: f64,
}

impl PathTimes {
    /// The receiver's part on kernel sockets, at least 1 ns.
    pub(super) fn kernel_receive_ns(&self) -> f64 {
        (self.kernel_ns - self.sent_ns).max(1.0)
    }

    /// The receiver's part on Tidegate, at least 1 ns.
    pub(super) fn tidegate_receive_ns(&self) -> f64 {
        (self.tidegate_ns - self.sent_ns).max(1.0)
    }
}

/// Measures the three kinds of rounds on the last core.
pub(super) fn measure(config: &ReceiveTraceConfig, ipv6: bool) -> Result<PathTimes, LabError> {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            cpu::pin_this_thread(cpu::available_cores() - 1)?;
            measure_all(config, if ipv6 { &V6 } else { &V4 })
        });
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure_all(config: &ReceiveTraceConfig, addresses: &Addresses) -> Result<PathTimes, LabError> {
    let cidr = |address: &str| format!("{address}/{}", addresses.prefix_bits);
    let pair = VethPair::as_on_a_wire(&VethConfig {
        a: vec![cidr(addresses.sender)],
        b: vec![cidr(addresses.kernel)],
    })?;
    let neighbour = ["neigh", "add", addresses.nobody, "lladdr", UNUSED_MAC, "dev", &pair.a.device];
    pair.a.namespace.ip(&neighbour)?;
    let send_to = |address| Sender::new(&pair, address, config.payload_bytes);
    let sent_ns = send_to(addresses.nobody)?.median_ns(config, |_| Ok(()))?;

    let target = parse(addresses.kernel)?;
    let failed = || LabError::io("cannot open a UDP socket");
    let socket = pair.b.namespace.enter(|| UdpSocket::bind(target))?.map_err(failed())?;
    socket.set_read_timeout(Some(READ_TIMEOUT)).map_err(failed())?;
    let kernel_ns =
        send_to(addresses.kernel)?.median_ns(config, |buffer| socket.recv(buffer).map(drop))?;
    drop(socket);

    let xdp = XdpConfig::new(&pair.b.device).busy_poll(BusyPoll::default());
    let address = cidr(addresses.tidegate).parse().map_err(LabError::io_other("no address"))?;
    let net = NetConfig::new(xdp).address(address);
    let net = pair.b.namespace.enter(|| Net::open(net))?;
    let net = net.map_err(LabError::io_other("cannot open AF_XDP"))?;
    let socket = tidegate::UdpSocket::bind(&net, parse(addresses.tidegate)?).map_err(failed())?;
    socket.set_read_timeout(Some(READ_TIMEOUT)).map_err(failed())?;
    let tidegate_ns = send_to(addresses.tidegate)?
        .median_ns(config, |buffer| socket.recv_from(buffer).map(drop))?;
    Ok(PathTimes { sent_ns, kernel_ns, tidegate_ns })
}

fn parse(address: &str) -> Result<SocketAddr, LabError> {
    let address: IpAddr = address.parse().map_err(LabError::io_other("no address"))?;
    Ok(SocketAddr::new(address, UDP_PORT))
}

/// Kernel socket at the near end.
struct Sender {
    socket: UdpSocket,
    payload: Vec<u8>,
}

impl Sender {
    fn new(pair: &VethPair, target: &str, payload_bytes: usize) -> Result<Self, LabError> {
        let target = parse(target)?;
        let any: IpAddr = if target.is_ipv6() { [0u16; 8].into() } else { [0u8; 4].into() };
        let open = || UdpSocket::bind((any, 0)).and_then(|s| s.connect(target).map(|()| s));
        let socket = pair.a.namespace.enter(open)?;
        let socket = socket.map_err(LabError::io("cannot open the sender's socket"))?;
        Ok(Self { socket, payload: vec![7; payload_bytes] })
    }

    /// Sends bursts and calls `receive` for each packet; returns the median time of a packet.
    fn median_ns(
        &self,
        config: &ReceiveTraceConfig,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<f64, LabError> {
        let mut buffer = vec![0; config.payload_bytes];
        let mut times_ns = Vec::new();
        let rounds = config.packets.div_ceil(BURST_PACKETS);
        for round in 0..WARM_UP_ROUNDS + rounds {
            let start = Instant::now();
            for _ in 0..BURST_PACKETS {
                self.socket.send(&self.payload).map_err(LabError::io("cannot send"))?;
            }
            for _ in 0..BURST_PACKETS {
                receive(&mut buffer).map_err(LabError::io("a packet over the veth was lost"))?;
            }
            if round >= WARM_UP_ROUNDS {
                times_ns.push(start.elapsed().as_nanos() as f64 / BURST_PACKETS as f64);
            }
        }
        Ok(median(times_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_round_is_the_receivers_part() {
        let times = PathTimes { sent_ns: 900.0, kernel_ns: 1_500.0, tidegate_ns: 1_200.0 };
        assert_eq!((times.kernel_receive_ns(), times.tidegate_receive_ns()), (600.0, 300.0));
        let noisy = PathTimes { sent_ns: 900.0, kernel_ns: 800.0, ..PathTimes::default() };
        assert_eq!(noisy.kernel_receive_ns(), 1.0);
    }
}
