//! Kernel memory that grows with the number of sockets.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::LabError;
use crate::testbed::netns::Namespace;

/// Descriptors of a server besides those of its connections.
const OTHER_DESCRIPTORS: u64 = 1_000;

/// Reading of the machine's kernel memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelMemory {
    /// Slab caches, which hold sockets, inodes, files, epoll items and packets, and memory of
    /// `vmalloc`, which holds large tables of descriptors; in bytes (`/proc/meminfo`).
    pub(super) object_bytes: u64,
    /// Buffers of TCP sockets as the kernel charges them, in bytes (`mem` of
    /// `/proc/net/sockstat`). The memory itself is that of packets, which slab caches hold in
    /// part.
    pub(super) buffer_bytes: u64,
}

impl KernelMemory {
    /// Reads the memory of the whole machine; `namespace` is that of the sockets.
    pub(super) fn read(namespace: &Namespace) -> Result<Self, LabError> {
        let meminfo =
            fs::read_to_string("/proc/meminfo").map_err(LabError::file("/proc/meminfo"))?;
        // /proc/net would show the namespace of the main thread.
        let path = "/proc/thread-self/net/sockstat";
        let sockstat =
            namespace.enter(|| fs::read_to_string(path))?.map_err(LabError::file(path))?;
        Self::parse(&meminfo, &sockstat).ok_or_else(|| {
            LabError::Config(format!("/proc/meminfo or {path} has an unknown format"))
        })
    }

    fn parse(meminfo: &str, sockstat: &str) -> Option<Self> {
        let kilobytes = |name: &str| -> Option<u64> {
            let line = meminfo.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        let tcp = sockstat.lines().find(|line| line.starts_with("TCP:"))?;
        let pages: u64 =
            tcp.split_whitespace().skip_while(|word| *word != "mem").nth(1)?.parse().ok()?;
        Some(Self {
            object_bytes: (kilobytes("Slab:")? + kilobytes("VmallocUsed:")?) * 1024,
            buffer_bytes: pages * rustix::param::page_size() as u64,
        })
    }

    /// Growth since `before`; 0 where the machine has freed memory.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            object_bytes: self.object_bytes.saturating_sub(before.object_bytes),
            buffer_bytes: self.buffer_bytes.saturating_sub(before.buffer_bytes),
        }
    }
}

/// Number of connections, at most `wanted`, for which a program that this process starts may open
/// descriptors. Raises the limit where this process may.
pub(super) fn allow_descriptors(wanted: usize) -> usize {
    let needed = wanted as u64 + OTHER_DESCRIPTORS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let Some(limit) = maximum.filter(|&maximum| maximum < needed) else { return wanted };
    let raised = Rlimit { current, maximum: Some(needed) };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => wanted,
        Err(_) => usize::try_from(limit.saturating_sub(OTHER_DESCRIPTORS)).unwrap_or(wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 100 kB\nSlab:  40 kB\nVmallocUsed:   2 kB\n";

    #[test]
    fn adds_slab_caches_and_vmalloc() {
        let sockstat = "sockets: used 1\nTCP: inuse 5 orphan 0 tw 1 alloc 8 mem 3\nUDP: mem 9\n";
        let memory = KernelMemory::parse(MEMINFO, sockstat).unwrap();
        assert_eq!(memory.object_bytes, 42 * 1024);
        assert_eq!(memory.buffer_bytes, 3 * rustix::param::page_size() as u64);
        let before = KernelMemory { object_bytes: 1024, buffer_bytes: u64::MAX };
        let growth = KernelMemory { object_bytes: 41 * 1024, buffer_bytes: 0 };
        assert_eq!(memory.since(before), growth);
        assert_eq!(KernelMemory::parse(MEMINFO, "UDP: mem 9\n"), None);
    }

    #[test]
    fn leaves_a_sufficient_limit_alone() {
        let before = getrlimit(Resource::Nofile);
        assert_eq!(allow_descriptors(0), 0);
        assert_eq!(getrlimit(Resource::Nofile), before);
    }
}
