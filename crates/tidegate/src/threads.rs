//! Threads that run the engine, for the modes that programs' own calls cannot.
//!
//! A thread for receive work and one for protocol work have the priorities of
//! 4.2BSD's interrupt levels; one that polls has that of a soft interrupt, of a
//! program, or both in turn.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_engine::{Priority, Step, Stepped};
use tidegate_gate::{Interrupt, Mode};
use tidegate_memory::Doorbell;

use crate::net::Shared;
use crate::readers::group::Groups;
use crate::wait;

/// The most frames that protocol work takes before others may have the engine.
const PROTOCOL_BURST: usize = 16;

/// The threads of one stack. They end when this is dropped.
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
/// When there may be no more threads, or none of real-time priority.
pub(crate) fn start(shared: &Arc<Shared>, mode: Mode) -> io::Result<Threads> {
    let control = Arc::new(Control {
        stop: AtomicBool::new(false),
        receive: Arc::new(Doorbell::new()?),
        protocol: Arc::new(Doorbell::new()?),
    });
    // Who serves the readers is who does protocol work.
    let server = match mode {
        Mode::Interrupt | Mode::Moderated => &control.protocol,
        Mode::Napi | Mode::Polled | Mode::Dedicated => &control.receive,
    };
    shared.lock().groups = Groups::new(Some(Arc::clone(server)));
    let mut threads = Threads { control, handles: Vec::new() };
    match mode {
        Mode::Interrupt | Mode::Moderated => {
            threads.spawn("receive", Priority::Interrupt, shared, Control::receive)?;
            threads.spawn("protocol", Priority::Protocol, shared, Control::protocol)?;
        }
        Mode::Napi => threads.spawn("napi", Priority::Interrupt, shared, Control::napi)?,
        Mode::Polled | Mode::Dedicated => {
            threads.spawn("network", Priority::Program, shared, Control::polled)?;
        }
    }
    Ok(threads)
}

impl Threads {
    fn spawn(
        &mut self,
        name: &str,
        priority: Priority,
        shared: &Arc<Shared>,
        work: fn(&Control, &Shared) -> io::Result<()>,
    ) -> io::Result<()> {
        let (shared, control) = (Arc::clone(shared), Arc::clone(&self.control));
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let taken = priority.take();
            let may_run = taken.is_ok();
            // The receiver waits for it.
            let _ = ready.send(taken);
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
            // One that panicked has ended as well.
            let _ = thread.join();
        }
    }
}

impl Control {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits for the interrupt of the card: for its descriptor to be readable.
    fn wait_for_interrupt(&self, shared: &Shared) -> io::Result<()> {
        self.receive.arm();
        let work = shared.lock().engine.prepare_sleep()?.is_none() || self.stops();
        let slept = if work {
            Ok(())
        } else {
            wait::sleep(shared.wake_fds.port.as_ref().map(AsFd::as_fd), &self.receive, None)
        };
        self.receive.disarm();
        slept
    }

    /// As [`Control::wait_for_interrupt`], or for the timers or neighbours of
    /// the stack.
    fn wait_for_work(&self, shared: &Shared) -> io::Result<()> {
        self.receive.arm();
        let core = shared.lock();
        let slept = if self.stops() { Ok(()) } else { shared.sleep(core, &self.receive, None) };
        self.receive.disarm();
        slept
    }

    /// The upper half of modes `interrupt` and `moderated`.
    fn receive(&self, shared: &Shared) -> io::Result<()> {
        while !self.stops() {
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
            if let Interrupt::Take { limit } = core.engine.gate().on_interrupt(now_ns, 0) {
                core.engine.take_in(limit)?;
            }
            drop(core);
            self.protocol.ring();
        }
        Ok(())
    }

    /// The lower half of modes `interrupt` and `moderated`.
    fn protocol(&self, shared: &Shared) -> io::Result<()> {
        while !self.stops() {
            self.protocol.arm();
            let mut core = shared.lock();
            let left = core.engine.process_input(PROTOCOL_BURST)?;
            core.tell()?;
            let timeout_ns = core.engine.timeout_ns();
            core.enter_sleep(&self.protocol, timeout_ns);
            drop(core);
            if left == 0 && !self.stops() {
                let neighbours = shared.wake_fds.neighbours.as_ref().map(AsFd::as_fd);
                let timeout = timeout_ns.map(Duration::from_nanos);
                wait::sleep(neighbours, &self.protocol, timeout)?;
            }
            shared.lock().leave_sleep(&self.protocol);
            self.protocol.disarm();
        }
        Ok(())
    }

    /// Mode `napi`: rounds at interrupt priority; what is left after one goes
    /// on at that of a program, as in the kernel's `ksoftirqd`.
    fn napi(&self, shared: &Shared) -> io::Result<()> {
        while !self.stops() {
            self.wait_for_work(shared)?;
            let mut deferred = false;
            shared.lock().engine.on_interrupt();
            while !self.stops() {
                let mut core = shared.lock();
                core.engine.read_clock();
                let stepped = core.engine.step()?;
                core.engine.serve_timers()?;
                core.tell()?;
                drop(core);
                match stepped {
                    Stepped::Served(_) | Stepped::Application(_) => {}
                    Stepped::Wait => break,
                    Stepped::Yield if deferred => std::thread::yield_now(),
                    Stepped::Yield => {
                        Priority::Program.take()?;
                        deferred = true;
                    }
                }
            }
            if deferred {
                Priority::Interrupt.take()?;
            }
        }
        Ok(())
    }

    /// Modes `polled` and `dedicated` on a thread of their own.
    fn polled(&self, shared: &Shared) -> io::Result<()> {
        shared.lock().tells_levels = true;
        while !self.stops() {
            let mut core = shared.lock();
            // Before the round: who was woken because a queue has room again
            // would otherwise hold back once more.
            core.tell_levels();
            core.run()?;
            match core.engine.idle_step() {
                Step::Spin => {}
                Step::Pause => {
                    drop(core);
                    shared.pause();
                }
                Step::Sleep => {
                    drop(core);
                    self.wait_for_work(shared)?;
                }
            }
        }
        Ok(())
    }
}
