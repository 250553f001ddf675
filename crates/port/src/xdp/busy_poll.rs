//! The device's part of preferred busy polling: how long it waits for a poll
//! before it falls back to interrupts.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::BusyPoll;
use super::config::Target;
use super::netdev::{Napi, Netdev};

/// The least time that a device waits for a port that is held back, in
/// nanoseconds: more than the period of a CPU share, so that it is told once
/// and not in every period.
const HELD_NS: u64 = 20_000_000;

/// How long a device waits that looks by itself, in nanoseconds. A line of 1
/// Gb/s brings 30 frames meanwhile; cards hold a thousand, a veth 256.
const ALONE_NS: u64 = 20_000;

/// Settings of the device that were changed; put back when dropped. A process
/// that is killed leaves them changed: interrupts then come later than before
/// by the time-out, and nothing is lost.
pub(super) struct DeviceSettings {
    before: Before,
    /// How long the device waits for a poll while the port works.
    working_ns: u64,
    /// How long it waits now.
    flush_timeout_ns: u64,
}

/// The settings as they were.
enum Before {
    /// Of the whole interface: files of `/sys` and what was in them, and the
    /// one that holds the time-out.
    Files(Vec<(PathBuf, String)>, File),
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
        let before = if shows(&folder, target) {
            by_files(&folder, settings)?
        } else {
            by_netlink(target.index, settings)?
        };
        let working_ns = settings.flush_timeout_ns;
        Ok(Self { before, working_ns, flush_timeout_ns: working_ns })
    }

    /// The port will not poll for `wait_ns`. Returns whether the device was
    /// told to wait longer than before: it counts from the next poll on.
    ///
    /// # Errors
    /// The kernel refuses; then the device works behind the port's back.
    pub(super) fn hold(&mut self, wait_ns: u64) -> io::Result<bool> {
        // Polls were not needed while frames waited, so the last one may be
        // a while ago.
        let wait_ns = wait_ns.saturating_mul(2);
        if wait_ns <= self.flush_timeout_ns {
            return Ok(false);
        }
        self.wait(wait_ns.max(HELD_NS))?;
        Ok(true)
    }

    /// The device is to look by itself, in softirqs, more often than its ring
    /// fills. Returns whether it looked less often before: it counts from the
    /// next poll on.
    ///
    /// # Errors
    /// The kernel refuses; then the ring may run over.
    pub(super) fn work_alone(&mut self) -> io::Result<bool> {
        self.change(ALONE_NS)
    }

    /// The port polls as a rule. Returns whether the device waited for longer
    /// or not at all before: it counts from the next poll on.
    ///
    /// # Errors
    /// The kernel refuses; then the port wakes up late.
    pub(super) fn release(&mut self) -> io::Result<bool> {
        self.change(self.working_ns)
    }

    /// The device is to tell of each frame at once. Returns whether it waited
    /// before: it counts from the next poll on.
    ///
    /// # Errors
    /// The kernel refuses; then the port wakes up late.
    pub(super) fn interrupt(&mut self) -> io::Result<bool> {
        self.change(0)
    }

    fn change(&mut self, flush_timeout_ns: u64) -> io::Result<bool> {
        if self.flush_timeout_ns == flush_timeout_ns {
            return Ok(false);
        }
        self.wait(flush_timeout_ns)?;
        Ok(true)
    }

    fn wait(&mut self, flush_timeout_ns: u64) -> io::Result<()> {
        match &self.before {
            Before::Files(_, file) => {
                file.write_all_at(flush_timeout_ns.to_string().as_bytes(), 0)?;
            }
            Before::Napis(netdev, napis) => {
                for &before in napis {
                    netdev.set_flush_timeout(before.id, flush_timeout_ns)?;
                }
            }
        }
        self.flush_timeout_ns = flush_timeout_ns;
        Ok(())
    }
}

fn by_files(folder: &Path, settings: &BusyPoll) -> io::Result<Before> {
    let values = [
        ("napi_defer_hard_irqs", u64::from(settings.defer_irqs)),
        ("gro_flush_timeout", settings.flush_timeout_ns),
    ];
    let file = File::options().write(true).open(folder.join(values[1].0))?;
    let mut before = Before::Files(Vec::new(), file);
    for (name, value) in values {
        let path = folder.join(name);
        let was = fs::read_to_string(&path)?;
        fs::write(&path, value.to_string())?;
        if let Before::Files(files, _) = &mut before {
            files.push((path, was));
        }
    }
    Ok(before)
}

fn by_netlink(interface_index: u32, settings: &BusyPoll) -> io::Result<Before> {
    let netdev = Netdev::open()?;
    let napis = netdev.napis(interface_index)?;
    if napis.is_empty() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut before = Before::Napis(netdev, Vec::new());
    for napi in napis {
        if let Before::Napis(netdev, done) = &mut before {
            netdev.set(&Napi {
                defer_hard_irqs: settings.defer_irqs,
                gro_flush_timeout_ns: settings.flush_timeout_ns,
                ..napi
            })?;
            done.push(napi);
        }
    }
    Ok(before)
}

impl Drop for Before {
    fn drop(&mut self) {
        // Errors are let go: the interface may be gone, and its settings with
        // it.
        match self {
            Self::Files(files, _) => {
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
pub(super) fn shows(folder: &Path, target: &Target) -> bool {
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
        let target = Target {
            name: interface.name,
            index,
            mac,
            mtu: 1500,
            queues: vec![0, 1],
            is_veth: true,
        };
        let settings = BusyPoll { defer_irqs: 7, flush_timeout_ns: 123_456, ..BusyPoll::default() };
        let mut changed = DeviceSettings::set(&target, &settings).unwrap();
        assert!(matches!(changed.before, Before::Napis(..)), "/sys is not of this namespace");
        let waits = |wanted_ns: u64| {
            let during = napis(index).unwrap();
            assert_eq!(during.len(), 2);
            for napi in during {
                assert_eq!((napi.defer_hard_irqs, napi.gro_flush_timeout_ns), (7, wanted_ns));
            }
        };
        waits(123_456);
        assert!(!changed.hold(60_000).unwrap(), "the device waits longer anyway");
        waits(123_456);
        assert!(changed.hold(9_000_000).unwrap());
        waits(HELD_NS);
        assert!(!changed.hold(10_000_000).unwrap(), "told already");
        assert!(changed.hold(50_000_000).unwrap());
        waits(100_000_000);
        assert!(changed.work_alone().unwrap());
        waits(ALONE_NS);
        assert!(!changed.work_alone().unwrap());
        assert!(changed.release().unwrap());
        waits(123_456);
        assert!(!changed.release().unwrap());
        assert!(changed.interrupt().unwrap());
        waits(0);
        assert!(!changed.interrupt().unwrap());
        assert!(changed.hold(60_000).unwrap(), "it must not interrupt meanwhile");
        waits(HELD_NS);
        assert!(changed.release().unwrap());
        waits(123_456);
        drop(changed);
        assert_eq!(napis(index).unwrap(), before);
    }
}
