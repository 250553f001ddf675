//! Ports of kernel sockets: what a socket of another process is bound to, and the right to a port.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, getpeername, getsockname, ipproto, sockopt,
};
use tidegate_device::steering::TransportProtocol;

use crate::sys;

/// First port that every user may bind, unless the system has another one.
const DEFAULT_UNPRIVILEGED_PORT_START: u16 = 1024;

/// Kernel socket that holds a claimed port.
pub trait HeldSocket: AsFd + Send + Sync {
    /// Stops listening, and keeps the port: no process accepts connections from the socket.
    fn stop_listening(&self);
}

impl HeldSocket for OwnedFd {
    fn stop_listening(&self) {
        // Fails on a socket that does not listen.
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Both);
    }
}

/// Kernel socket for a port to be claimed: the proof of the right to the port.
pub enum KernelPort {
    /// Socket that an application has bound with its own rights.
    Held(Arc<dyn HeldSocket>, BoundPort),
    /// Socket that this process binds for itself.
    Own,
    /// Socket that this process binds for a user without privileges, who must not get what only
    /// this process may bind.
    Unprivileged,
}

/// Network namespace of a socket: the kernel's cookie, from Linux 5.14 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NetworkNamespace(Option<u64>);

impl NetworkNamespace {
    fn of(socket: impl AsFd) -> Self {
        Self(sys::netns_cookie(socket).ok())
    }

    /// Namespace of the sockets that this thread creates.
    pub(crate) fn current() -> Self {
        Self(UnixDatagram::unbound().ok().and_then(|socket| Self::of(socket).0))
    }
}

/// Port that a kernel socket is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundPort {
    protocol: TransportProtocol,
    local: SocketAddr,
    /// IPv6 socket that is bound for IPv4, too.
    is_dual_stack: bool,
    namespace: NetworkNamespace,
}

impl BoundPort {
    /// Port of a descriptor. The calls can wait for other processes with the descriptor.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] unless `descriptor` is a TCP or UDP socket that is bound to
    /// a port, on all devices, and not connected: a connection gives no right to its port.
    pub fn of(descriptor: impl AsFd) -> io::Result<Self> {
        let refused = || io::Error::from(io::ErrorKind::InvalidInput);
        let none = |_| refused();
        let protocol = match sockopt::socket_protocol(&descriptor).map_err(none)? {
            Some(ipproto::TCP) => TransportProtocol::Tcp,
            Some(ipproto::UDP) => TransportProtocol::Udp,
            _ => return Err(refused()),
        };
        let is_v6 = match sockopt::socket_domain(&descriptor).map_err(none)? {
            AddressFamily::INET => false,
            AddressFamily::INET6 => true,
            _ => return Err(refused()),
        };
        let is_dual_stack = is_v6 && !sockopt::ipv6_v6only(&descriptor).map_err(none)?;
        let name = getsockname(&descriptor).map_err(none)?;
        let local = SocketAddr::try_from(name).map_err(none)?;
        let is_connected = getpeername(&descriptor).is_ok();
        if local.port() == 0 || is_connected || sys::bound_device(&descriptor)? != 0 {
            return Err(refused());
        }
        let namespace = NetworkNamespace::of(&descriptor);
        Ok(Self { protocol, local, is_dual_stack, namespace })
    }

    /// Port as plain data: protocol, address, whether it is dual-stack, and the kernel's cookie of
    /// its network namespace.
    pub fn to_parts(&self) -> (TransportProtocol, SocketAddr, bool, Option<u64>) {
        (self.protocol, self.local, self.is_dual_stack, self.namespace.0)
    }

    /// Inverse of [`BoundPort::to_parts`], for a port that another daemon has examined.
    pub fn from_parts(
        (protocol, local, is_dual_stack, namespace): (
            TransportProtocol,
            SocketAddr,
            bool,
            Option<u64>,
        ),
    ) -> Self {
        Self { protocol, local, is_dual_stack, namespace: NetworkNamespace(namespace) }
    }

