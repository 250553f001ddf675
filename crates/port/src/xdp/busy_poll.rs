//! The device's part of preferred busy polling: how long it waits for a poll
//! before it falls back to interrupts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::BusyPoll;
use super::config::Target;
use super::netdev::{Napi, Netdev};

/// Settings of the device that were changed, as they were; put back when
/// dropped. A process that is killed leaves them changed: interrupts then come
/// later than before by the time-out, and nothing is lost.
pub(super) enum DeviceSettings {
    /// Of the whole interface: files of `/sys` and what was in them.
    Files(Vec<(PathBuf, String)>),
    /// Of its NAPI instances, through netlink.
    Napis(Netdev, Vec<Napi>),
}

impl DeviceSettings {
    /// Changes the settings of the interface: by `/sys` where it shows this
    /// network namespace, else by netlink.
    ///
    /// # Errors
    /// Neither way works. Nothing is changed then.
    pub(super) fn set(target: &Target, settings: &BusyPoll) -> io::Result<Self> {
        let folder = Path::new("/sys/class/net").join(&target.name);
        if shows(&folder, target) {
            Self::by_files(&folder, settings)
        } else {
            Self::by_netlink(target.index, settings)
        }
    }

    fn by_files(folder: &Path, settings: &BusyPoll) -> io::Result<Self> {
        let mut changed = Self::Files(Vec::new());
        let values = [
            ("napi_defer_hard_irqs", u64::from(settings.defer_irqs)),
            ("gro_flush_timeout", settings.flush_timeout_ns),
        ];
        for (name, value) in values {
            let path = folder.join(name);
            let before = fs::read_to_string(&path)?;
            fs::write(&path, value.to_string())?;
            if let Self::Files(files) = &mut changed {
                files.push((path, before));
            }
        }
        Ok(changed)
    }

    fn by_netlink(interface_index: u32, settings: &BusyPoll) -> io::Result<Self> {
        let netdev = Netdev::open()?;
        let napis = netdev.napis(interface_index)?;
        if napis.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut changed = Self::Napis(netdev, Vec::new());
        for napi in napis {
            if let Self::Napis(netdev, before) = &mut changed {
                netdev.set(&Napi {
                    defer_hard_irqs: settings.defer_irqs,
                    gro_flush_timeout_ns: settings.flush_timeout_ns,
                    ..napi
                })?;
                before.push(napi);
            }
        }
        Ok(changed)
    }
}

impl Drop for DeviceSettings {
    fn drop(&mut self) {
        // Errors are let go: the interface may be gone, and its settings with
        // it.
        match self {
            Self::Files(files) => {
                for (path, before) in files {
                    let _ = fs::write(path, before.trim());
                }
            }
            Self::Napis(netdev, napis) => {
                for before in napis {
                    let _ = netdev.set(before);
                }
            }
        }
    }
}

/// Whether a folder of `/sys` is about this interface. `/sys` shows the network
/// namespace that it was mounted in, which may have an interface of this name
/// as well.
fn shows(folder: &Path, target: &Target) -> bool {
    let read = |name| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let mac = target.mac.map(|byte| format!("{byte:02x}")).join(":");
    read("ifindex").trim() == target.index.to_string() && read("address").trim() == mac
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::netlink::Interface;

    fn napis(interface_index: u32) -> io::Result<Vec<Napi>> {
        let mut napis = Netdev::open()?.napis(interface_index)?;
        napis.sort_by_key(|napi| napi.id);
        Ok(napis)
    }

    #[test]
    fn settings_of_another_namespace_go_by_netlink() {
        // SAFETY: only the network namespace of this thread changes.
        if let Err(error) = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
            eprintln!("skipped: needs root ({error})");
            return;
        }
        for command in [
            "ip link add veth0 numrxqueues 2 type veth peer veth1",
            // A veth has NAPI instances while it merges packets or runs XDP.
            "ethtool -K veth0 gro on",
            "ip link set veth1 up",
            "ip link set veth0 up",
        ] {
            let mut words = command.split(' ');
            let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
            assert!(status.success(), "{command}");
        }
        let interface = Interface::by_name("veth0").unwrap();
        let (index, mac) = (interface.index, interface.mac.0);
        let before = match napis(index) {
            Ok(napis) if !napis.is_empty() => napis,
            other => {
                eprintln!("skipped: needs Linux 6.13 ({other:?})");
                return;
            }
        };
        let target = Target { name: interface.name, index, mac, mtu: 1500, queues: vec![0, 1] };
        let settings = BusyPoll { defer_irqs: 7, flush_timeout_ns: 123_456, ..BusyPoll::default() };
        let changed = DeviceSettings::set(&target, &settings).unwrap();
        assert!(matches!(changed, DeviceSettings::Napis(..)), "/sys is not of this namespace");
        let during = napis(index).unwrap();
        assert_eq!(during.len(), 2);
        for napi in during {
            assert_eq!((napi.defer_hard_irqs, napi.gro_flush_timeout_ns), (7, 123_456));
        }
        drop(changed);
        assert_eq!(napis(index).unwrap(), before);
    }
}
