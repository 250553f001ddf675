//! SIGHUP: a running server reads its configuration again.
//!
//! A reload first checks everything and then applies it. When any part has an error, the server
//! goes on as before and says why.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::io::Errno;
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::{Handle, Signals};
use tidegate::gate::Settings;
use tidegate::host::PacketClasses;
use tidegate_gate::admission::Admission;

use crate::Failure;
use crate::background::BackgroundThread;
use crate::config::{self, ConfigChanges};
use crate::controllable::Controllable;
use crate::gate::GateOptions;
use crate::host::HostOptions;
use crate::sandbox::Sandbox;
use crate::service_manager;

/// Change that was checked: applies it, and returns what is in force now.
pub(crate) type CheckedChange = Box<dyn FnOnce() -> Result<String, Failure>>;

/// Part of a server that can be reloaded: reads and checks its configuration.
pub(crate) type ReloadPart = Box<dyn FnMut() -> Result<CheckedChange, Failure> + Send>;

/// SIGHUP, which does not end this process any more: it is kept for the thread that reloads.
///
/// A server registers it before it pins itself to a processor and raises its priority: loading
/// zones is not to take time from the processor that serves.
pub(crate) struct ReloadSignal {
    signals: Signals,
    background: BackgroundThread,
    sandbox: Sandbox,
}

impl ReloadSignal {
    /// Registers the signal, and keeps the scheduling of the calling thread for the thread that
    /// reloads.
    pub(crate) fn register(sandbox: Sandbox) -> io::Result<Self> {
        Ok(Self {
            signals: Signals::new([SIGHUP])?,
            background: BackgroundThread::like_this_thread()?,
            sandbox,
        })
    }

    /// Scheduling of threads beside the server.
    pub(crate) fn background(&self) -> BackgroundThread {
        self.background.clone()
    }

    /// Starts the thread, with the privileges of the calling thread.
    pub(crate) fn start_thread(self) -> io::Result<ReloadThread> {
        let Self { mut signals, background, sandbox } = self;
        let handle = signals.handle();
        let (parts, received) = channel::<Vec<ReloadPart>>();
        let thread = std::thread::Builder::new().name("reload".to_owned()).spawn(move || {
            background.apply();
            let Ok(mut parts) = received.recv() else { return };
            for _ in signals.forever() {
                service_manager::notify_reloading();
                match reload(&mut parts) {
                    Ok(report) => tracing::info!("reloaded: {report}"),
                    Err(error) => {
                        let error = error.to_string();
                        let denied = io::Error::from(Errno::ACCESS).to_string();
                        let advice = match error.contains(&denied) {
                            true => sandbox.file_advice(),
                            false => String::new(),
                        };
                        tracing::error!("not reloaded, all stays as it was: {error}{advice}");
                    }
                }
                service_manager::notify_ready();
            }
        })?;
        Ok(ReloadThread { handle, parts, thread: Some(thread) })
    }
}

/// Thread that reloads on SIGHUP. Dropping it ends the thread.
///
/// A server starts it when it has dropped its privileges.
pub(crate) struct ReloadThread {
    handle: Handle,
    parts: Sender<Vec<ReloadPart>>,
    thread: Option<JoinHandle<()>>,
}

impl ReloadThread {
    /// Reloads these parts, in this order, at each SIGHUP from now on.
    pub(crate) fn serve(&self, parts: Vec<ReloadPart>) {
        // The thread receives once; it ends only when this value is dropped.
        let _ = self.parts.send(parts);
    }
}

