//! Send rate of the load generator while the receiver drops every request. A load must stay well
//! below this rate, so that it measures the server and not the generator.
//!
//! `generator_limit [xdp|packet|kernel] [SECONDS]`, as root.

use tidegate_lab::LabError;
use tidegate_lab::testbed::netns::{VethConfig, VethPair};
use tidegate_load::{LinkKind, LoadConfig, load_udp};

fn main() -> Result<(), LabError> {
    let link = match std::env::args().nth(1).as_deref() {
        Some("kernel") => LinkKind::Kernel,
        Some("packet") => LinkKind::Packet,
        _ => LinkKind::Xdp,
    };
    let seconds = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(3.0);
    let a = if link == LinkKind::Kernel { vec!["10.98.0.1/24".to_owned()] } else { Vec::new() };
    let pair = VethPair::as_on_a_wire(&VethConfig { a, b: vec!["10.98.0.2/24".to_owned()] })?;
    let config = LoadConfig {
        interface: Some(pair.a.device.clone()),
        source: (link != LinkKind::Kernel).then_some([10, 98, 0, 9].into()),
        // Foreign hardware address: the far end drops the frames early.
        mac: Some("02:00:00:00:00:99".to_owned()),
        seconds,
        core: Some(0),
        ..LoadConfig::new(link, ([10, 98, 0, 2], 9).into())
    };
    // As in the experiments: the far end does its receive work on another core.
    pair.b.set_rps(&[1])?;
    let report = pair.a.namespace.enter(|| load_udp(&config, 64, &mut |p| eprintln!("{p}")))??;
    print!("{report}");
    Ok(())
}
