//! Threads that drive the engine, for the modes that socket calls cannot drive.
//!
//! A receive thread and a protocol thread have the priorities of 4.2BSD's interrupt levels. A
//! polling thread has the priority of a soft interrupt, of an application, or both in turn.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_engine::{IdleStep, Priority, StepResult};
use tidegate_gate::{InterruptAction, Mode};
use tidegate_memory::Doorbell;

use super::reader_groups::ReaderGroups;
use super::stack::EmbeddedStack;
use crate::types::sleeper;

/// Most frames of protocol work per lock, before other threads may take the engine.
const PROTOCOL_BURST_FRAMES: usize = 16;

/// Threads of one stack. They stop when this is dropped.
pub(crate) struct Threads {
    control: Arc<Control>,
    handles: Vec<JoinHandle<()>>,
}

struct Control {
    stop: AtomicBool,
    /// Rung to stop the thread that receives or polls.
    receive: Arc<Doorbell>,
    /// Rung when the input queue has frames for protocol work.
    protocol: Arc<Doorbell>,
}

/// Starts the threads that a mode needs.
///
/// # Errors
/// When the process may not start more threads, or none of real-time priority.
pub(crate) fn start(shared: &Arc<EmbeddedStack>, mode: Mode) -> io::Result<Threads> {
    let control = Arc::new(Control {
        stop: AtomicBool::new(false),
        receive: Arc::new(Doorbell::new()?),
        protocol: Arc::new(Doorbell::new()?),
    });
    // The thread that does protocol work also serves the readers.
    let doorbell = match mode {
        Mode::Interrupt | Mode::Moderated => &control.protocol,
        Mode::Napi | Mode::Polled | Mode::Dedicated => &control.receive,
    };
    shared.lock().reader_groups = ReaderGroups::new(Some(Arc::clone(doorbell)));
    let mut threads = Threads { control, handles: Vec::new() };
    match mode {
        Mode::Interrupt | Mode::Moderated => {
            threads.spawn("receive", Priority::Interrupt, shared, Control::receive)?;
            threads.spawn("protocol", Priority::Protocol, shared, Control::protocol)?;
        }
        Mode::Napi => threads.spawn("napi", Priority::Interrupt, shared, Control::napi)?,
        Mode::Polled | Mode::Dedicated => {
            threads.spawn("network", Priority::Application, shared, Control::run_polled)?;
        }
    }
    Ok(threads)
}

impl Threads {
    fn spawn(
        &mut self,
        name: &str,
        priority: Priority,
        shared: &Arc<EmbeddedStack>,
        work: fn(&Control, &EmbeddedStack) -> io::Result<()>,
    ) -> io::Result<()> {
        let (shared, control) = (Arc::clone(shared), Arc::clone(&self.control));
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let priority_set = priority.apply();
            let may_run = priority_set.is_ok();
            // `spawn` waits for the result.
            let _ = ready.send(priority_set);
            if !may_run {
                return;
            }
            if let Err(error) = work(&control, &shared) {
                shared.lock().fail(error);
            }
        })?;
        self.handles.push(thread);
        started.recv().unwrap_or_else(|_| Err(io::Error::other("the thread did not start")))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::Release);
        self.control.receive.ring();
        self.control.protocol.ring();
        for thread in self.handles.drain(..) {
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
    }
}

impl Control {
    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits for the device's interrupt: until its descriptor is readable.
    fn wait_for_interrupt(&self, shared: &EmbeddedStack) -> io::Result<()> {
        self.receive.arm();
        let has_work = shared.lock().engine.prepare_sleep()?.is_none() || self.is_stopping();
        let slept = if has_work {
            Ok(())
        } else {
            sleeper::sleep(shared.wake_fds.device.as_ref().map(AsFd::as_fd), &self.receive, None)
        };
        self.receive.disarm();
        slept
    }