impl Drop for ReloadThread {
    fn drop(&mut self) {
        self.handle.close();
        // A thread that still waits for its parts gets none.
        self.serve(Vec::new());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Checks all parts, then applies all.
fn reload(parts: &mut [ReloadPart]) -> Result<String, Failure> {
    let checked = parts.iter_mut().map(|part| part()).collect::<Result<Vec<_>, _>>()?;
    let reports = checked.into_iter().map(|apply| apply()).collect::<Result<Vec<_>, _>>()?;
    Ok(reports.into_iter().filter(|report| !report.is_empty()).collect::<Vec<_>>().join("; "))
}

/// Receive scheduling and admission of a running server, as its flags and its configuration file
/// say.
#[derive(Clone)]
pub(crate) struct NetSettings {
    pub(crate) config: Option<PathBuf>,
    pub(crate) host_flags: HostOptions,
    pub(crate) gate_flags: GateOptions,
    pub(crate) admission_flag: bool,
}

impl NetSettings {
    /// Returns the part that reloads these settings of `server`, and names what has changed in the
    /// file.
    pub(crate) fn into_part(
        self,
        server: impl Controllable + Clone,
    ) -> Result<ReloadPart, Failure> {
        let host_at_start = self.host()?;
        let in_force = Arc::new(Mutex::new(self.classes()?));
        let changes = self.config.as_deref().map(ConfigChanges::since_now).transpose()?;
        Ok(Box::new(move || {
            let gate = config::merge_file(self.gate_flags.clone(), self.config.as_deref())?;
            let change = NetChange {
                settings: gate.settings()?,
                classes: self.classes()?,
                host_differs: self.host()? != host_at_start,
            };
            change.check(&server.gate(None)?.settings)?;
            let (server, in_force) = (server.clone(), Arc::clone(&in_force));
            let named = changes.as_ref().map(ConfigChanges::read).transpose()?;
            Ok(Box::new(move || {
                let applied = change.apply(&server, &in_force)?;
                let named = named.map_or_else(String::new, |named| named());
                let said = [applied, named].into_iter().filter(|text| !text.is_empty());
                Ok(said.collect::<Vec<_>>().join("; "))
            }))
        }))
    }

    /// Admission classes and transmit classes, if any.
    fn classes(&self) -> Result<PacketClasses, Failure> {
        config::packet_classes(self.admission_flag, self.config.as_deref())
    }

    /// Options of section `[host]`, in a form that can be compared.
    fn host(&self) -> Result<serde_json::Value, Failure> {
        let host = config::merge_file(self.host_flags.clone(), self.config.as_deref())?;
        Ok(serde_json::to_value(host)?)
    }
}

/// New settings of receive scheduling and admission.
struct NetChange {
    settings: Settings,
    classes: PacketClasses,
    host_differs: bool,
}

impl NetChange {
    fn check(&self, in_force: &Settings) -> Result<(), Failure> {
        let (mode, old_mode) = (self.settings.config().mode, in_force.config().mode);
        if mode != old_mode {
            let (mode, old_mode) = (mode.name(), old_mode.name());
            return Err(format!(
                "the mode is {mode} now, and {old_mode} is in force: restart the server to change it"
            )
            .into());
        }
        if let Some(classes) = &self.classes.admission {
            Admission::new(classes, [0; 16])?;
        }
        Ok(())
    }

    /// Applies the settings. Classes are left alone unless they have changed, so that known sources
    /// stay known.
    fn apply(
        self,
        server: &impl Controllable,
        classes_in_force: &Mutex<PacketClasses>,
    ) -> Result<String, Failure> {
        let mut report = vec![];
        if *self.settings.config() != *server.gate(None)?.settings.config() {
            server.gate(Some(&self.settings))?;
            report.push("receive scheduling changed");
        }
        let mut in_force = classes_in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let PacketClasses { admission, transmit } = self.classes;
        match admission {
            classes if classes == in_force.admission => {}
            Some(classes) => {
                server.set_admission(&classes)?;
                in_force.admission = Some(classes);
                report.push("admission classes changed");
            }
            None => report.push("admission stays on until the server is restarted"),
        }
        match transmit {
            classes if classes == in_force.transmit => {}
            Some(classes) => {
                server.set_transmit_classes(&classes)?;
                in_force.transmit = Some(classes);
                report.push("transmit classes changed");
            }
            None => report.push("transmit classes stay on until the server is restarted"),
        }
        if self.host_differs {
            report.push("section [host] has changed: restart the server to apply it");
        }
        Ok(report.join("; "))
    }
}
