//! Processors for servers and load, by the topology of the machine.

use std::fs;

use crate::error::LabError;
use crate::testbed::cpu;

/// Processors from which load and servers have their own.
const MIN_PROCESSORS_APART: usize = 4;

/// Processors of servers and load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// Processors of the network cores, in order.
    servers: Vec<usize>,
    /// Processors of the load.
    pub(super) load: Vec<usize>,
    /// True if the load has processors of its own; otherwise each server shares its processor with
    /// the load of its queue.
    pub(super) is_apart: bool,
    /// Number of hardware threads of a physical core.
    threads_per_core: usize,
}

impl Placement {
    /// # Errors
    /// If the machine does not show which processors share a physical core.
    pub(super) fn of_machine() -> Result<Self, LabError> {
        let processors = cpu::available_cores();
        let siblings = |processor: usize| {
            let path =
                format!("/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list");
            let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
            Ok(text.trim().to_owned())
        };
        Ok(Self::new(&(0..processors).map(siblings).collect::<Result<Vec<_>, LabError>>()?))
    }

    /// `siblings` names the physical core of each processor, in any words.
    fn new(siblings: &[String]) -> Self {
        let processors = siblings.len();
        let is_apart = processors >= MIN_PROCESSORS_APART;
        let thread = |processor: usize| {
            siblings[..processor].iter().filter(|&core| *core == siblings[processor]).count()
        };
        let (load_end, first_server) =
            if is_apart { (processors / 2, processors / 2) } else { (processors, 0) };
        let mut servers: Vec<usize> = (first_server..processors).collect();
        // A physical core of its own for each, as long as there are some.
        servers.sort_by_key(|&processor| thread(processor));
        let threads_per_core = (0..processors).map(thread).max().map_or(1, |thread| thread + 1);
        Self { servers, load: (0..load_end).collect(), is_apart, threads_per_core }
    }

    /// Processors of `cores` network cores; they share processors if the machine has too few.
    pub(super) fn servers(&self, cores: usize) -> Vec<usize> {
        self.servers.iter().copied().cycle().take(cores).collect()
    }

    /// Processors of the load for `queues` queues. A veth puts a frame of processor `n` into queue
    /// `n` modulo the number of queues, so the numbers follow each other.
    pub(super) fn load_of_queues(&self, queues: usize) -> impl Iterator<Item = usize> {
        self.load.iter().copied().cycle().take(queues)
    }

    pub(super) fn describe(&self) -> String {
        let load = if self.is_apart {
            "the load is on the lower half of the processors, the network cores are on the upper \
             half, on different physical cores first"
        } else {
            "each network core shares a processor with the load of its queue, which has the lowest \
             priority: only per_busy_second says something"
        };
        let processors = cpu::available_cores();
        let threads = self.threads_per_core;
        format!("{processors} processors, {threads} to a physical core; {load}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cores: &[&str]) -> Placement {
        Placement::new(&cores.iter().map(|&core| core.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn servers_take_physical_cores_before_their_second_threads() {
        let placement = machine(&["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"]);
        assert_eq!(placement.servers(4), [4, 6, 5, 7]);
        assert_eq!(placement.load_of_queues(4).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(placement.is_apart);
    }

    #[test]
    fn machine_of_two_processors_shares_them() {
        let placement = machine(&["0", "1"]);
        assert_eq!(placement.servers(2), [0, 1]);
        assert_eq!(placement.load, [0, 1]);
        assert!(!placement.is_apart);
    }
}
