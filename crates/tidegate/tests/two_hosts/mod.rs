//! Two hosts in one process, joined by a wire in memory.

use tidegate::mem::{MemConfig, wire};
use tidegate::{FrameSize, Net, NetConfig};

/// The addresses of the first and of the second host, in each family.
pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

/// The hosts, each with so many frames; `change` sets what else a test needs.
pub fn open(frames: u32, change: impl Fn(NetConfig) -> NetConfig) -> [Net; 2] {
    let (a, b) = wire(&MemConfig::default()).unwrap();
    let open = |port, host: usize| {
        let config = NetConfig::new(port)
            .address(format!("{}/24", FAMILIES[0][host]).parse().unwrap())
            .address(format!("{}/64", FAMILIES[1][host]).parse().unwrap())
            .frames(frames, FrameSize::K2)
            .hugepages(false)
            .seed([7; 16]);
        Net::open(change(config)).unwrap()
    };
    [open(a, 0), open(b, 1)]
}
