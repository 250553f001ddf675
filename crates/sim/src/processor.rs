//! A processor: tasks at levels of priority, and what they spend.

use std::collections::VecDeque;

/// A level of priority, highest first. A task at a higher level preempts those
/// below it. Within a level there is no preemption, but programs share the
/// processor fairly: who had least of it comes first, and one that slept may
/// preempt one that did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Interrupts of devices.
    Device,
    /// Software interrupts.
    Software,
    /// Threads of the kernel.
    Kernel,
    /// Programs.
    Program,
}

impl Level {
    /// Every level, highest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Software, Self::Kernel, Self::Program];

    /// Whether a task at this level has a context of its own, that is changed
    /// to at a cost.
    fn has_context(self) -> bool {
        self >= Self::Kernel
    }
}

/// The name of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId(usize);

/// How far [`Processor::step`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The time that was set as a limit has come.
    Limit,
    /// This task has the processor and nothing to do: give it a piece of work
    /// by [`Processor::give`], or take it away by [`Processor::block`].
    Wants(TaskId),
    /// This task finished its piece of work.
    Done(TaskId),
}

const PROGRAM: usize = Level::Program as usize;

#[derive(Clone, Debug)]
struct Task {
    level: Level,
    runnable: bool,
    /// What is left of its piece of work.
    left_ns: Option<u64>,
    spent_ns: u64,
    /// What a program had of the processor; who has slept is not owed all of
    /// the time since.
    fair_ns: u64,
}

/// One processor.
#[derive(Clone, Debug)]
pub struct Processor {
    now_ns: u64,
    tasks: Vec<Task>,
    /// Those that can run, by level, in the order of their turns.
    queues: [VecDeque<TaskId>; 4],
    switch_ns: u64,
    quantum_ns: u64,
    /// Whose context is loaded.
    loaded: Option<TaskId>,
    /// What is left of loading it.
    switch_left_ns: u64,
    /// Whose quantum is running, and what is left of it.
    quantum_of: Option<TaskId>,
    quantum_left_ns: u64,
    /// What every program that can run had at least.
    fair_floor_ns: u64,
    level_spent_ns: [u64; 4],
    idle_ns: u64,
    switches: u64,
}

impl Processor {
    /// A processor without tasks, at time 0.
    pub fn new(switch_ns: u64, quantum_ns: u64) -> Self {
        Self {
            now_ns: 0,
            tasks: Vec::new(),
            queues: Default::default(),
            switch_ns,
            quantum_ns,
            loaded: None,
            switch_left_ns: 0,
            quantum_of: None,
            quantum_left_ns: quantum_ns,
            fair_floor_ns: 0,
            level_spent_ns: [0; 4],
            idle_ns: 0,
            switches: 0,
        }
    }

    /// Adds a task, which sleeps.
    pub fn add(&mut self, level: Level) -> TaskId {
        self.tasks.push(Task { level, runnable: false, left_ns: None, spent_ns: 0, fair_ns: 0 });
        TaskId(self.tasks.len() - 1)
    }

    /// The time.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Whether no task can run.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Whether the task can run.
    pub fn is_runnable(&self, id: TaskId) -> bool {
        self.tasks[id.0].runnable
    }

    /// What the task has spent.
    pub fn spent_ns(&self, id: TaskId) -> u64 {
        self.tasks[id.0].spent_ns
    }

    /// What was spent at a level, changes of context included.
    pub fn level_spent_ns(&self, level: Level) -> u64 {
        self.level_spent_ns[level as usize]
    }

