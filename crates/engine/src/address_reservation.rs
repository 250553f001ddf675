//! Reservation of own addresses among the programs of a host.
//!
//! Address probes find other hosts only: two programs on one interface do not hear each other. So a
//! program listens on a Unix socket for each of its own addresses. The name of the socket is
//! abstract (unix(7)): it exists in one network namespace, and the kernel frees it with the process,
//! however the process ends. Nobody accepts connections. A connection tells another program which
//! process listens (`SO_PEERCRED`).

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{bind, connect, listen, socket_with};
use tidegate_device::netlink::{Interface, NetlinkError};
use tidegate_device::process::ProcessInfo;
use tidegate_memory::shared::peer_credentials;

/// Connections that wait at a socket until it is closed. Further ones are refused, and learn no
/// process.
const BACKLOG: i32 = 16;

/// Times that a socket is bound whose name is in use, but on which nobody listens: its process ends.
const ATTEMPTS: usize = 8;

/// Own addresses of a stack, reserved on an interface while this value exists.
#[derive(Debug, Default)]
pub struct AddressReservations(Vec<OwnedFd>);

/// Error of reserving own addresses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReservationError {
    /// Another program has the address.
    #[error(
        "{address} on {interface} is the own address of {holder} already: use another address, end \
         that program, or attach programs to one `tidegate daemon` to share its address"
    )]
    InUse {
        /// The address.
        address: IpAddr,
        /// Name of the interface.
        interface: String,
        /// Program that has the address.
        holder: AddressHolder,
    },
    /// The interface cannot be found.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Another system error.
    #[error("cannot reserve the own address {address}: {source}")]
    Io {
        /// The address.
        address: IpAddr,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Program that has an own address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressHolder {
    /// Another stack of the calling process.
    ThisProcess,
    /// Another process.
    Process(ProcessInfo),
    /// Process without a number in the PID namespace of the caller, or with too many connections.
    Unknown,
}

impl fmt::Display for AddressHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThisProcess => f.write_str("another stack of this process"),
            Self::Process(process) => process.fmt(f),
            Self::Unknown => f.write_str("a process that this one cannot see"),
        }
    }
}

