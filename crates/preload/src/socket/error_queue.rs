//! Queue of errors about sent datagrams (`IP_RECVERR`, `MSG_ERRQUEUE`).

use std::io;
use std::net::SocketAddr;

use libc::c_int;
use tidegate::UdpErrorReport;

use super::{Socket, Udp};
use crate::raw::{self, ControlMessage};

/// Error of the queue, as the application receives it.
pub(crate) struct QueuedError {
    /// Beginning of the datagram.
    pub(crate) payload: Box<[u8]>,
    /// Destination of the datagram.
    pub(crate) destination: SocketAddr,
    /// Error and reporter.
    pub(crate) message: ControlMessage,
}

impl Udp {
    /// Takes the oldest error of the queue, and clears the pending error as the kernel does.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the queue is empty.
    pub(crate) fn take_queued_error(&self, socket: &Socket) -> io::Result<QueuedError> {
        let report = self.socket.take_error_report()?.ok_or(io::ErrorKind::WouldBlock)?;
        let _ = self.socket.take_error()?;
        let destination = socket.to_app_family(report.remote);
        let reporter = socket.to_app_family(SocketAddr::new(report.reporter, 0));
        let (level, kind) = match socket.is_v6 {
            true => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
            false => (libc::IPPROTO_IP, libc::IP_RECVERR),
        };
        let message = ControlMessage { level, kind, data: extended_error(&report, reporter) };
        Ok(QueuedError { payload: report.payload, destination, message })
    }
}

/// The kernel's `sock_extended_err`, followed by the address of the reporter.
fn extended_error(report: &UdpErrorReport, reporter: SocketAddr) -> Vec<u8> {
    let is_v4 = report.remote.ip().to_canonical().is_ipv4();
    let origin = if is_v4 { libc::SO_EE_ORIGIN_ICMP } else { libc::SO_EE_ORIGIN_ICMP6 };
    let mut data = code(report, is_v4).to_ne_bytes().to_vec();
    data.extend([origin, report.icmp_type, report.icmp_code, 0]);
    data.extend(report.mtu.to_ne_bytes());
    data.extend([0; 4]);
    data.extend(raw::sockaddr_bytes(reporter));
    data
}

/// The kernel's error code for an ICMP message.
fn code(report: &UdpErrorReport, is_v4: bool) -> c_int {
    let (icmp_type, icmp_code) = (report.icmp_type, report.icmp_code);
    match (is_v4, icmp_type) {
        (true, 3) => match icmp_code {
            0 | 6 | 9 | 11 => libc::ENETUNREACH,
            2 => libc::ENOPROTOOPT,
            3 => libc::ECONNREFUSED,
            4 => libc::EMSGSIZE,
            5 => libc::EOPNOTSUPP,
            7 => libc::EHOSTDOWN,
            8 => libc::ENONET,
            _ => libc::EHOSTUNREACH,
        },
        (true, 12) => libc::EPROTO,
        (true, _) | (false, 3) => libc::EHOSTUNREACH,
        (false, 1) => match icmp_code {
            0 => libc::ENETUNREACH,
            1 | 5 | 6 => libc::EACCES,
            4 => libc::ECONNREFUSED,
            2 | 3 => libc::EHOSTUNREACH,
            _ => libc::EPROTO,
        },
        (false, 2) => libc::EMSGSIZE,
        (false, _) => libc::EPROTO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_layout_of_the_kernel() {
        for (remote, reporter, (icmp_type, icmp_code), expected_code, bytes) in [
            ("192.0.2.1:9", "192.0.2.7", (3, 3), libc::ECONNREFUSED, 32),
            ("192.0.2.1:9", "192.0.2.7", (11, 0), libc::EHOSTUNREACH, 32),
            ("[2001:db8::1]:9", "2001:db8::7", (1, 4), libc::ECONNREFUSED, 44),
            ("[2001:db8::1]:9", "2001:db8::7", (2, 0), libc::EMSGSIZE, 44),
        ] {
            let report = UdpErrorReport {
                remote: remote.parse().unwrap(),
                reporter: reporter.parse().unwrap(),
                icmp_type,
                icmp_code,
                mtu: 1280,
                payload: Box::default(),
            };
            let data = extended_error(&report, SocketAddr::new(report.reporter, 0));
            assert_eq!(data.len(), bytes, "{remote}");
            assert_eq!(data[..4], expected_code.to_ne_bytes(), "{remote}");
            let origin = if report.remote.is_ipv4() { 2 } else { 3 };
            assert_eq!(data[4..8], [origin, icmp_type, icmp_code, 0], "{remote}");
            assert_eq!(data[8..12], 1280u32.to_ne_bytes(), "{remote}");
        }
    }
}
