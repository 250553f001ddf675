//! Reading and writing one group of settings of an interface.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::netlink::{GroMaxSizes, Interface, NapiSettings, NetdevSocket, Socket};

/// Interface of the calling thread's network namespace. The hardware address tells a later
/// interface with the same index from the one that was meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceId {
    pub(crate) index: u32,
    pub(crate) mac: [u8; 6],
}

/// Values of one group of settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Settings {
    /// Interrupt deferral of the whole interface (`napi_defer_hard_irqs`, `gro_flush_timeout`).
    Deferral { defer_irqs: u32, flush_timeout_ns: u64 },
    /// Interrupt deferral of each NAPI instance, in the order of their IDs.
    Napis(Vec<NapiSettings>),
    /// Sizes of coalesced frames.
    Gro(GroMaxSizes),
}

impl Settings {
    /// Number that shows that the values are a process's own: it stays the same while the process
    /// changes the others.
    pub(super) fn mark(&self) -> u32 {
        match self {
            Self::Deferral { defer_irqs, .. } => *defer_irqs,
            Self::Napis(napis) => napis.iter().map(|napi| napi.defer_hard_irqs).max().unwrap_or(0),
            Self::Gro(sizes) => sizes.v6.max(sizes.v4),
        }
    }

    /// Flush timeout in nanoseconds; 0 for settings without one.
    pub(super) fn flush_timeout_ns(&self) -> u64 {
        match self {
            Self::Deferral { flush_timeout_ns, .. } => *flush_timeout_ns,
            Self::Napis(napis) => napis.first().map_or(0, |napi| napi.gro_flush_timeout_ns),
            Self::Gro(_) => 0,
        }
    }
}

/// Open files or socket through which one group of settings is read and written. They stay with
/// the interface and its network namespace, whatever thread uses them.
pub(crate) enum SettingsAccess {
    /// Files `napi_defer_hard_irqs` and `gro_flush_timeout`.
    Sysfs { defer_irqs: File, flush_timeout: File },
    /// Netlink family `netdev`: the NAPI instances with these IDs, or all of the interface.
    Netdev { socket: NetdevSocket, napis: Option<Vec<u32>> },
    /// Route netlink.
    Route(Socket),
}

impl SettingsAccess {
    /// Access to the interrupt deferral: through `/sys` if `/sys` shows this network namespace and
    /// may be written, otherwise through netlink.
    ///
    /// # Errors
    /// Neither is possible.
    pub(crate) fn to_deferral(interface: &InterfaceId) -> io::Result<Self> {
        Self::to_sysfs(interface).or_else(|_| Self::to_napis(None))
    }

    /// Access to the sizes of coalesced frames.
    ///
    /// # Errors
    /// Netlink is not available.
    pub(crate) fn to_gro() -> io::Result<Self> {
        Ok(Self::Route(Socket::open(0).map_err(io::Error::other)?))
    }

    /// Access to the settings that `settings` are values of.
    pub(super) fn to(settings: &Settings, interface: &InterfaceId) -> io::Result<Self> {
        match settings {
            Settings::Deferral { .. } => Self::to_sysfs(interface),
            Settings::Napis(napis) => {
                Self::to_napis(Some(napis.iter().map(|napi| napi.id).collect()))
            }
            Settings::Gro(_) => Self::to_gro(),
        }
    }

    fn to_sysfs(interface: &InterfaceId) -> io::Result<Self> {
        let name = Interface::by_index(interface.index).map_err(io::Error::other)?.name;
        let folder = Path::new("/sys/class/net").join(name);
        if !is_sysfs_of(&folder, interface) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let open = |name| File::options().read(true).write(true).open(folder.join(name));
        let defer_irqs = open("napi_defer_hard_irqs")?;
        Ok(Self::Sysfs { defer_irqs, flush_timeout: open("gro_flush_timeout")? })
    }

    /// Access to the interrupt deferral of the NAPI instances with these IDs, or of all of the
    /// interface.
    ///
    /// # Errors
    /// The kernel is older than Linux 6.13.
    pub(crate) fn to_napis(napis: Option<Vec<u32>>) -> io::Result<Self> {
        Ok(Self::Netdev { socket: NetdevSocket::open()?, napis })
    }

    /// Reads the current values.
    ///
    /// # Errors
    /// The interface is gone, or has no such settings.
    pub(crate) fn read(&mut self, interface: &InterfaceId) -> io::Result<Settings> {
        match self {
            Self::Sysfs { defer_irqs, flush_timeout } => Ok(Settings::Deferral {
                defer_irqs: read_number(defer_irqs)? as u32,
                flush_timeout_ns: read_number(flush_timeout)?,
            }),
            Self::Netdev { socket, napis: only } => {
                let mut napis = socket.napis(interface.index)?;
                napis.retain(|napi| only.as_ref().is_none_or(|only| only.contains(&napi.id)));
                if napis.is_empty() {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                napis.sort_by_key(|napi| napi.id);
                Ok(Settings::Napis(napis))
            }
            Self::Route(socket) => {
                let sizes = GroMaxSizes::of(socket, interface.index).map_err(io::Error::other)?;
                sizes.map(Settings::Gro).ok_or_else(|| io::ErrorKind::Unsupported.into())
            }
        }
    }

    /// Writes values.
    ///
    /// # Errors
    /// The kernel refuses: the interface is gone, or CAP_NET_ADMIN is missing.
    pub(crate) fn write(&mut self, interface: &InterfaceId, settings: &Settings) -> io::Result<()> {
        match (self, settings) {
            (
                Self::Sysfs { defer_irqs, flush_timeout },
                Settings::Deferral { defer_irqs: irqs, flush_timeout_ns },
            ) => {
                write_number(defer_irqs, u64::from(*irqs))?;
                write_number(flush_timeout, *flush_timeout_ns)
            }
            (Self::Netdev { socket, .. }, Settings::Napis(napis)) => {
                napis.iter().try_for_each(|napi| socket.set(napi))
            }
            (Self::Route(socket), Settings::Gro(sizes)) => {
                sizes.set(socket, interface.index).map_err(io::Error::other)
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Writes the flush timeout of the interface, or of these NAPI instances.
    ///
    /// # Errors
    /// As [`SettingsAccess::write`].
    pub(crate) fn write_flush_timeout(
        &self,
        original: &Settings,
        flush_timeout_ns: u64,
    ) -> io::Result<()> {
        match (self, original) {
            (Self::Sysfs { flush_timeout, .. }, _) => write_number(flush_timeout, flush_timeout_ns),
            (Self::Netdev { socket, .. }, Settings::Napis(napis)) => napis
                .iter()
                .try_for_each(|napi| socket.set_flush_timeout(napi.id, flush_timeout_ns)),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

fn read_number(file: &File) -> io::Result<u64> {
    let mut text = [0; 24];
    let len = file.read_at(&mut text, 0)?;
    let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
    text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

fn write_number(file: &File, number: u64) -> io::Result<()> {
    file.write_all_at(number.to_string().as_bytes(), 0)
}

/// True if a directory of `/sys` describes this interface. `/sys` shows the network namespace
/// in which it was mounted, which may contain another interface of the same name.
pub(crate) fn is_sysfs_of(directory: &Path, interface: &InterfaceId) -> bool {
    let read = |name| fs::read_to_string(directory.join(name)).unwrap_or_default();
    let mac = interface.mac.map(|byte| format!("{byte:02x}")).join(":");
    read("ifindex").trim() == interface.index.to_string() && read("address").trim() == mac
}