    /// True if the kernel would let no other socket bind any part of this request.
    pub fn covers(&self, protocol: TransportProtocol, local: SocketAddr, dual_stack: bool) -> bool {
        let (own, wanted) = (self.local.ip().to_canonical(), local.ip().to_canonical());
        let has_address = match (own, wanted) {
            (_, IpAddr::V6(wanted)) if dual_stack && wanted.is_unspecified() => {
                own == wanted && self.is_dual_stack
            }
            (own, wanted) if own == wanted => true,
            (IpAddr::V4(own), IpAddr::V4(_)) => own.is_unspecified(),
            (IpAddr::V6(own), IpAddr::V6(_)) => own.is_unspecified(),
            (IpAddr::V6(own), IpAddr::V4(_)) => own.is_unspecified() && self.is_dual_stack,
            (IpAddr::V4(_), IpAddr::V6(_)) => false,
        };
        self.protocol == protocol && self.local.port() == local.port() && has_address
    }

    pub(crate) fn is_in(&self, namespace: NetworkNamespace) -> bool {
        self.namespace == namespace && namespace.0.is_some()
    }
}

/// Request that a kernel socket was bound for: protocol, address, and whether for both families.
type BindRequest = (TransportProtocol, SocketAddr, bool);

/// Kernel sockets that several cores hold together: one for each request.
#[derive(Default)]
pub(crate) struct OwnSockets(Mutex<HashMap<BindRequest, Weak<OwnedFd>>>);

impl OwnSockets {
    /// Returns the socket that another core has bound for the same request, or binds one.
    ///
    /// # Errors
    /// As [`bind_kernel_socket`].
    pub(crate) fn bind(
        &self,
        protocol: TransportProtocol,
        local: SocketAddr,
        dual_stack: bool,
    ) -> io::Result<Arc<OwnedFd>> {
        let bind = || bind_kernel_socket(protocol, local, dual_stack).map(Arc::new);
        // The kernel chooses another port each time.
        if local.port() == 0 {
            return bind();
        }
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let request = (protocol, local, dual_stack);
        if let Some(socket) = sockets.get(&request).and_then(Weak::upgrade) {
            return Ok(socket);
        }
        sockets.retain(|_, socket| socket.strong_count() > 0);
        let socket = bind()?;
        sockets.insert(request, Arc::downgrade(&socket));
        Ok(socket)
    }
}

/// Binds a kernel socket that only reserves the port; nothing reads from it.
pub(crate) fn bind_kernel_socket(
    protocol: TransportProtocol,
    local: SocketAddr,
    dual_stack: bool,
) -> io::Result<OwnedFd> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let kind = match protocol {
        TransportProtocol::Udp => SocketType::DGRAM,
        TransportProtocol::Tcp => SocketType::STREAM,
    };
    let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    if local.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, !dual_stack)?;
    }
    rustix::net::bind(&fd, &local)?;
    Ok(fd)
}

