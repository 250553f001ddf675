//! Programs of captured flows, from the reports of the daemon.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tidegate::capture::{CaptureDirection, CaptureRecord};
use tidegate_service::SocketState;
use tidegate_wire::Medium;

use crate::control;

/// Shortest time between two reports: the network cores make them.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Flow as the daemon knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flow {
    is_udp: bool,
    local: SocketAddr,
    peer: Option<SocketAddr>,
}

/// Programs by flow.
pub(super) struct Programs {
    socket: PathBuf,
    medium: Medium,
    by_flow: HashMap<Flow, String>,
    asked: Option<Instant>,
}

impl Programs {
    /// Programs of the daemon with this control socket.
    pub(super) fn new(socket: PathBuf, medium: Medium) -> Self {
        Self { socket, medium, by_flow: HashMap::new(), asked: None }
    }

    /// Program of the socket that a frame is from or for, with its process id.
    pub(super) fn find(&mut self, record: &CaptureRecord<'_>) -> Option<&str> {
        let (is_udp, source, destination) = addresses(self.medium, record.data)?;
        let (local, peer) = match record.direction {
            CaptureDirection::Transmitted => (source, destination),
            _ => (destination, source),
        };
        let flow = Flow { is_udp, local, peer: Some(peer) };
        if self.known(flow).is_none()
            && self.asked.is_none_or(|asked| asked.elapsed() >= REPORT_INTERVAL)
        {
            self.ask();
        }
        self.known(flow)
    }

    fn known(&self, flow: Flow) -> Option<&str> {
        let any: IpAddr = match flow.local {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let unconnected = Flow { peer: None, ..flow };
        let at_any = Flow { local: SocketAddr::new(any, flow.local.port()), ..unconnected };
        let mut names = [flow, unconnected, at_any].into_iter();
        names.find_map(|flow| self.by_flow.get(&flow)).map(String::as_str)
    }

    fn ask(&mut self) {
        self.asked = Some(Instant::now());
        // Without a report the frames have no program.
        let Ok(report) = control::report(&self.socket) else { return };
        for app in &report.applications {
            let program = format!("{} (pid {})", app.identity.name, app.identity.pid);
            for socket in &app.sockets {
                let Some(local) = socket.local else { continue };
                let is_udp = socket.phase == SocketState::Datagram;
                let flow = Flow { is_udp, local, peer: socket.peer };
                self.by_flow.insert(flow, program.clone());
            }
        }
    }
}

/// Protocol, source and destination of a TCP or UDP packet, of which the first bytes are there.
fn addresses(medium: Medium, frame: &[u8]) -> Option<(bool, SocketAddr, SocketAddr)> {
    let packet = match medium {
        Medium::Ip => frame,
        Medium::Ethernet if frame.get(12..14)? == [0x81, 0] => frame.get(18..)?,
        Medium::Ethernet => frame.get(14..)?,
    };
    let (protocol, source, destination, ports): (u8, IpAddr, IpAddr, _) = match packet.first()? >> 4
    {
        4 => {
            let address = |at: usize| packet.get(at..at + 4)?.first_chunk::<4>().copied();
            let header = usize::from(packet.first()? & 0xf) * 4;
            let (source, destination) = (address(12)?, address(16)?);
            (*packet.get(9)?, source.into(), destination.into(), packet.get(header..)?)
        }
        6 => {
            let address = |at: usize| packet.get(at..at + 16)?.first_chunk::<16>().copied();
            (*packet.get(6)?, address(8)?.into(), address(24)?.into(), packet.get(40..)?)
        }
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes(*ports.get(at..)?.first_chunk::<2>()?));
    let is_udp = match protocol {
        17 => true,
        6 => false,
        _ => return None,
    };
    Some((is_udp, SocketAddr::new(source, port(0)?), SocketAddr::new(destination, port(2)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_both_families_are_found() {
        let mut v4 = [0; 28];
        (v4[0], v4[9], v4[15], v4[19], v4[21], v4[23]) = (0x45, 17, 1, 2, 9, 53);
        let mut v6 = [0; 60];
        (v6[0], v6[6], v6[23], v6[39], v6[41], v6[43]) = (0x60, 6, 1, 2, 9, 80);
        let found = addresses(Medium::Ip, &v4).unwrap();
        assert_eq!(found, (true, "0.0.0.1:9".parse().unwrap(), "0.0.0.2:53".parse().unwrap()));
        let found = addresses(Medium::Ip, &v6).unwrap();
        assert_eq!(found, (false, "[::1]:9".parse().unwrap(), "[::2]:80".parse().unwrap()));
        for len in 0..v6.len() {
            addresses(Medium::Ethernet, &v6[..len]);
        }

        let mut programs = Programs::new(PathBuf::new(), Medium::Ip);
        let listener = Flow { is_udp: true, local: "0.0.0.0:53".parse().unwrap(), peer: None };
        programs.by_flow.insert(listener, "named (pid 7)".to_owned());
        let peer = Some("192.0.2.1:9".parse().unwrap());
        let flow = Flow { is_udp: true, local: "192.0.2.2:53".parse().unwrap(), peer };
        assert_eq!(programs.known(flow), Some("named (pid 7)"));
        assert_eq!(programs.known(Flow { is_udp: false, ..flow }), None);
    }
}
