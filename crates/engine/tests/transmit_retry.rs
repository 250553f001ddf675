//! A device that could not send what its ring holds is not left asleep.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_device::mem::{MemConfig, wire};
use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, Medium};
use tidegate_engine::{NetConfig, open};
use tidegate_memory::Arena;

/// Device whose transmit ring holds frames while the flag is set, as that of a busy NIC.
struct BusyDevice {
    device: Box<dyn Device>,
    holds_frames: Arc<AtomicBool>,
}

impl Device for BusyDevice {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.device.receive(arena, burst, quota)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.device.transmit(arena, burst)
    }

    fn needs_retry(&mut self) -> bool {
        self.holds_frames.load(Ordering::Relaxed)
    }

    fn counters(&mut self) -> DeviceCounters {
        self.device.counters()
    }
}

#[test]
fn sleep_ends_for_frames_that_the_device_could_not_send() {
    // Without a link layer nothing is announced, so no other timer is set.
    let (device, _peer) = wire(&MemConfig::default().medium(Medium::Ip)).unwrap();
    let holds_frames = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&holds_frames);
    let config = NetConfig::new(device)
        .address("10.0.0.1/24".parse().unwrap())
        .wrap(Box::new(move |device| Ok(Box::new(BusyDevice { device, holds_frames: flag }))));
    let (mut engine, _) = open(config).unwrap();
    let mut sleep_ns = |holds: bool| {
        holds_frames.store(holds, Ordering::Relaxed);
        engine.prepare_sleep().unwrap().unwrap().timeout_ns
    };
    let retries_ns = [(); 9].map(|()| sleep_ns(true));
    let expected_us =
        [200, 400, 800, 1_600, 3_200, 6_400, 12_800, 20_000, 20_000].map(|us| Some(us * 1_000));
    assert_eq!(retries_ns, expected_us);
    assert_eq!(sleep_ns(false), None);
    assert_eq!(sleep_ns(true), Some(200_000), "a new attempt is an early one");
}