/// Checks that every user may bind a port.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] for a port that only privileged users may bind.
pub(crate) fn check_unprivileged(port: u16) -> io::Result<()> {
    let file = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    let start = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok());
    let start = start.unwrap_or(DEFAULT_UNPRIVILEGED_PORT_START);
    if port == 0 || port >= start {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "port {port} is below net.ipv4.ip_unprivileged_port_start ({start}): bind a kernel \
             socket with CAP_NET_BIND_SERVICE and reserve the port by it, or run as root"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use TransportProtocol::{Tcp, Udp};

    use super::*;

    fn bound(address: &str, dual_stack: bool) -> (BoundPort, SocketAddr) {
        let address: SocketAddr = address.parse().unwrap();
        let socket = bind_kernel_socket(Udp, address, dual_stack).unwrap();
        let port = BoundPort::of(&socket).unwrap();
        (port, SocketAddr::new(address.ip(), port.local.port()))
    }

    #[test]
    fn socket_covers_what_it_is_bound_to() {
        // Bound socket, requested address, requested and bound for IPv4 too, covered.
        let cases = [
            ("127.0.0.1:0", "127.0.0.1", false, false, true),
            ("127.0.0.1:0", "0.0.0.0", false, false, false),
            ("127.0.0.1:0", "127.0.0.2", false, false, false),
            ("127.0.0.1:0", "::", true, false, false),
            ("0.0.0.0:0", "192.0.2.1", false, false, true),
            ("0.0.0.0:0", "0.0.0.0", false, false, true),
            ("0.0.0.0:0", "::", false, false, false),
            ("0.0.0.0:0", "::ffff:192.0.2.1", false, false, true),
            ("[::1]:0", "::1", false, false, true),
            ("[::1]:0", "::", false, false, false),
            ("[::]:0", "2001:db8::1", false, false, true),
            ("[::]:0", "::", false, false, true),
            ("[::]:0", "::", true, false, false),
            ("[::]:0", "0.0.0.0", false, false, false),
            ("[::]:0", "192.0.2.1", false, false, false),
            ("[::]:0", "::", true, true, true),
            ("[::]:0", "::", false, true, true),
            ("[::]:0", "0.0.0.0", false, true, true),
            ("[::]:0", "192.0.2.1", false, true, true),
        ];
        for (address, wanted, dual_stack, is_dual_stack, is_covered) in cases {
            let (port, local) = bound(address, is_dual_stack);
            let wanted = SocketAddr::new(wanted.parse().unwrap(), local.port());
            let covers = port.covers(Udp, wanted, dual_stack);
            assert_eq!(covers, is_covered, "{address} for {wanted}, {dual_stack}");
            assert!(!port.covers(Tcp, wanted, dual_stack), "{address} for another protocol");
            let other = SocketAddr::new(wanted.ip(), local.port() ^ 1);
            assert!(!port.covers(Udp, other, dual_stack), "{address} for another port");
        }
    }

    #[test]
    fn only_bound_udp_and_tcp_sockets_give_a_right() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            let listener = TcpListener::bind(address).unwrap();
            let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepted = listener.accept().unwrap().0;
            let datagrams = UdpSocket::bind(address).unwrap();
            assert_eq!(BoundPort::of(&listener).unwrap().protocol, Tcp);
            assert_eq!(BoundPort::of(&datagrams).unwrap().protocol, Udp);
            datagrams.connect(datagrams.local_addr().unwrap()).unwrap();
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let unbound = rustix::net::socket(family, SocketType::DGRAM, None).unwrap();
            let lite = rustix::net::socket(family, SocketType::DGRAM, Some(ipproto::UDPLITE));
            let mut refused: Vec<OwnedFd> =
                vec![connection.into(), accepted.into(), datagrams.into(), unbound];
            if let Ok(lite) = lite {
                rustix::net::bind(&lite, &address).unwrap();
                refused.push(lite);
            }
            for socket in refused {
                let error = BoundPort::of(&socket).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{socket:?}");
            }
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(BoundPort::of(&file).is_err());
        assert!(BoundPort::of(UnixDatagram::unbound().unwrap()).is_err());
    }

    #[test]
    fn socket_of_this_namespace_is_recognized() {
        let (port, _) = bound("127.0.0.1:0", false);
        assert!(port.is_in(NetworkNamespace::current()));
        assert!(!port.is_in(NetworkNamespace(Some(u64::MAX))));
        let unknown = BoundPort { namespace: NetworkNamespace(None), ..port };
        assert!(!unknown.is_in(NetworkNamespace(None)), "an older kernel proves nothing");
    }

    #[test]
    fn privileged_ports_need_privileges() {
        assert!(check_unprivileged(0).is_ok() && check_unprivileged(65_535).is_ok());
        let file = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
        let start: u16 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        if let Some(below) = start.checked_sub(1).filter(|&below| below > 0) {
            let error = check_unprivileged(below).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        }
    }
}
