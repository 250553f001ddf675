//! The queues that are measured, by name.

use std::io;

use tidegate_memory::queues::lock::{Mcs, Sleeping, Spin, Ticket};
use tidegate_memory::queues::{
    Eventfd, Futex, Grid, Limits, Mpmc, Multi, Shape, Single, Stealing, Unlimited, open,
};

use super::model::{Outcome, Run, Token, measure};

/// Packets for which each reader of a queue of fixed size has room.
const ROOM_PER_READER: usize = 1024;

/// A queue as it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// What holds the packets, as the published table names it.
    pub structure: &'static str,
    /// The kind of lock around it, or none.
    pub lock: &'static str,
    /// What readers of an empty queue sleep on.
    pub sleep: &'static str,
    /// Packets that are put in and taken out together.
    pub burst: usize,
}

/// Shorter than the fields by name.
const fn scheme(
    structure: &'static str,
    lock: &'static str,
    sleep: &'static str,
    burst: usize,
) -> Scheme {
    Scheme { structure, lock, sleep, burst }
}

const BURST: usize = tidegate_memory::queues::BURST;

/// Rivera's four.
pub const PAPER: [Scheme; 4] = [
    scheme("single_queue", "spinlock", "eventfd", 1),
    scheme("single_queue", "mutex", "eventfd", 1),
    scheme("multi_queue", "spinlock", "eventfd", 1),
    scheme("multi_queue", "mutex", "eventfd", 1),
];

/// What the thesis left open.
pub const CANDIDATES: [Scheme; 10] = [
    scheme("single_queue", "ticket", "futex", 1),
    scheme("single_queue", "mcs", "futex", 1),
    scheme("multi_queue", "mutex", "futex", 1),
    scheme("multi_queue", "mcs", "futex", 1),
    scheme("ring", "-", "futex", 1),
    scheme("ring", "-", "futex", BURST),
    scheme("stealing", "-", "futex", 1),
    scheme("stealing", "-", "futex", BURST),
    scheme("grid", "-", "futex", 1),
    scheme("grid", "-", "futex", BURST),
];

impl Scheme {
    /// The name in the legend and in `--schemes`.
    pub fn name(&self) -> String {
        let mut name = self.structure.replace('_', "-");
        if self.lock != "-" {
            name = format!("{name}-{}", self.lock);
        }
        if self.lock != "-" && self.sleep != "eventfd" {
            name = format!("{name}-{}", self.sleep);
        }
        if self.burst > 1 {
            name = format!("{name}-burst");
        }
        name
    }

    /// Runs the model on such a queue once.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub(super) fn run(&self, run: &Run) -> io::Result<Outcome> {
        let run = &Run { burst: self.burst, ..*run };
        let shape =
            Shape { producers: run.producers, readers: run.readers, capacity: ROOM_PER_READER };
        let shared = Shape { capacity: ROOM_PER_READER * run.readers, ..shape };
        let limits = Limits::default();
        /// Opens a queue and measures it.
        macro_rules! on {
            ($structure:ty, $sleep:ty, $shape:expr) => {
                measure(open::<$structure, Unlimited, $sleep>(&$shape, limits)?, run)
            };
        }
        Ok(match (self.structure, self.lock, self.sleep) {
            ("single_queue", "spinlock", _) => on!(Single<Token, Spin>, Eventfd, shape),
            ("single_queue", "mutex", _) => on!(Single<Token, Sleeping>, Eventfd, shape),
            ("single_queue", "ticket", _) => on!(Single<Token, Ticket>, Futex, shape),
            ("single_queue", _, _) => on!(Single<Token, Mcs>, Futex, shape),
            ("multi_queue", "spinlock", _) => on!(Multi<Token, Spin>, Eventfd, shape),
            ("multi_queue", "mutex", "eventfd") => on!(Multi<Token, Sleeping>, Eventfd, shape),
            ("multi_queue", "mutex", _) => on!(Multi<Token, Sleeping>, Futex, shape),
            ("multi_queue", _, _) => on!(Multi<Token, Mcs>, Futex, shape),
            ("ring", _, _) => on!(Mpmc<Token>, Futex, shared),
            ("stealing", _, _) => on!(Stealing<Token>, Futex, shape),
            _ => on!(Grid<Token>, Futex, shape),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_scheme_has_a_name_of_its_own_and_loses_nothing() {
        let mut names = HashSet::new();
        for scheme in PAPER.iter().chain(&CANDIDATES) {
            assert!(names.insert(scheme.name()), "{} twice", scheme.name());
            let run = Run {
                producers: 2,
                readers: 3,
                packets_per_reader: 1_000,
                burst: 1,
                pause: Duration::ZERO,
                cut_off: Duration::from_secs(60),
            };
            let outcome = scheme.run(&run).unwrap();
            assert!(outcome.elapsed.is_some(), "{} was cut off", scheme.name());
            assert_eq!(outcome.read, 3_000, "{}", scheme.name());
        }
        assert!(names.contains("multi-queue-spinlock") && names.contains("grid-burst"));
    }
}
