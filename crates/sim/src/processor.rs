//! Simulated processor: tasks at priority levels, and accounting of their CPU time.

use std::collections::VecDeque;

/// Priority level, highest first.
///
/// A task preempts tasks at lower levels. There is no preemption within a level, except among
/// applications, which share the processor fairly. The application with the least CPU time runs
/// first, and a woken application may preempt a running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PriorityLevel {
    /// Device interrupts.
    Device,
    /// Software interrupts.
    Software,
    /// Kernel threads.
    Kernel,
    /// Application processes.
    Application,
}

impl PriorityLevel {
    /// All levels, highest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Software, Self::Kernel, Self::Application];

    /// True if tasks at this level have a context of their own, which costs time to switch to.
    fn has_context(self) -> bool {
        self >= Self::Kernel
    }
}

/// Task handle: index in the task table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId(usize);

/// Result of [`Processor::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessorStep {
    /// The time limit is reached.
    LimitReached,
    /// The running task has no work: assign a piece by [`Processor::assign`], or put the task
    /// to sleep by [`Processor::block`].
    NeedsWork(TaskId),
    /// The task has finished its piece of work.
    Done(TaskId),
}

const APPLICATION: usize = PriorityLevel::Application as usize;

#[derive(Clone, Debug)]
struct Task {
    level: PriorityLevel,
    runnable: bool,
    /// Remaining time of the current piece of work.
    remaining_ns: Option<u64>,
    spent_ns: u64,
    /// Virtual run time of an application. On wake-up it is raised, so that the application gets no
    /// credit for its sleep.
    vruntime_ns: u64,
}

/// Simulated processor.
#[derive(Clone, Debug)]
pub struct Processor {
    now_ns: u64,
    tasks: Vec<Task>,
    /// Runnable tasks by level, in the order of their turns.
    queues: [VecDeque<TaskId>; 4],
    switch_ns: u64,
    quantum_ns: u64,
    /// Task whose context is loaded.
    loaded_context: Option<TaskId>,
    /// Remaining time of the context switch.
    switch_remaining_ns: u64,
    /// Task whose quantum is running, and the remaining quantum.
    quantum_owner: Option<TaskId>,
    quantum_remaining_ns: u64,
    /// Lower bound of the virtual run time of runnable applications.
    min_vruntime_ns: u64,
    level_spent_ns: [u64; 4],
    idle_ns: u64,
    context_switches: u64,
}

impl Processor {
    /// Creates a processor without tasks, at time 0.
    pub fn new(switch_ns: u64, quantum_ns: u64) -> Self {
        Self {
            now_ns: 0,
            tasks: Vec::new(),
            queues: Default::default(),
            switch_ns,
            quantum_ns,
            loaded_context: None,
            switch_remaining_ns: 0,
            quantum_owner: None,
            quantum_remaining_ns: quantum_ns,
            min_vruntime_ns: 0,
            level_spent_ns: [0; 4],
            idle_ns: 0,
            context_switches: 0,
        }
    }

    /// Adds a task, initially asleep.
    pub fn add(&mut self, level: PriorityLevel) -> TaskId {
        self.tasks.push(Task {
            level,
            runnable: false,
            remaining_ns: None,
            spent_ns: 0,
            vruntime_ns: 0,
        });
        TaskId(self.tasks.len() - 1)
    }

    /// Current virtual time.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// True if no task is runnable.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// True if the task is runnable.
    pub fn is_runnable(&self, id: TaskId) -> bool {
        self.tasks[id.0].runnable
    }

    /// CPU time of the task.
    pub fn spent_ns(&self, id: TaskId) -> u64 {
        self.tasks[id.0].spent_ns
    }

    /// CPU time at a level, context switches included.
    pub fn level_spent_ns(&self, level: PriorityLevel) -> u64 {
        self.level_spent_ns[level as usize]
    }