impl AddressReservations {
    /// Reserves addresses on an interface, for packets with this VLAN ID or untagged ones. An
    /// address that a process of another unprivileged user has listed is not reserved, since that
    /// process may have no stack.
    ///
    /// # Errors
    /// [`ReservationError`] says what is wrong and what to do. Nothing is reserved then.
    pub fn reserve(
        interface: &str,
        vlan: Option<u16>,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> Result<Self, ReservationError> {
        let interface = Interface::by_name(interface)?;
        let mut sockets = Vec::new();
        for address in addresses {
            let name = socket_name(interface.index, vlan, address);
            match reserve(&name).map_err(|source| ReservationError::Io { address, source })? {
                Reserved::Now(socket) => sockets.push(socket),
                Reserved::NotTrusted => {}
                Reserved::By(holder) => {
                    let interface = interface.name;
                    return Err(ReservationError::InUse { address, interface, holder });
                }
            }
        }
        Ok(Self(sockets))
    }

    /// Continues the reservations of another process, whose [`AddressReservations::sockets`] these
    /// are.
    ///
    /// # Errors
    /// A descriptor is not such a socket.
    pub fn inherit(sockets: Vec<OwnedFd>) -> io::Result<Self> {
        let inherited = Self(sockets);
        inherited.show_this_process()?;
        Ok(inherited)
    }

    /// Makes the sockets show this process to others, and not one that has inherited them.
    ///
    /// # Errors
    /// A descriptor is not a socket of a reservation.
    pub(crate) fn show_this_process(&self) -> io::Result<()> {
        Ok(self.0.iter().try_for_each(|socket| listen(socket, BACKLOG))?)
    }

    /// Sockets of the reservations.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

/// Result of reserving one address.
enum Reserved {
    Now(OwnedFd),
    By(AddressHolder),
    /// The name is in use by another user's process, which may be anything.
    NotTrusted,
}

fn socket_name(interface: u32, vlan: Option<u16>, address: IpAddr) -> String {
    // VLAN ID 0 stands for untagged packets in a tag, too.
    format!("tidegate-address/{interface}/{}/{address}", vlan.unwrap_or(0))
}

fn reserve(name: &str) -> io::Result<Reserved> {
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    for _ in 0..ATTEMPTS {
        let socket = unix_socket()?;
        match bind(&socket, &name) {
            Ok(()) => {
                listen(&socket, BACKLOG)?;
                return Ok(Reserved::Now(socket));
            }
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(error.into()),
        }
        match connect(&socket, &name) {
            Ok(()) => return holder(&socket),
            // The process has ended meanwhile, or does not listen yet.
            Err(Errno::CONNREFUSED) => std::thread::yield_now(),
            // Too many connections wait.
            Err(Errno::AGAIN) => return Ok(Reserved::By(AddressHolder::Unknown)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Reserved::NotTrusted)
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Process that listens at the other end of a connection.
fn holder(connection: &OwnedFd) -> io::Result<Reserved> {
    let peer = peer_credentials(connection)?;
    let is_trusted = peer.uid == 0 || peer.uid == rustix::process::geteuid().as_raw();
    if !is_trusted {
        return Ok(Reserved::NotTrusted);
    }
    Ok(Reserved::By(match peer.pid.map(std::num::NonZeroU32::get) {
        Some(pid) if pid == std::process::id() => AddressHolder::ThisProcess,
        Some(pid) => AddressHolder::Process(ProcessInfo::of(pid)),
        None => AddressHolder::Unknown,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: &str = "lo";

    fn reserve(vlan: Option<u16>, addresses: &[&str]) -> Result<AddressReservations, String> {
        let addresses = addresses.iter().map(|address| address.parse().unwrap());
        AddressReservations::reserve(LOOPBACK, vlan, addresses).map_err(|error| error.to_string())
    }

    #[test]
    fn address_is_reserved_once_on_each_vlan_until_it_is_released() {
        let first = reserve(None, &["192.0.2.1", "2001:db8::1"]).unwrap();
        assert_eq!(first.sockets().count(), 2);
        let _others = reserve(None, &["192.0.2.2", "2001:db8::2"]).unwrap();
        let _tagged = reserve(Some(7), &["192.0.2.1"]).unwrap();
        for address in ["192.0.2.1", "2001:db8:0::1"] {
            let error = reserve(None, &["192.0.2.9", address]).unwrap_err();
            for part in ["on lo", "another stack of this process"] {
                assert!(error.contains(part), "{error}");
            }
        }
        drop(first);
        // An address before the one in use is not kept.
        reserve(None, &["192.0.2.1", "2001:db8::1", "192.0.2.9"]).unwrap();
    }

    #[test]
    fn reservation_outlasts_the_process_that_hands_it_over() {
        let old = reserve(None, &["192.0.2.51"]).unwrap();
        let sockets = old.sockets().map(|socket| socket.try_clone_to_owned().unwrap()).collect();
        let new = AddressReservations::inherit(sockets).unwrap();
        drop(old);
        reserve(None, &["192.0.2.51"]).unwrap_err();
        drop(new);
        reserve(None, &["192.0.2.51"]).unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        AddressReservations::inherit(vec![file]).unwrap_err();
    }

    #[test]
    fn holder_with_too_many_connections_is_unknown() {
        let _first = reserve(None, &["192.0.2.61"]).unwrap();
        let index = Interface::by_name(LOOPBACK).unwrap().index;
        let name = socket_name(index, None, "192.0.2.61".parse().unwrap());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let connections = std::iter::repeat_with(|| {
            let socket = unix_socket().unwrap();
            connect(&socket, &name).map(|()| socket)
        });
        let connections: Vec<_> = connections.map_while(Result::ok).take(1000).collect();
        assert!(connections.len() < 1000);
        let error = reserve(None, &["192.0.2.61"]).unwrap_err();
        assert!(error.contains("cannot see"), "{error}");
    }
}
