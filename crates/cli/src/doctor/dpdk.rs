//! Checks for `--io dpdk:DEVICE`.

use std::fs;
use std::path::Path;

use tidegate_device::dpdk;

use super::{Finding, Verdict};

/// Kernel drivers that leave a device to user space.
const USERSPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// Reports the DPDK version, and each PCI device that DPDK can use.
pub(super) fn findings() -> Vec<Finding> {
    let Some(version) = dpdk::version() else {
        let what = "this program is built without DPDK: --io dpdk is not available";
        let build = "scripts/setup dpdk && cargo build --release -p tidegate-cli --features dpdk";
        return vec![Finding::new("dpdk", Verdict::Fair, what).remedy(build)];
    };
    let mut findings = vec![
        Finding::new("dpdk", Verdict::Good, version)
            .remedy("tidegate daemon --io dpdk:net_tap0,iface=tg0 --address ADDRESS/PREFIX"),
    ];
    let devices: Vec<_> = USERSPACE_DRIVERS.into_iter().flat_map(devices_of).collect();
    if devices.is_empty() {
        findings.push(
            Finding::new(
                "dpdk",
                Verdict::Fair,
                "no PCI device is bound to a user-space driver: virtual devices only",
            )
            .remedy("dpdk-devbind.py --status, then --bind=vfio-pci PCI-ADDRESS"),
        );
    }
    findings.extend(devices);
    findings
}

/// Reports each PCI device bound to `driver`.
fn devices_of(driver: &str) -> Vec<Finding> {
    let folder = Path::new("/sys/bus/pci/drivers").join(driver);
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let addresses = entries.filter_map(|entry| entry.file_name().into_string().ok());
    // The folder also has files of the driver, without a colon in the name.
    let devices = addresses.filter(|address| address.contains(':'));
    devices.map(|address| device_finding(driver, &folder.join(&address), &address)).collect()
}

fn device_finding(driver: &str, folder: &Path, address: &str) -> Finding {
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let (node, cpus) = (read("numa_node"), read("local_cpulist"));
    let numa_hint = match node.trim() {
        // The machine has a single NUMA node.
        "" | "-1" => String::new(),
        node => format!(", NUMA node {node}: give --cpu one of {}", cpus.trim()),
    };
    Finding::new("dpdk", Verdict::Good, format!("{address} is bound to {driver}{numa_hint}"))
        .remedy(format!("tidegate daemon --io dpdk:{address} --address ADDRESS/PREFIX"))
}
