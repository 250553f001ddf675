//! What there is for `--port dpdk:DEVICE`.

use std::fs;
use std::path::Path;

use tidegate::port::dpdk;

use super::{Finding, Verdict};

/// Drivers of the kernel's that leave a card to programs.
const DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// DPDK itself, and each card that it can have.
pub(super) fn findings() -> Vec<Finding> {
    let Some(version) = dpdk::version() else {
        let what = "this program is built without it: no --port dpdk";
        let build = "scripts/setup dpdk && cargo build --release -p tidegate-cli --features dpdk";
        return vec![Finding::new("dpdk", Verdict::Fair, what).remedy(build)];
    };
    let mut all = vec![
        Finding::new("dpdk", Verdict::Good, version)
            .remedy("tidegate serve --port dpdk:net_tap0,iface=tg0 --address ADDRESS/PREFIX"),
    ];
    let cards: Vec<_> = DRIVERS.into_iter().flat_map(cards_of).collect();
    if cards.is_empty() {
        all.push(
            Finding::new("dpdk", Verdict::Fair, "no card is bound to it: virtual devices only")
                .remedy("dpdk-devbind.py --status, then --bind=vfio-pci PCI-ADDRESS"),
        );
    }
    all.extend(cards);
    all
}

/// Cards with this driver.
fn cards_of(driver: &str) -> Vec<Finding> {
    let folder = Path::new("/sys/bus/pci/drivers").join(driver);
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let addresses = entries.filter_map(|entry| entry.file_name().into_string().ok());
    // Beside the devices there are files of the driver's own.
    let cards = addresses.filter(|address| address.contains(':'));
    cards.map(|address| card(driver, &folder.join(&address), &address)).collect()
}

fn card(driver: &str, folder: &Path, address: &str) -> Finding {
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let (node, processors) = (read("numa_node"), read("local_cpulist"));
    let near = match node.trim() {
        // One node only.
        "" | "-1" => String::new(),
        node => format!(", NUMA node {node}: --cpu one of {}", processors.trim()),
    };
    Finding::new("dpdk", Verdict::Good, format!("{address} is bound to {driver}{near}"))
        .remedy(format!("tidegate serve --port dpdk:{address} --address ADDRESS/PREFIX"))
}
