//! Device settings for preferred busy polling: the time that a NAPI instance waits for a poll
//! before it falls back to interrupts.

use std::io;

use super::BusyPoll;
use super::config::TargetInterface;
use crate::interface_settings::{InterfaceId, Settings, SettingsAccess, SettingsGuard};
use crate::netlink::NapiSettings;

/// Minimum flush timeout while receiving is paused, in nanoseconds. Exceeds the period of a
/// CPU share, so that the setting is written once and not in every period.
const MIN_PAUSE_TIMEOUT_NS: u64 = 20_000_000;

/// Flush timeout while softirqs poll the device, in nanoseconds. A link of 1 Gb/s delivers
/// 30 frames in that time; RX rings of NICs hold a thousand, a veth's 256.
const SOFTIRQ_TIMEOUT_NS: u64 = 20_000;

/// Changed interrupt-deferral settings of a device; restored on drop.
pub(super) struct IrqDeferral {
    guard: SettingsGuard,
    /// Restorations of the guard that this process knows of.
    restorations: u64,
    /// Flush timeout while the device polls, in nanoseconds.
    polling_timeout_ns: u64,
    /// Current flush timeout, in nanoseconds.
    flush_timeout_ns: u64,
}

impl IrqDeferral {
    /// Changes the settings of the interface: through `/sys` if `/sys` shows this network
    /// namespace, otherwise through netlink.
    ///
    /// # Errors
    /// Neither `/sys` nor netlink accepts the settings, or another process has changed them.
    /// Nothing is changed then.
    pub(super) fn set(target: &TargetInterface, settings: &BusyPoll) -> io::Result<Self> {
        let interface = InterfaceId { index: target.index, mac: target.mac };
        let access = SettingsAccess::to_deferral(&interface)?;
        let (defer_irqs, flush_timeout_ns) = (settings.defer_irqs, settings.flush_timeout_ns);
        let guard = SettingsGuard::begin(interface, access, |original| {
            Some(match original {
                Settings::Napis(napis) => {
                    let changed = |&NapiSettings { id, .. }: &NapiSettings| NapiSettings {
                        id,
                        defer_hard_irqs: defer_irqs,
                        gro_flush_timeout_ns: flush_timeout_ns,
                    };
                    Settings::Napis(napis.iter().map(changed).collect())
                }
                _ => Settings::Deferral { defer_irqs, flush_timeout_ns },
            })
        })?;
        let guard = guard.ok_or(io::ErrorKind::Unsupported)?;
        let restorations = guard.restorations();
        let polling_timeout_ns = flush_timeout_ns;
        Ok(Self { guard, restorations, polling_timeout_ns, flush_timeout_ns })
    }

    /// Applies the settings again if they were restored while this process was stopped. Returns
    /// true if so, which takes effect with the next poll.
    #[inline]
    pub(super) fn apply_again(&mut self) -> bool {
        let restorations = self.guard.restorations();
        if self.restorations == restorations {
            return false;
        }
        self.restorations = restorations;
        // If the kernel refuses, softirqs poll the driver too.
        let _ = self.guard.apply();
        let _ = self.guard.write_flush_timeout(self.flush_timeout_ns);
        true
    }

    /// Defers interrupts for a pause of `wait_ns` without polls. Returns true if the flush
    /// timeout was raised, which takes effect with the next poll.
    ///
    /// # Errors
    /// The kernel refuses; the driver is then polled by softirqs during the pause.
    pub(super) fn defer_for(&mut self, wait_ns: u64) -> io::Result<bool> {
        // While frames were queued no polls were needed, so the last poll may be a while ago.
        let wait_ns = wait_ns.saturating_mul(2);
        if wait_ns <= self.flush_timeout_ns {
            return Ok(false);
        }
        self.write_flush_timeout(wait_ns.max(MIN_PAUSE_TIMEOUT_NS))?;
        Ok(true)
    }

