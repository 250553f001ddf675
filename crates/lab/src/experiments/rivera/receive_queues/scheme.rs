//! Queues that are measured, by name.

use std::io;

use tidegate_queues::lock::{Mcs, Sleeping, Spin, Ticket};
use tidegate_queues::{
    Eventfd, Futex, MpmcRing, MultiList, QueueLimits, QueueShape, RingMatrix, SingleList,
    Unlimited, WorkStealing, open,
};

use super::model::{ModelConfig, ModelOutcome, ModelPacket, measure};

/// Capacity of a queue of fixed size, in packets for each reader.
const CAPACITY_PER_READER: usize = 1024;

/// Queue that is measured: structure, lock, sleeping method and burst size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// Structure that holds the packets, named as in the published table.
    pub structure: &'static str,
    /// Kind of lock around the structure; `-` for none.
    pub lock: &'static str,
    /// Primitive on which readers of an empty queue sleep.
    pub sleep: &'static str,
    /// Packets that are pushed and popped together.
    pub burst: usize,
}

/// Shorthand for a [`Scheme`] without field names.
const fn scheme(
    structure: &'static str,
    lock: &'static str,
    sleep: &'static str,
    burst: usize,
) -> Scheme {
    Scheme { structure, lock, sleep, burst }
}

const BURST_PACKETS: usize = tidegate_queues::BURST_PACKETS;

/// Rivera's four queues.
pub const PAPER: [Scheme; 4] = [
    scheme("single_queue", "spinlock", "eventfd", 1),
    scheme("single_queue", "mutex", "eventfd", 1),
    scheme("multi_queue", "spinlock", "eventfd", 1),
    scheme("multi_queue", "mutex", "eventfd", 1),
];

/// Queues that the thesis left open.
pub const CANDIDATES: [Scheme; 10] = [
    scheme("single_queue", "ticket", "futex", 1),
    scheme("single_queue", "mcs", "futex", 1),
    scheme("multi_queue", "mutex", "futex", 1),
    scheme("multi_queue", "mcs", "futex", 1),
    scheme("ring", "-", "futex", 1),
    scheme("ring", "-", "futex", BURST_PACKETS),
    scheme("stealing", "-", "futex", 1),
    scheme("stealing", "-", "futex", BURST_PACKETS),
    scheme("grid", "-", "futex", 1),
    scheme("grid", "-", "futex", BURST_PACKETS),
];

impl Scheme {
    /// Name in the legend and in `--schemes`.
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

    /// Runs the model once on a new queue of this kind.
    ///
    /// # Errors
    /// When no file descriptor is left.
    pub(super) fn run(&self, run: &ModelConfig) -> io::Result<ModelOutcome> {
        let run = &ModelConfig { burst: self.burst, ..*run };
        let shape = QueueShape {
            producers: run.producers,
            readers: run.readers,
            capacity: CAPACITY_PER_READER,
        };
        let shared_shape = QueueShape { capacity: CAPACITY_PER_READER * run.readers, ..shape };
        let limits = QueueLimits::default();
        /// Opens a queue and measures it.
        macro_rules! on {
            ($structure:ty, $sleep:ty, $shape:expr) => {
                measure(open::<$structure, Unlimited, $sleep>(&$shape, limits)?, run)
            };
        }
        Ok(match (self.structure, self.lock, self.sleep) {
            ("single_queue", "spinlock", _) => on!(SingleList<ModelPacket, Spin>, Eventfd, shape),
            ("single_queue", "mutex", _) => on!(SingleList<ModelPacket, Sleeping>, Eventfd, shape),
            ("single_queue", "ticket", _) => on!(SingleList<ModelPacket, Ticket>, Futex, shape),
            ("single_queue", _, _) => on!(SingleList<ModelPacket, Mcs>, Futex, shape),
            ("multi_queue", "spinlock", _) => on!(MultiList<ModelPacket, Spin>, Eventfd, shape),
            ("multi_queue", "mutex", "eventfd") => {
                on!(MultiList<ModelPacket, Sleeping>, Eventfd, shape)
            }
            ("multi_queue", "mutex", _) => on!(MultiList<ModelPacket, Sleeping>, Futex, shape),
            ("multi_queue", _, _) => on!(MultiList<ModelPacket, Mcs>, Futex, shape),
            ("ring", _, _) => on!(MpmcRing<ModelPacket>, Futex, shared_shape),
            ("stealing", _, _) => on!(WorkStealing<ModelPacket>, Futex, shape),
            _ => on!(RingMatrix<ModelPacket>, Futex, shape),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_scheme_has_a_unique_name_and_loses_no_packet() {
        let mut names = HashSet::new();
        for scheme in PAPER.iter().chain(&CANDIDATES) {
            assert!(names.insert(scheme.name()), "{} is not unique", scheme.name());
            let run = ModelConfig {
                producers: 2,
                readers: 3,
                packets_per_reader: 1_000,
                burst: 1,
                read_pause: Duration::ZERO,
                time_limit: Duration::from_secs(60),
            };
            let outcome = scheme.run(&run).unwrap();
            assert!(outcome.elapsed.is_some(), "{} was cut off", scheme.name());
            assert_eq!(outcome.read, 3_000, "{}", scheme.name());
        }
        assert!(names.contains("multi-queue-spinlock") && names.contains("grid-burst"));
    }
}
