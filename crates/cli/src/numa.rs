//! NUMA node of the card: the processors that threads use by default, and a warning for others.

use std::sync::Once;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tidegate_device::topology::{Node, Topology};

/// True if the memory of the machine is on several nodes.
pub(crate) fn has_several_nodes(topology: &Topology) -> bool {
    topology.nodes().len() > 1
}

/// Restricts the calling thread, and the threads that it starts, to the processors near the card of
/// an interface, as far as the thread may run there. Otherwise nothing changes.
pub(crate) fn stay_near(interface: Option<&str>) {
    let (Some(interface), Ok(allowed)) = (interface, sched_getaffinity(None)) else { return };
    let is_allowed = |processor| processor < CpuSet::MAX_CPU && allowed.is_set(processor);
    let Some(near) = processors_near(&Topology::of_machine(), interface, is_allowed) else {
        return;
    };
    let mut set = CpuSet::new();
    near.into_iter().for_each(|processor| set.set(processor));
    // Where the thread was, it works too.
    let _ = sched_setaffinity(None, &set);
}

/// Warns once if a processor is not on the node of an interface's card.
pub(crate) fn warn_if_remote(interface: Option<&str>, cpu: usize) {
    static WARNED: Once = Once::new();
    let Some(interface) = interface else { return };
    if let Some(warning) = remote_warning(&Topology::of_machine(), interface, cpu) {
        WARNED.call_once(|| tracing::warn!("{warning}"));
    }
}

/// Processors of the card's node on which a thread may run; `None` if that changes nothing, or if
/// there are none.
fn processors_near(
    topology: &Topology,
    interface: &str,
    is_allowed: impl Fn(usize) -> bool,
) -> Option<Vec<usize>> {
    let node = topology.node_of_interface(interface).filter(|_| has_several_nodes(topology))?;
    let near: Vec<usize> = node.processors.iter().copied().filter(|&cpu| is_allowed(cpu)).collect();
    (!near.is_empty()).then_some(near)
}

fn remote_warning(topology: &Topology, interface: &str, cpu: usize) -> Option<String> {
    let card = topology.node_of_interface(interface)?;
    let own = topology.node_of_processor(cpu)?;
    (own.number != card.number).then(|| {
        format!(
            "--cpu {cpu} is on NUMA node {}, the card of {interface} on node {}: {}",
            own.number,
            card.number,
            remedy(card)
        )
    })
}

fn remedy(card: &Node) -> String {
    match card.processors[..] {
        [] => "that node has no processors".to_owned(),
        [first, .., last] => format!("choose one of its processors, from {first} to {last}"),
        [only] => format!("choose processor {only}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with two nodes and one of memory only.
    fn machine() -> (tempfile::TempDir, Topology) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("devices/system/node/node0/cpulist", "0-3"),
            ("devices/system/node/node1/cpulist", "4-7"),
            ("devices/system/node/node2/cpulist", ""),
            ("class/net/near/device/numa_node", "1"),
            ("class/net/memory/device/numa_node", "2"),
            ("class/net/unknown/device/numa_node", "-1"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let topology = Topology::read(root.path());
        (root, topology)
    }

    #[test]
    fn threads_stay_on_the_node_of_the_card() {
        let (_root, topology) = machine();
        let near = |name, allowed: &[usize]| {
            processors_near(&topology, name, |processor| allowed.contains(&processor))
        };
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(near("near", &all), Some(vec![4, 5, 6, 7]));
        assert_eq!(near("near", &[0, 5, 6]), Some(vec![5, 6]), "the thread may not run on others");
        assert_eq!(near("near", &[0, 1]), None, "the thread may not run there");
        for name in ["memory", "unknown", "missing"] {
            assert_eq!(near(name, &all), None, "{name}");
        }
    }

    #[test]
    fn processor_on_another_node_is_named() {
        let (_root, topology) = machine();
        let warning = remote_warning(&topology, "near", 2).unwrap();
        assert!(warning.starts_with("--cpu 2 is on NUMA node 0, the card of near on node 1:"));
        assert!(warning.ends_with("from 4 to 7"), "{warning}");
        assert!(remote_warning(&topology, "memory", 2).unwrap().ends_with("has no processors"));
        for (name, cpu) in [("near", 4), ("near", 99), ("unknown", 2), ("missing", 2)] {
            assert_eq!(remote_warning(&topology, name, cpu), None, "{name} {cpu}");
        }
    }
}
