//! Device settings for preferred busy polling: the time that a NAPI instance waits for a poll
//! before it falls back to interrupts.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::epoll;

use super::BusyPoll;
use super::config::TargetInterface;
use crate::interface_settings::{Progress, Settings, SettingsAccess, SettingsGuard};
use crate::netlink::NapiSettings;

/// Minimum flush timeout while receiving is paused, in nanoseconds. Exceeds the period of a
/// CPU share, so that the setting is written once and not in every period.
const MIN_PAUSE_TIMEOUT_NS: u64 = 20_000_000;

/// Data of the restorer's descriptor in the epoll instance of a device.
const RESTORER_EVENT: u64 = u64::MAX;

/// Change of the flush timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum TimeoutChange {
    /// The timeout is as it was.
    None,
    /// The timeout changed, which takes effect with the next poll.
    Made,
    /// The process has no privilege to change the timeout, and has asked its restorer.
    /// [`IrqDeferral::update`] tells once the change is made.
    Requested,
}

/// Changed interrupt-deferral settings of a device; restored on drop.
pub(super) struct IrqDeferral {
    guard: SettingsGuard,
    /// Restorations of the guard that this process knows of.
    restorations: u64,
    /// Flush timeout while the device polls, in nanoseconds.
    polling_timeout_ns: u64,
    /// Flush timeout that is set, or was requested, in nanoseconds; `None` after a request that was
    /// not granted, which the restorer may yet serve.
    flush_timeout_ns: Option<u64>,
    /// The device's epoll instance has the restorer's descriptor.
    wakes_on_answer: bool,
}

impl IrqDeferral {
    /// Changes the settings of the interface: through `/sys` if `/sys` shows this network
    /// namespace, otherwise through netlink.
    ///
    /// # Errors
    /// Neither `/sys` nor netlink accepts the settings, or another process has changed them.
    /// Nothing is changed then.
    pub(super) fn set(target: &TargetInterface, settings: &BusyPoll) -> io::Result<Self> {
        let interface = target.id();
        let access = match &target.napis {
            Some(napis) => SettingsAccess::to_napis(Some(napis.clone()))?,
            None => SettingsAccess::to_deferral(&interface)?,
        };
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
        Ok(Self::new(guard.ok_or(io::ErrorKind::Unsupported)?, flush_timeout_ns))
    }

    fn new(guard: SettingsGuard, flush_timeout_ns: u64) -> Self {
        Self {
            restorations: guard.restorations(),
            guard,
            polling_timeout_ns: flush_timeout_ns,
            flush_timeout_ns: Some(flush_timeout_ns),
            wakes_on_answer: false,
        }
    }

    /// True if the settings are those of the interface, which its NAPI instances inherit.
    #[cfg(feature = "packet")]
    pub(super) fn is_of_interface(&self) -> bool {
        self.guard.is_of_interface()
    }