    /// Time in which no task was runnable.
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
    }

    /// Number of context switches.
    pub fn context_switches(&self) -> u64 {
        self.context_switches
    }

    /// Makes a task runnable. Does nothing if the task already is.
    #[inline]
    pub fn wake(&mut self, id: TaskId) {
        let task = &mut self.tasks[id.0];
        if task.runnable {
            return;
        }
        task.runnable = true;
        if task.level == PriorityLevel::Application {
            self.wake_application(id);
        } else {
            self.queues[task.level as usize].push_back(id);
        }
    }

    /// Wakes an application with a credit of at most one quantum. The application preempts the
    /// running application if that has clearly more virtual run time.
    fn wake_application(&mut self, id: TaskId) {
        let lowest_ns =
            self.queues[APPLICATION].iter().map(|other| self.tasks[other.0].vruntime_ns).min();
        self.min_vruntime_ns = self.min_vruntime_ns.max(lowest_ns.unwrap_or(0));
        let min_credit_ns = self.min_vruntime_ns.saturating_sub(self.quantum_ns);
        let vruntime_ns = self.tasks[id.0].vruntime_ns.max(min_credit_ns);
        self.tasks[id.0].vruntime_ns = vruntime_ns;
        let queue = &mut self.queues[APPLICATION];
        let first = queue.front().map(|first| self.tasks[first.0].vruntime_ns);
        if first.is_some_and(|first_ns| vruntime_ns + self.quantum_ns / 4 < first_ns) {
            queue.push_front(id);
        } else {
            queue.push_back(id);
        }
    }

    /// Puts a task to sleep.
    pub fn block(&mut self, id: TaskId) {
        let task = &mut self.tasks[id.0];
        if !std::mem::take(&mut task.runnable) {
            return;
        }
        let queue = &mut self.queues[task.level as usize];
        queue.retain(|&other| other != id);
        if task.level == PriorityLevel::Application && queue.is_empty() {
            self.min_vruntime_ns = self.min_vruntime_ns.max(task.vruntime_ns);
        }
    }

    /// Moves a task to another level, as the last in its order.
    pub fn set_level(&mut self, id: TaskId, level: PriorityLevel) {
        let runs = self.is_runnable(id);
        self.block(id);
        self.tasks[id.0].level = level;
        if runs {
            self.wake(id);
        }
    }

    /// Assigns a task a piece of work.
    #[inline]
    pub fn assign(&mut self, id: TaskId, ns: u64) {
        self.tasks[id.0].remaining_ns = Some(ns);
    }

    /// Runs until a task finishes its piece of work or needs one, or until `limit_ns`.
    pub fn step(&mut self, limit_ns: u64) -> ProcessorStep {
        loop {
            let Some(&id) = self.queues.iter().find_map(VecDeque::front) else {
                self.idle_ns += limit_ns.saturating_sub(self.now_ns);
                self.now_ns = self.now_ns.max(limit_ns);
                return ProcessorStep::LimitReached;
            };
            let level = self.tasks[id.0].level;
            if level.has_context() && self.loaded_context != Some(id) {
                self.loaded_context = Some(id);
                self.switch_remaining_ns = self.switch_ns;
                self.context_switches += 1;
            }
            // The quantum survives preemption. Otherwise the first task would stay first as long as
            // it is preempted often enough.
            if level == PriorityLevel::Application && self.quantum_owner != Some(id) {
                self.quantum_owner = Some(id);
                self.quantum_remaining_ns = self.quantum_ns;
            }
            if level.has_context() && self.switch_remaining_ns > 0 {
                let switch_ns = self.spend(id, self.switch_remaining_ns, limit_ns);
                self.switch_remaining_ns -= switch_ns;
                // An application that is preempted often pays for the context switches from its own
                // quantum.
                self.quantum_remaining_ns = self.quantum_remaining_ns.saturating_sub(switch_ns);
                if self.switch_remaining_ns > 0 {
                    return ProcessorStep::LimitReached;
                }
            }
            let Some(remaining_ns) = self.tasks[id.0].remaining_ns else {
                return ProcessorStep::NeedsWork(id);
            };
            let is_shared =
                level == PriorityLevel::Application && self.queues[level as usize].len() > 1;
            let max_ns =
                if is_shared { remaining_ns.min(self.quantum_remaining_ns) } else { remaining_ns };
            let spent_ns = self.spend(id, max_ns, limit_ns);
            if is_shared {
                self.quantum_remaining_ns -= spent_ns;
            }
            if spent_ns == remaining_ns {
                self.tasks[id.0].remaining_ns = None;
                self.rotate_if_expired(is_shared);
                return ProcessorStep::Done(id);
            }
            self.tasks[id.0].remaining_ns = Some(remaining_ns - spent_ns);
            if !self.rotate_if_expired(is_shared) {
                return ProcessorStep::LimitReached;
            }
        }
    }

    /// Passes the turn to the application with the least virtual run time if the quantum has
    /// expired. Returns true if it has.
    #[inline]
    fn rotate_if_expired(&mut self, is_shared: bool) -> bool {
        let expired = is_shared && self.quantum_remaining_ns == 0;
        if expired {
            let queue = &mut self.queues[APPLICATION];
            queue.rotate_left(1);
            let next = (0..queue.len()).min_by_key(|&at| self.tasks[queue[at].0].vruntime_ns);
            if let Some(next) = next.and_then(|at| queue.remove(at)) {
                queue.push_front(next);
            }
            self.quantum_remaining_ns = self.quantum_ns;
        }
        expired
    }

    /// Lets at most `ns` pass for a task; returns the time that passed.
    #[inline]
    fn spend(&mut self, id: TaskId, ns: u64, limit_ns: u64) -> u64 {
        let ns = ns.min(limit_ns.saturating_sub(self.now_ns));
        self.now_ns += ns;
        let task = &mut self.tasks[id.0];
        task.spent_ns += ns;
        self.level_spent_ns[task.level as usize] += ns;
        if task.level == PriorityLevel::Application {
            task.vruntime_ns += ns;
        }
        ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_level_preempts_and_lower_level_resumes() {
        let mut processor = Processor::new(0, 1000);
        let application = processor.add(PriorityLevel::Application);
        let interrupt = processor.add(PriorityLevel::Device);
        processor.wake(application);
        assert_eq!(processor.step(10), ProcessorStep::NeedsWork(application));
        processor.assign(application, 100);
        assert_eq!(processor.step(40), ProcessorStep::LimitReached);
        processor.wake(interrupt);
        assert_eq!(processor.step(1000), ProcessorStep::NeedsWork(interrupt));
        processor.assign(interrupt, 25);
        assert_eq!(processor.step(1000), ProcessorStep::Done(interrupt));
        assert_eq!(processor.now_ns(), 65);
        processor.block(interrupt);
        assert_eq!(processor.step(1000), ProcessorStep::Done(application));
        assert_eq!(processor.now_ns(), 125, "60 were left");
        assert_eq!(processor.level_spent_ns(PriorityLevel::Device), 25);
        assert_eq!(processor.spent_ns(application), 100);
    }

    #[test]
    fn serves_levels_in_priority_order() {
        let mut processor = Processor::new(0, 1000);
        let tasks: Vec<TaskId> =
            PriorityLevel::ALL.iter().rev().map(|&l| processor.add(l)).collect();
        for &task in &tasks {
            processor.wake(task);
            processor.assign(task, 10);
        }
        for &task in tasks.iter().rev() {
            assert_eq!(processor.step(u64::MAX), ProcessorStep::Done(task));
            processor.block(task);
        }
        assert!(processor.is_idle());
    }

    #[test]
    fn no_preemption_within_a_level() {
        let mut processor = Processor::new(0, 1000);
        let (a, b) =
            (processor.add(PriorityLevel::Software), processor.add(PriorityLevel::Software));
        processor.wake(a);
        processor.assign(a, 10_000);
        assert_eq!(processor.step(100), ProcessorStep::LimitReached);
        processor.wake(b);
        processor.assign(b, 10);
        assert_eq!(processor.step(20_000), ProcessorStep::Done(a));
    }

    #[test]
    fn applications_take_turns_by_the_quantum() {
        let mut processor = Processor::new(0, 100);
        let (a, b) =
            (processor.add(PriorityLevel::Application), processor.add(PriorityLevel::Application));
        for application in [a, b] {
            processor.wake(application);
            processor.assign(application, 1_000_000);
        }
        assert_eq!(processor.step(1000), ProcessorStep::LimitReached);
        assert_eq!((processor.spent_ns(a), processor.spent_ns(b)), (500, 500));
        processor.block(b);
        assert_eq!(processor.step(2000), ProcessorStep::LimitReached);
        assert_eq!(processor.spent_ns(a), 1500, "a single application needs no turns");
    }

    #[test]
    fn woken_application_runs_first_with_at_most_a_quantum_of_credit() {
        let mut processor = Processor::new(0, 100);
        let (hog, reader) =
            (processor.add(PriorityLevel::Application), processor.add(PriorityLevel::Application));
        processor.wake(hog);
        processor.assign(hog, 1_000_000);
        assert_eq!(processor.step(10_000), ProcessorStep::LimitReached);
        processor.wake(reader);
        processor.assign(reader, 30);
        assert_eq!(processor.step(20_000), ProcessorStep::Done(reader), "at once");
        assert_eq!(processor.now_ns(), 10_030);
        processor.assign(reader, 5000);
        assert_eq!(processor.step(12_000), ProcessorStep::LimitReached);
        let (had, rest) = (processor.spent_ns(reader), processor.spent_ns(hog) - 10_000);
        assert!((1000..=1100).contains(&had), "half and a quantum, not all: {had} of {rest}");
    }

    #[test]
    fn preemption_does_not_renew_the_quantum() {
        let mut processor = Processor::new(0, 100);
        let (a, b) =
            (processor.add(PriorityLevel::Application), processor.add(PriorityLevel::Application));
        let thread = processor.add(PriorityLevel::Kernel);
        for application in [a, b] {
            processor.wake(application);
            processor.assign(application, 1_000_000);
        }
        for round in 1..=20 {
            assert_eq!(processor.step(round * 60 - 10), ProcessorStep::LimitReached);
            processor.wake(thread);
            processor.assign(thread, 10);
            assert_eq!(processor.step(round * 60), ProcessorStep::Done(thread));
            processor.block(thread);
        }
        assert_eq!((processor.spent_ns(a), processor.spent_ns(b)), (500, 500));
    }

    #[test]
    fn context_switch_costs_time_and_an_interrupt_needs_none() {
        let mut processor = Processor::new(7, 100);
        let (a, b) =
            (processor.add(PriorityLevel::Kernel), processor.add(PriorityLevel::Application));
        let interrupt = processor.add(PriorityLevel::Device);
        processor.wake(b);
        processor.assign(b, 50);
        assert_eq!(processor.step(3), ProcessorStep::LimitReached, "in the middle of the switch");
        processor.wake(interrupt);
        processor.assign(interrupt, 5);
        assert_eq!(processor.step(100), ProcessorStep::Done(interrupt));
        processor.block(interrupt);
        assert_eq!(processor.step(22), ProcessorStep::LimitReached);
        processor.wake(a);
        processor.assign(a, 10);
        assert_eq!(processor.step(1000), ProcessorStep::Done(a));
        processor.block(a);
        assert_eq!(processor.step(1000), ProcessorStep::Done(b));
        assert_eq!(processor.context_switches(), 3);
        assert_eq!(processor.now_ns(), 7 + 5 + 50 + 7 + 10 + 7);
        assert_eq!(processor.level_spent_ns(PriorityLevel::Application), 50 + 14);
    }

    #[test]
    fn counts_time_without_work_as_idle() {
        let mut processor = Processor::new(0, 100);
        assert_eq!(processor.step(500), ProcessorStep::LimitReached);
        assert_eq!((processor.idle_ns(), processor.now_ns()), (500, 500));
    }
}