    /// Sets a short flush timeout: softirqs poll the device more often than its RX ring fills.
    /// Returns true if the timeout changed, which takes effect with the next poll.
    ///
    /// # Errors
    /// The kernel refuses; the RX ring may then overflow.
    pub(super) fn poll_in_softirq(&mut self) -> io::Result<bool> {
        self.set_flush_timeout(SOFTIRQ_TIMEOUT_NS)
    }

    /// Restores the flush timeout of normal polling. Returns true if the timeout changed, which
    /// takes effect with the next poll.
    ///
    /// # Errors
    /// The kernel refuses; the wakeup of a sleeping owner is then late.
    pub(super) fn expect_polls(&mut self) -> io::Result<bool> {
        self.set_flush_timeout(self.polling_timeout_ns)
    }

    /// Sets a flush timeout of 0: one interrupt for each frame, without deferral. Returns true
    /// if the timeout changed, which takes effect with the next poll.
    ///
    /// # Errors
    /// The kernel refuses; the wakeup of a sleeping owner is then late.
    pub(super) fn interrupt_at_once(&mut self) -> io::Result<bool> {
        self.set_flush_timeout(0)
    }

    fn set_flush_timeout(&mut self, flush_timeout_ns: u64) -> io::Result<bool> {
        if self.flush_timeout_ns == flush_timeout_ns {
            return Ok(false);
        }
        self.write_flush_timeout(flush_timeout_ns)?;
        Ok(true)
    }

    fn write_flush_timeout(&mut self, flush_timeout_ns: u64) -> io::Result<()> {
        self.guard.write_flush_timeout(flush_timeout_ns)?;
        self.flush_timeout_ns = flush_timeout_ns;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::netlink::{Interface, NetdevSocket};

    fn napis(interface_index: u32) -> io::Result<Vec<NapiSettings>> {
        let mut napis = NetdevSocket::open()?.napis(interface_index)?;
        napis.sort_by_key(|napi| napi.id);
        Ok(napis)
    }

    #[test]
    fn settings_in_another_namespace_are_changed_by_netlink() {
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
        let target = TargetInterface {
            name: interface.name,
            index,
            mac,
            mtu: 1500,
            queues: vec![0, 1],
            is_veth: true,
            has_local_peers: true,
        };
        let settings = BusyPoll { defer_irqs: 7, flush_timeout_ns: 123_456, ..BusyPoll::default() };
        let mut deferral = IrqDeferral::set(&target, &settings).unwrap();
        assert!(
            matches!(deferral.guard.original(), Settings::Napis(_)),
            "/sys does not show this namespace"
        );
        let assert_timeout = |expected_ns: u64| {
            let during = napis(index).unwrap();
            assert_eq!(during.len(), 2);
            for napi in during {
                assert_eq!((napi.defer_hard_irqs, napi.gro_flush_timeout_ns), (7, expected_ns));
            }
        };
        assert_timeout(123_456);
        assert!(!deferral.defer_for(60_000).unwrap(), "the flush timeout is longer already");
        assert_timeout(123_456);
        assert!(deferral.defer_for(9_000_000).unwrap());
        assert_timeout(MIN_PAUSE_TIMEOUT_NS);
        assert!(!deferral.defer_for(10_000_000).unwrap(), "the timeout is set already");
        assert!(deferral.defer_for(50_000_000).unwrap());
        assert_timeout(100_000_000);
        assert!(deferral.poll_in_softirq().unwrap());
        assert_timeout(SOFTIRQ_TIMEOUT_NS);
        assert!(!deferral.poll_in_softirq().unwrap());
        assert!(deferral.expect_polls().unwrap());
        assert_timeout(123_456);
        assert!(!deferral.expect_polls().unwrap());
        assert!(deferral.interrupt_at_once().unwrap());
        assert_timeout(0);
        assert!(!deferral.interrupt_at_once().unwrap());
        assert!(deferral.defer_for(60_000).unwrap(), "no interrupts during the pause");
        assert_timeout(MIN_PAUSE_TIMEOUT_NS);
        assert!(deferral.expect_polls().unwrap());
        assert_timeout(123_456);
        drop(deferral);
        assert_eq!(napis(index).unwrap(), before);
    }
}
