//! Sends back every frame of a device of DPDK's as it came, for so many
//! seconds: what the port alone costs, beside `dpdk-testpmd`.
//!
//! `dpdk_forward DEVICE SECONDS [FRAMES]`; with FRAMES so many are put into the
//! device first, for one that returns what it is sent.

use std::io;
use std::time::{Duration, Instant};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::dpdk::{self, DpdkConfig};
use tidegate_port::{Burst, Port};

const BURST: usize = 64;

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(device), Some(seconds)) = (arguments.next(), arguments.next()) else {
        return Err(io::Error::other("usage: dpdk_forward DEVICE SECONDS [FRAMES]"));
    };
    let seconds: u64 = seconds.parse().map_err(io::Error::other)?;
    let frames: usize = arguments.next().map_or(Ok(0), |text| text.parse()).unwrap_or(0);
    let Ok(device) = device.parse::<DpdkConfig>();
    let config = ArenaConfig { frame_size: FrameSize::K4, ..ArenaConfig::default() };
    let mut arena = Arena::new(config).map_err(io::Error::other)?;
    let mut port = dpdk::open(&device, &mut arena).map_err(io::Error::other)?;
    let mut burst = Burst::new();
    // Frames that are sent while nobody is there are lost.
    while frames > 0 && port.counters().transmitted == 0 {
        port.receive(&mut arena, &mut burst, BURST)?;
        burst.extend((0..frames).map_while(|_| arena.alloc_from(&[0; 64])));
        port.transmit(&mut arena, &mut burst)?;
    }
    let mut began = Instant::now();
    let mut before = port.counters().transmitted;
    // The first tenth is for warming up.
    let mut is_warm = false;
    let whole = Duration::from_secs(seconds);
    loop {
        for _ in 0..1024 {
            port.transmit(&mut arena, &mut burst)?;
            port.receive(&mut arena, &mut burst, BURST)?;
        }
        let elapsed = began.elapsed();
        if !is_warm && elapsed > whole / 10 {
            is_warm = true;
            (began, before) = (Instant::now(), port.counters().transmitted);
        }
        if is_warm && elapsed > whole {
            break;
        }
    }
    let sent = (port.counters().transmitted - before) as f64;
    println!("{:.0} frames/s", sent / began.elapsed().as_secs_f64());
    Ok(())
}
