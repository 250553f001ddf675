//! Changes to a running daemon.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tidegate_engine::capture::{CaptureRequest, CaptureTap};
use tidegate_gate::{Settings, admission, transmit};
use tidegate_stack::OwnAddresses;
use tidegate_wire::{DropCounters, Medium};

use super::core::cores::Cores;
use super::core::message::CoreMessage;
use super::report::{DaemonReport, GateState};

/// Interval at which [`Controls::wait_for_addresses`] looks at the addresses.
const ADDRESS_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Control handle of a running daemon. It can be cloned and sent to other threads.
#[derive(Clone)]
pub struct Controls {
    pub(super) cores: Arc<Cores>,
}

impl Controls {
    /// Applies receive-scheduling settings to all cores, if given. Returns the settings in force
    /// and the counters of all cores together.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode; another kind when a core has ended.
    pub fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        let ended = || io::Error::other("the network core has ended");
        let ask = |core| {
            let (answer, answered) = mpsc::channel();
            self.cores.inbox(core).send(CoreMessage::Gate(settings.cloned(), answer))?;
            answered.recv().map_err(|_| ended())?
        };
        let mut states = (0..self.cores.count()).map(ask);
        let first: io::Result<GateState> = states.next().unwrap_or_else(|| Err(ended()));
        states.try_fold(first?, |mut all, core| {
            all.add(&core?);
            Ok(all)
        })
    }

    /// Enables admission control, or replaces its configuration. Sources have to become known
    /// again.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an invalid configuration; another kind when the device
    /// rejects it or the core has ended.
    pub fn set_admission(&self, config: &admission::Config) -> io::Result<()> {
        let (answer, answered) = mpsc::channel();
        // The first core leads the admission of all.
        self.cores.inbox(0).send(CoreMessage::Admission(Box::new(config.clone()), answer))?;
        answered.recv().map_err(|_| io::Error::other("the network core has ended"))?
    }

    /// Sends by transmit classes from now on, or by others. Each core gets its part of all ceilings.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an invalid configuration; another kind when a core has ended.
    pub fn set_transmit_classes(&self, config: &transmit::Config) -> io::Result<()> {
        let count = self.cores.count();
        let config = config.clone().divided(count);
        (0..count).try_for_each(|core| {
            let (answer, answered) = mpsc::channel();
            let message = CoreMessage::TransmitClasses(Box::new(config.clone()), answer);
            self.cores.inbox(core).send(message)?;
            answered.recv().map_err(|_| io::Error::other("the network core has ended"))?
        })
    }

    /// Drops of all cores, at the device and in the stacks.
    ///
    /// # Errors
    /// When a core has ended.
    pub fn drops(&self) -> io::Result<DropCounters> {
        let mut drops = DropCounters::new();
        for core in 0..self.cores.count() {
            let (answer, answered) = mpsc::channel();
            self.cores.inbox(core).send(CoreMessage::Drops(answer))?;
            let ended = |_| io::Error::other("the network core has ended");
            drops.merge(&answered.recv().map_err(ended)?);
        }
        Ok(drops)
    }

    /// Number of network cores.
    pub fn core_count(&self) -> usize {
        self.cores.count()
    }

    /// Report of the daemon, with the applications of all users.
    ///
    /// # Errors
    /// When a core has ended.
    pub fn report(&self) -> io::Result<DaemonReport> {
        let count = self.cores.count();
        let reports = (0..count).map(|core| Ok(self.cores.inbox(core).report()?.report));
        Ok(DaemonReport::merge(reports.collect::<io::Result<_>>()?, count))
    }

    /// Medium of the device.
    ///
    /// # Errors
    /// When the core has ended.
    pub fn medium(&self) -> io::Result<Medium> {
        let (answer, answered) = mpsc::channel();
        self.cores.inbox(0).send(CoreMessage::Medium(answer))?;
        answered.recv().map_err(|_| io::Error::other("the network core has ended"))
    }

    /// Begins a capture on all cores. After an error it runs on some.
    ///
    /// # Errors
    /// When a core has ended, the memory is too small, or too many captures run.
    pub fn start_capture(&self, request: &CaptureRequest) -> io::Result<()> {
        (0..self.cores.count()).try_for_each(|core| {
            let tap = Box::new(CaptureTap::new(request, core)?);
            let (answer, answered) = mpsc::channel();
            self.cores.inbox(core).send(CoreMessage::StartCapture(tap, answer))?;
            answered.recv().map_err(|_| io::Error::other("the network core has ended"))?
        })
    }

    /// Ends capture `number` on all cores. The caller holds the memory meanwhile: no core unmaps
    /// it.
    pub fn end_capture(&self, number: u64) {
        for core in 0..self.cores.count() {
            let (answer, answered) = mpsc::channel();
            // A core that has ended captures nothing.
            if self.cores.inbox(core).send(CoreMessage::EndCapture(number, answer)).is_ok() {
                let _ = answered.recv();
            }
        }
    }

    /// Waits until the own addresses are known to be unique.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another host has claimed one of them; another kind when
    /// the core has ended.
    pub fn wait_for_addresses(&self) -> io::Result<()> {
        loop {
            let (answer, answered) = mpsc::channel();
            // The first core receives what belongs to no flow.
            self.cores.inbox(0).send(CoreMessage::OwnAddresses(answer))?;
            let ended = |_| io::Error::other("the network core has ended");
            match answered.recv().map_err(ended)? {
                OwnAddresses::Unique => return Ok(()),
                OwnAddresses::Taken(conflict) => return Err(conflict.into()),
                OwnAddresses::Probing => thread::sleep(ADDRESS_CHECK_INTERVAL),
            }
        }
    }

    /// Moves a whole process to another core: it may have attached once for each core.
    ///
    /// # Errors
    /// As [`Controls::move_application`].
    pub fn move_process(&self, pid: u32, core: usize) -> io::Result<()> {
        (0..self.cores.count()).try_for_each(|_| self.move_application(pid, core))
    }

    /// Moves one application of a process on each core to another core, with the applications
    /// that share sockets or ports with it. An application that is there already, or a process
    /// that is not attached, is no error.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when there is no such core; another kind when a core has ended.
    pub fn move_application(&self, pid: u32, core: usize) -> io::Result<()> {
        let count = self.cores.count();
        if core >= count {
            let what = format!("there is no network core {core}: choose from 0 to {}", count - 1);
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        (0..count).try_for_each(|from| {
            self.cores.inbox(from).send(CoreMessage::MigrateProcess { pid, to: core })
        })
    }
}
