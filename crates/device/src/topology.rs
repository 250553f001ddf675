//! NUMA nodes of a machine: their processors, and the node of an interface's card.

use std::fs;
use std::path::{Path, PathBuf};

/// Numbers of processors and nodes above these are not read.
const MAX_PROCESSORS: usize = 8192;
const MAX_NODES: usize = 1024;

/// NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Number of the node.
    pub number: usize,
    /// Processors of the node, in order; a node may have memory only.
    pub processors: Vec<usize>,
    /// Free hugepages of 2 MiB on the node; `None` if the kernel has none of this size.
    pub free_hugepages: Option<u64>,
}

/// NUMA nodes of a machine.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    root: PathBuf,
    nodes: Vec<Node>,
}

impl Topology {
    /// Reads the nodes of this machine.
    pub fn of_machine() -> Self {
        Self::read(Path::new("/sys"))
    }

    /// Reads the nodes from a sysfs tree. What is missing or malformed there is left out.
    pub fn read(root: &Path) -> Self {
        let folder = root.join("devices/system/node");
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let node = |entry: fs::DirEntry| {
            let number: usize = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let processors = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
            let hugepages = entry.path().join("hugepages/hugepages-2048kB/free_hugepages");
            let free_hugepages = fs::read_to_string(hugepages).ok();
            (number < MAX_NODES).then(|| Node {
                number,
                processors: parse_list(processors.trim()),
                free_hugepages: free_hugepages.and_then(|text| text.trim().parse().ok()),
            })
        };
        let mut nodes: Vec<Node> = entries.filter_map(node).collect();
        nodes.sort_by_key(|node| node.number);
        Self { root: root.to_owned(), nodes }
    }

    /// All nodes, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Node of a processor.
    pub fn node_of_processor(&self, processor: usize) -> Option<&Node> {
        self.nodes.iter().find(|node| node.processors.contains(&processor))
    }

    /// Node to which the card of an interface is attached. `None` for an interface without a card,
    /// and if the firmware does not tell the node.
    pub fn node_of_interface(&self, name: &str) -> Option<&Node> {
        if name.is_empty() || name == ".." || name.contains('/') {
            return None;
        }
        let path = self.root.join("class/net").join(name).join("device/numa_node");
        // -1 is an unknown node.
        let number: usize = fs::read_to_string(path).ok()?.trim().parse().ok()?;
        self.nodes.iter().find(|node| node.number == number)
    }
}

/// Numbers of a list such as `0-3,8`; empty if the list is malformed.
fn parse_list(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last < MAX_PROCESSORS).then_some(first..=last)
    };
    let ranges: Option<Vec<_>> = list.split(',').map(range).collect();
    let mut numbers: Vec<usize> = ranges.into_iter().flatten().flatten().collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sysfs tree with these files.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Topology) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let topology = Topology::read(root.path());
        (root, topology)
    }

    #[test]
    fn finds_the_card_on_the_second_node() {
        let (_root, topology) = tree(&[
            ("devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
            ("devices/system/node/node1/cpulist", "4-7,12-15\n"),
            ("devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "64\n"),
            ("devices/system/node/node2/cpulist", "\n"),
            ("devices/system/node/possible", "0-2\n"),
            ("class/net/eth0/device/numa_node", "1\n"),
            ("class/net/eth1/device/numa_node", "-1\n"),
            ("class/net/eth2/device/numa_node", "2\n"),
            ("class/net/eth0.5/mtu", "1500\n"),
        ]);
        let numbers: Vec<_> = topology.nodes().iter().map(|node| node.number).collect();
        assert_eq!(numbers, [0, 1, 2]);
        let near = topology.node_of_interface("eth0").unwrap();
        assert_eq!(near.processors, [4, 5, 6, 7, 12, 13, 14, 15]);
        assert_eq!(near.free_hugepages, Some(64));
        assert_eq!(topology.node_of_interface("eth1"), None, "the firmware does not tell");
        let without_processors = topology.node_of_interface("eth2").unwrap();
        assert_eq!(without_processors.processors, []);
        for name in ["eth0.5", "lo", "", "..", "../net/eth0"] {
            assert_eq!(topology.node_of_interface(name), None, "{name}");
        }
        let node_of = |cpu| topology.node_of_processor(cpu).map(|node| node.number);
        assert_eq!([0, 11, 12, 16].map(node_of), [Some(0), Some(0), Some(1), None]);
    }

    #[test]
    fn leaves_out_what_is_malformed() {
        let (_root, topology) = tree(&[
            ("devices/system/node/node0/cpulist", "0-99999999999999999999"),
            ("devices/system/node/node1/cpulist", "0-18446744073709551615"),
            ("devices/system/node/node3/cpulist", "3-1"),
            ("devices/system/node/node4/cpulist", "1,x"),
            ("devices/system/node/node5/meminfo", "no list"),
            ("devices/system/node/node99999999999/cpulist", "1"),
            ("devices/system/node/nodes/cpulist", "1"),
            ("class/net/eth0/device/numa_node", "garbage"),
            ("class/net/eth1/device/numa_node", "7"),
        ]);
        assert_eq!(topology.nodes().len(), 5);
        assert!(topology.nodes().iter().all(|node| node.processors.is_empty()));
        assert_eq!(topology.node_of_interface("eth0"), None);
        assert_eq!(topology.node_of_interface("eth1"), None, "there is no such node");
        assert!(Topology::read(Path::new("/nonexistent")).nodes().is_empty());
    }

    #[test]
    fn every_processor_of_this_machine_has_a_node() {
        let topology = Topology::of_machine();
        if !topology.nodes().is_empty() {
            assert!(topology.node_of_processor(rustix::thread::sched_getcpu()).is_some());
        }
    }
}