    /// The time in which nothing could run.
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
    }

    /// How often the context was changed.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Lets a task run. Does nothing if it can run already.
    #[inline]
    pub fn wake(&mut self, id: TaskId) {
        let task = &mut self.tasks[id.0];
        if task.runnable {
            return;
        }
        task.runnable = true;
        if task.level == Level::Program {
            self.wake_program(id);
        } else {
            self.queues[task.level as usize].push_back(id);
        }
    }

    /// A program that slept is owed one quantum at most; it preempts one that
    /// had clearly more of the processor.
    fn wake_program(&mut self, id: TaskId) {
        let least = self.queues[PROGRAM].iter().map(|other| self.tasks[other.0].fair_ns).min();
        self.fair_floor_ns = self.fair_floor_ns.max(least.unwrap_or(0));
        let owed_from_ns = self.fair_floor_ns.saturating_sub(self.quantum_ns);
        let fair_ns = self.tasks[id.0].fair_ns.max(owed_from_ns);
        self.tasks[id.0].fair_ns = fair_ns;
        let queue = &mut self.queues[PROGRAM];
        let first = queue.front().map(|first| self.tasks[first.0].fair_ns);
        if first.is_some_and(|first_ns| fair_ns + self.quantum_ns / 4 < first_ns) {
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
        if task.level == Level::Program && queue.is_empty() {
            self.fair_floor_ns = self.fair_floor_ns.max(task.fair_ns);
        }
    }

    /// Moves a task to another level, last in its order.
    pub fn set_level(&mut self, id: TaskId, level: Level) {
        let runs = self.is_runnable(id);
        self.block(id);
        self.tasks[id.0].level = level;
        if runs {
            self.wake(id);
        }
    }

    /// Gives a task a piece of work.
    #[inline]
    pub fn give(&mut self, id: TaskId, ns: u64) {
        self.tasks[id.0].left_ns = Some(ns);
    }

    /// Runs until a task is done with its piece of work or has none, or until
    /// `limit_ns`.
    pub fn step(&mut self, limit_ns: u64) -> Step {
        loop {
            let Some(&id) = self.queues.iter().find_map(VecDeque::front) else {
                self.idle_ns += limit_ns.saturating_sub(self.now_ns);
                self.now_ns = self.now_ns.max(limit_ns);
                return Step::Limit;
            };
            let level = self.tasks[id.0].level;
            if level.has_context() && self.loaded != Some(id) {
                self.loaded = Some(id);
                self.switch_left_ns = self.switch_ns;
                self.switches += 1;
            }
            // A quantum outlasts preemption: else whoever is first would stay
            // so as long as it is preempted often enough.
            if level == Level::Program && self.quantum_of != Some(id) {
                self.quantum_of = Some(id);
                self.quantum_left_ns = self.quantum_ns;
            }
            if level.has_context() && self.switch_left_ns > 0 {
                let switch_ns = self.spend(id, self.switch_left_ns, limit_ns);
                self.switch_left_ns -= switch_ns;
                // A program that is preempted all the time pays for that from
                // its own quantum.
                self.quantum_left_ns = self.quantum_left_ns.saturating_sub(switch_ns);
                if self.switch_left_ns > 0 {
                    return Step::Limit;
                }
            }
            let Some(left_ns) = self.tasks[id.0].left_ns else { return Step::Wants(id) };
            let shares = level == Level::Program && self.queues[level as usize].len() > 1;
            let most_ns = if shares { left_ns.min(self.quantum_left_ns) } else { left_ns };
            let spent_ns = self.spend(id, most_ns, limit_ns);
            if shares {
                self.quantum_left_ns -= spent_ns;
            }
            if spent_ns == left_ns {
                self.tasks[id.0].left_ns = None;
                self.rotate(shares);
                return Step::Done(id);
            }
            self.tasks[id.0].left_ns = Some(left_ns - spent_ns);
            if !self.rotate(shares) {
                return Step::Limit;
            }
        }
    }

    /// The turn of the program that had least, if this one's quantum is used
    /// up.
    #[inline]
    fn rotate(&mut self, shares: bool) -> bool {
        let over = shares && self.quantum_left_ns == 0;
        if over {
            let queue = &mut self.queues[PROGRAM];
            queue.rotate_left(1);
            let next = (0..queue.len()).min_by_key(|&at| self.tasks[queue[at].0].fair_ns);
            if let Some(next) = next.and_then(|at| queue.remove(at)) {
                queue.push_front(next);
            }
            self.quantum_left_ns = self.quantum_ns;
        }
        over
    }

    /// Lets at most `ns` pass for a task.
    #[inline]
    fn spend(&mut self, id: TaskId, ns: u64, limit_ns: u64) -> u64 {
        let ns = ns.min(limit_ns.saturating_sub(self.now_ns));
        self.now_ns += ns;
        let task = &mut self.tasks[id.0];
        task.spent_ns += ns;
        self.level_spent_ns[task.level as usize] += ns;
        if task.level == Level::Program {
            task.fair_ns += ns;
        }
        ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_level_preempts_and_the_lower_goes_on_where_it_was() {
        let mut processor = Processor::new(0, 1000);
        let program = processor.add(Level::Program);
        let interrupt = processor.add(Level::Device);
        processor.wake(program);
        assert_eq!(processor.step(10), Step::Wants(program));
        processor.give(program, 100);
        assert_eq!(processor.step(40), Step::Limit);
        processor.wake(interrupt);
        assert_eq!(processor.step(1000), Step::Wants(interrupt));
        processor.give(interrupt, 25);
        assert_eq!(processor.step(1000), Step::Done(interrupt));
        assert_eq!(processor.now_ns(), 65);
        processor.block(interrupt);
        assert_eq!(processor.step(1000), Step::Done(program));
        assert_eq!(processor.now_ns(), 125, "60 were left");
        assert_eq!(processor.level_spent_ns(Level::Device), 25);
        assert_eq!(processor.spent_ns(program), 100);
    }

    #[test]
    fn levels_are_served_in_their_order() {
        let mut processor = Processor::new(0, 1000);
        let tasks: Vec<TaskId> = Level::ALL.iter().rev().map(|&l| processor.add(l)).collect();
        for &task in &tasks {
            processor.wake(task);
            processor.give(task, 10);
        }
        for &task in tasks.iter().rev() {
            assert_eq!(processor.step(u64::MAX), Step::Done(task));
            processor.block(task);
        }
        assert!(processor.is_idle());
    }

    #[test]
    fn there_is_no_preemption_within_a_level() {
        let mut processor = Processor::new(0, 1000);
        let (a, b) = (processor.add(Level::Software), processor.add(Level::Software));
        processor.wake(a);
        processor.give(a, 10_000);
        assert_eq!(processor.step(100), Step::Limit);
        processor.wake(b);
        processor.give(b, 10);
        assert_eq!(processor.step(20_000), Step::Done(a));
    }

    #[test]
    fn programs_take_turns_by_the_quantum() {
        let mut processor = Processor::new(0, 100);
        let (a, b) = (processor.add(Level::Program), processor.add(Level::Program));
        for program in [a, b] {
            processor.wake(program);
            processor.give(program, 1_000_000);
        }
        assert_eq!(processor.step(1000), Step::Limit);
        assert_eq!((processor.spent_ns(a), processor.spent_ns(b)), (500, 500));
        processor.block(b);
        assert_eq!(processor.step(2000), Step::Limit);
        assert_eq!(processor.spent_ns(a), 1500, "alone it needs no turns");
    }

    #[test]
    fn a_program_that_slept_comes_first_but_is_not_owed_its_sleep() {
        let mut processor = Processor::new(0, 100);
        let (hog, reader) = (processor.add(Level::Program), processor.add(Level::Program));
        processor.wake(hog);
        processor.give(hog, 1_000_000);
        assert_eq!(processor.step(10_000), Step::Limit);
        processor.wake(reader);
        processor.give(reader, 30);
        assert_eq!(processor.step(20_000), Step::Done(reader), "at once");
        assert_eq!(processor.now_ns(), 10_030);
        processor.give(reader, 5000);
        assert_eq!(processor.step(12_000), Step::Limit);
        let (had, rest) = (processor.spent_ns(reader), processor.spent_ns(hog) - 10_000);
        assert!((1000..=1100).contains(&had), "half and a quantum, not all: {had} of {rest}");
    }

    #[test]
    fn preemption_gives_no_new_quantum() {
        let mut processor = Processor::new(0, 100);
        let (a, b) = (processor.add(Level::Program), processor.add(Level::Program));
        let thread = processor.add(Level::Kernel);
        for program in [a, b] {
            processor.wake(program);
            processor.give(program, 1_000_000);
        }
        for round in 1..=20 {
            assert_eq!(processor.step(round * 60 - 10), Step::Limit);
            processor.wake(thread);
            processor.give(thread, 10);
            assert_eq!(processor.step(round * 60), Step::Done(thread));
            processor.block(thread);
        }
        assert_eq!((processor.spent_ns(a), processor.spent_ns(b)), (500, 500));
    }

    #[test]
    fn a_change_of_context_costs_and_an_interrupt_is_none() {
        let mut processor = Processor::new(7, 100);
        let (a, b) = (processor.add(Level::Kernel), processor.add(Level::Program));
        let interrupt = processor.add(Level::Device);
        processor.wake(b);
        processor.give(b, 50);
        assert_eq!(processor.step(3), Step::Limit, "in the middle of the change");
        processor.wake(interrupt);
        processor.give(interrupt, 5);
        assert_eq!(processor.step(100), Step::Done(interrupt));
        processor.block(interrupt);
        assert_eq!(processor.step(22), Step::Limit);
        processor.wake(a);
        processor.give(a, 10);
        assert_eq!(processor.step(1000), Step::Done(a));
        processor.block(a);
        assert_eq!(processor.step(1000), Step::Done(b));
        assert_eq!(processor.switches(), 3);
        assert_eq!(processor.now_ns(), 7 + 5 + 50 + 7 + 10 + 7);
        assert_eq!(processor.level_spent_ns(Level::Program), 50 + 14);
    }

    #[test]
    fn time_without_work_is_idle() {
        let mut processor = Processor::new(0, 100);
        assert_eq!(processor.step(500), Step::Limit);
        assert_eq!((processor.idle_ns(), processor.now_ns()), (500, 500));
    }
}