    /// True while the restorer has a request to answer, so that the former timeout may be in force.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.guard.is_pending()
    }

    /// Tells about changes since the last call: the settings are applied again if they were restored
    /// while this process was stopped, and the restorer may have answered.
    ///
    /// # Errors
    /// The restorer has not granted the last request: the timeout may be any of those before.
    #[inline]
    pub(super) fn update(&mut self, readiness: BorrowedFd<'_>) -> io::Result<TimeoutChange> {
        if self.restorations != self.guard.restorations() {
            return Ok(self.apply_again());
        }
        if self.is_pending() { self.poll_request(readiness) } else { Ok(TimeoutChange::None) }
    }

    fn apply_again(&mut self) -> TimeoutChange {
        self.restorations = self.guard.restorations();
        // If the kernel refuses, softirqs poll the driver too.
        let _ = self.guard.apply();
        let timeout_ns = self.flush_timeout_ns.unwrap_or(self.polling_timeout_ns);
        self.write_flush_timeout(timeout_ns).unwrap_or(TimeoutChange::Made)
    }

    fn poll_request(&mut self, readiness: BorrowedFd<'_>) -> io::Result<TimeoutChange> {
        let Some(result) = self.guard.poll_request() else { return Ok(TimeoutChange::None) };
        if std::mem::take(&mut self.wakes_on_answer)
            && let Some(restorer) = self.guard.answer_fd()
        {
            epoll::delete(readiness, restorer)?;
        }
        if let Err(error) = result {
            self.flush_timeout_ns = None;
            return Err(error);
        }
        Ok(TimeoutChange::Made)
    }

    /// Makes the answer to a request wake a device that sleeps on this epoll instance. The device
    /// may otherwise sleep with the timeout of a busy one.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(super) fn prepare_sleep(&mut self, readiness: BorrowedFd<'_>) -> io::Result<()> {
        if self.wakes_on_answer || !self.is_pending() {
            return Ok(());
        }
        let Some(restorer) = self.guard.answer_fd() else { return Ok(()) };
        let data = epoll::EventData::new_u64(RESTORER_EVENT);
        epoll::add(readiness, restorer, data, epoll::EventFlags::IN)?;
        self.wakes_on_answer = true;
        Ok(())
    }

    /// Defers interrupts for a pause of `wait_ns` without polls, if the flush timeout is shorter.
    ///
    /// # Errors
    /// The kernel refuses; the driver is then polled by softirqs during the pause.
    pub(super) fn defer_for(&mut self, wait_ns: u64) -> io::Result<TimeoutChange> {
        // While frames were queued no polls were needed, so the last poll may be a while ago.
        let wait_ns = wait_ns.saturating_mul(2);
        if self.flush_timeout_ns.is_some_and(|timeout_ns| wait_ns <= timeout_ns) {
            return Ok(TimeoutChange::None);
        }
        self.write_flush_timeout(wait_ns.max(MIN_PAUSE_TIMEOUT_NS))
    }

    /// Sets a short flush timeout, after which softirqs poll the device.
    ///
    /// # Errors
    /// The kernel refuses; the RX ring may then overflow.
    pub(super) fn poll_in_softirq(&mut self, interval_ns: u64) -> io::Result<TimeoutChange> {
        self.set_flush_timeout(interval_ns)
    }

    /// Restores the flush timeout of normal polling.
    ///
    /// # Errors
    /// The kernel refuses; the wakeup of a sleeping owner is then late.
    pub(super) fn expect_polls(&mut self) -> io::Result<TimeoutChange> {
        self.set_flush_timeout(self.polling_timeout_ns)
    }

    /// Sets a flush timeout of 0: one interrupt for each frame, without deferral.
    ///
    /// # Errors
    /// The kernel refuses; the wakeup of a sleeping owner is then late.
    pub(super) fn interrupt_at_once(&mut self) -> io::Result<TimeoutChange> {
        self.set_flush_timeout(0)
    }

    fn set_flush_timeout(&mut self, flush_timeout_ns: u64) -> io::Result<TimeoutChange> {
        if self.flush_timeout_ns == Some(flush_timeout_ns) {
            return Ok(TimeoutChange::None);
        }
        self.write_flush_timeout(flush_timeout_ns)
    }

    fn write_flush_timeout(&mut self, flush_timeout_ns: u64) -> io::Result<TimeoutChange> {
        let progress = self.guard.write_flush_timeout(flush_timeout_ns)?;
        self.flush_timeout_ns = Some(flush_timeout_ns);
        Ok(match progress {
            Progress::Made => TimeoutChange::Made,
            Progress::Requested => TimeoutChange::Requested,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::netlink::{Interface, NetdevSocket};

    fn napis(interface_index: u32) -> io::Result<Vec<NapiSettings>> {
        let mut napis = NetdevSocket::open()?.napis(interface_index)?;
        napis.sort_by_key(|napi| napi.id);
        Ok(napis)
    }

    /// A veth of two queues, in a network namespace of the calling thread, and the settings of its
    /// NAPI instances. `None`, with the reason printed, where that cannot be.
    fn two_queues() -> Option<(TargetInterface, Vec<NapiSettings>)> {
        // SAFETY: only the network namespace of this thread changes.
        if let Err(error) = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
            tidegate_needs::skip("root", error);
            return None;
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
                tidegate_needs::skip("linux-6_13", format!("{other:?}"));
                return None;
            }
        };
        let target = TargetInterface {
            name: interface.name,
            index,
            mac,
            mtu: 1500,
            queues: vec![0, 1],
            active_queues: 2,
            napis: None,
            is_veth: true,
            has_local_peers: true,
        };
        Some((target, before))
    }

    #[test]
    fn settings_in_another_namespace_are_changed_by_netlink() {
        let Some((target, before)) = two_queues() else { return };
        let index = target.index;
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
        assert_eq!(
            deferral.defer_for(60_000).unwrap(),
            TimeoutChange::None,
            "the flush timeout is longer already"
        );
        assert_timeout(123_456);
        assert_eq!(deferral.defer_for(9_000_000).unwrap(), TimeoutChange::Made);
        assert_timeout(MIN_PAUSE_TIMEOUT_NS);
        assert_eq!(
            deferral.defer_for(10_000_000).unwrap(),
            TimeoutChange::None,
            "the timeout is set already"
        );
        assert_eq!(deferral.defer_for(50_000_000).unwrap(), TimeoutChange::Made);
        assert_timeout(100_000_000);
        for timeout_ns in [50_000, 200_000] {
            assert_eq!(deferral.poll_in_softirq(timeout_ns).unwrap(), TimeoutChange::Made);
            assert_timeout(timeout_ns);
            assert_eq!(deferral.poll_in_softirq(timeout_ns).unwrap(), TimeoutChange::None);
        }
        assert_eq!(deferral.expect_polls().unwrap(), TimeoutChange::Made);
        assert_timeout(123_456);
        assert_eq!(deferral.expect_polls().unwrap(), TimeoutChange::None);
        assert_eq!(deferral.interrupt_at_once().unwrap(), TimeoutChange::Made);
        assert_timeout(0);
        assert_eq!(deferral.interrupt_at_once().unwrap(), TimeoutChange::None);
        assert_eq!(
            deferral.defer_for(60_000).unwrap(),
            TimeoutChange::Made,
            "no interrupts during the pause"
        );
        assert_timeout(MIN_PAUSE_TIMEOUT_NS);
        assert_eq!(deferral.expect_polls().unwrap(), TimeoutChange::Made);
        assert_timeout(123_456);
        drop(deferral);
        assert_eq!(napis(index).unwrap(), before);
    }

    /// Answers the next request of a process without privileges; returns the request.
    fn grant(restorer: &mut UnixStream) -> u64 {
        let mut request = [0; 8];
        restorer.read_exact(&mut request).unwrap();
        restorer.write_all(&request).unwrap();
        u64::from_ne_bytes(request)
    }

    fn is_readable(fd: impl AsFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn each_core_changes_the_settings_of_its_own_queues() {
        let Some((target, before)) = two_queues() else { return };
        let index = target.index;
        let timeouts = || -> Vec<u64> {
            napis(index).unwrap().iter().map(|napi| napi.gro_flush_timeout_ns).collect()
        };
        let settings = BusyPoll { defer_irqs: 7, flush_timeout_ns: 123_456, ..BusyPoll::default() };
        let parts = target.share_out(3, true);
        let own: Vec<_> = parts.iter().map(|part| (&part.queues[..], part.napis.clone())).collect();
        let napis_of = |napi: &NapiSettings| Some(vec![napi.id]);
        assert_eq!(own, [(&[0][..], napis_of(&before[0])), (&[1], napis_of(&before[1]))]);
        let mut deferrals: Vec<_> =
            parts.iter().map(|part| IrqDeferral::set(part, &settings).unwrap()).collect();
        assert_eq!(timeouts(), [123_456; 2]);
        assert_eq!(deferrals[1].interrupt_at_once().unwrap(), TimeoutChange::Made);
        assert_eq!(timeouts(), [123_456, 0]);
        assert_eq!(deferrals[0].defer_for(50_000_000).unwrap(), TimeoutChange::Made);
        assert_eq!(timeouts(), [100_000_000, 0]);
        assert!(IrqDeferral::set(&parts[1], &settings).is_err(), "they are changed already");
        drop(deferrals.remove(0));
        let now = napis(index).unwrap();
        assert_eq!((now[0], now[1].defer_hard_irqs), (before[0], 7));
        drop(deferrals);
        assert_eq!(napis(index).unwrap(), before);
    }

    #[test]
    fn answer_of_the_restorer_wakes_a_sleeping_device() {
        use TimeoutChange::{Made, None, Requested};
        let settings = Settings::Deferral { defer_irqs: 7, flush_timeout_ns: 5 };
        let (guard, mut restorer) =
            SettingsGuard::of_unprivileged(tempfile::tempfile().unwrap(), settings);
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut deferral = IrqDeferral::new(guard, 5);
        let asleep = |deferral: &mut IrqDeferral| {
            deferral.prepare_sleep(readiness.as_fd()).unwrap();
            !is_readable(&readiness)
        };
        assert!(asleep(&mut deferral));
        for (timeout_ns, change) in [(0, Requested), (0, None)] {
            assert_eq!(deferral.set_flush_timeout(timeout_ns).unwrap(), change);
        }
        assert!(deferral.is_pending());
        assert_eq!(deferral.update(readiness.as_fd()).unwrap(), None);
        assert!(asleep(&mut deferral) && asleep(&mut deferral));
        assert_eq!(grant(&mut restorer), 0);
        assert!(is_readable(&readiness));
        assert_eq!(deferral.update(readiness.as_fd()).unwrap(), Made);
        assert!(!deferral.is_pending() && asleep(&mut deferral));
        assert_eq!(deferral.update(readiness.as_fd()).unwrap(), None);

        // A restorer that is gone wakes the device once, not again and again.
        assert_eq!(deferral.expect_polls().unwrap(), Requested);
        assert!(asleep(&mut deferral));
        drop(restorer);
        assert!(is_readable(&readiness));
        deferral.update(readiness.as_fd()).unwrap_err();
        assert!(asleep(&mut deferral));
        deferral.expect_polls().unwrap_err();
        assert!(!deferral.is_pending() && asleep(&mut deferral));
    }
}