    /// Like [`Control::wait_for_interrupt`], but also for the stack's timers and neighbour
    /// events.
    fn wait_for_work(&self, shared: &EmbeddedStack) -> io::Result<()> {
        self.receive.arm();
        let core = shared.lock();
        let slept =
            if self.is_stopping() { Ok(()) } else { shared.sleep(core, &self.receive, None) };
        self.receive.disarm();
        slept
    }

    /// Receive thread of modes `interrupt` and `moderated`.
    fn receive(&self, shared: &EmbeddedStack) -> io::Result<()> {
        while !self.is_stopping() {
            self.wait_for_interrupt(shared)?;
            let mut core = shared.lock();
            let now_ns = core.engine.read_clock();
            let next_ns = core.engine.gate().next_interrupt_ns(now_ns);
            if next_ns > now_ns {
                drop(core);
                std::thread::sleep(Duration::from_nanos(next_ns - now_ns));
                core = shared.lock();
            }
            let now_ns = core.engine.read_clock();
            if let InterruptAction::Take { limit } = core.engine.gate().on_interrupt(now_ns, 0) {
                core.engine.receive_to_input_queue(limit)?;
            }
            drop(core);
            self.protocol.ring();
        }
        Ok(())
    }

    /// Protocol thread of modes `interrupt` and `moderated`.
    fn protocol(&self, shared: &EmbeddedStack) -> io::Result<()> {
        while !self.is_stopping() {
            self.protocol.arm();
            let mut core = shared.lock();
            let remaining = core.engine.process_input_queue(PROTOCOL_BURST_FRAMES)?;
            core.dispatch_events()?;
            let timeout_ns = core.engine.timeout_ns();
            core.enter_sleep(&self.protocol, timeout_ns);
            drop(core);
            if remaining == 0 && !self.is_stopping() {
                let neighbours = shared.wake_fds.neighbours.as_ref().map(AsFd::as_fd);
                let timeout = timeout_ns.map(Duration::from_nanos);
                sleeper::sleep(neighbours, &self.protocol, timeout)?;
            }
            shared.lock().leave_sleep(&self.protocol);
            self.protocol.disarm();
        }
        Ok(())
    }

    /// Mode `napi`: rounds at interrupt priority. Remaining work continues at application
    /// priority, as in the kernel's `ksoftirqd`. A process that has given up its capabilities
    /// meanwhile stays there.
    fn napi(&self, shared: &EmbeddedStack) -> io::Result<()> {
        let mut is_low_priority = false;
        while !self.is_stopping() {
            self.wait_for_work(shared)?;
            shared.lock().engine.on_interrupt();
            while !self.is_stopping() {
                let mut core = shared.lock();
                core.engine.read_clock();
                let stepped = core.engine.step()?;
                core.engine.serve_timers()?;
                core.dispatch_events()?;
                drop(core);
                match stepped {
                    StepResult::Served(_) | StepResult::Application(_) => {}
                    StepResult::Wait => break,
                    StepResult::Yield if is_low_priority => std::thread::yield_now(),
                    StepResult::Yield => {
                        Priority::Application.apply()?;
                        is_low_priority = true;
                    }
                }
            }
            if is_low_priority {
                is_low_priority = match Priority::Interrupt.apply() {
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => true,
                    applied => applied.map(|()| false)?,
                };
            }
        }
        Ok(())
    }

    /// Modes `polled` and `dedicated` on a dedicated thread.
    fn run_polled(&self, shared: &EmbeddedStack) -> io::Result<()> {
        shared.lock().reports_queue_levels = true;
        while !self.is_stopping() {
            let mut core = shared.lock();
            // Before the round: the gate would otherwise pause receiving once more for a queue
            // that has space again.
            core.report_queue_levels();
            core.run()?;
            match core.engine.idle_step() {
                IdleStep::Spin => {
                    drop(core);
                    shared.hand_over_lock();
                }
                IdleStep::Pause => {
                    drop(core);
                    shared.pause();
                }
                IdleStep::Sleep => {
                    drop(core);
                    self.wait_for_work(shared)?;
                }
            }
        }
        Ok(())
    }
}
