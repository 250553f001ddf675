//! Last part of the demonstration: unmodified redis, memcached and nginx on one daemon, while
//! unknown sources flood it.

use serde_json::json;
use tidegate_load::format_number;

use crate::error::LabError;
use crate::experiments::compare::apps::{UNDER_FLOOD_RPS, measure_flood};
use crate::report::experiment::Experiment;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::{DaemonProcess, StackKind, check_installed, start_attached};
use crate::testbed::flood::{FloodTestbed, Receiver};
use crate::testbed::tcp::choose_cores;

/// Runs the applications and floods their daemon. Returns `None`, after printing the reason, if
/// one of the applications is not installed.
///
/// # Errors
/// If namespaces cannot be created or an application does not start.
pub fn run(seconds: f64) -> Result<Option<Experiment>, LabError> {
    if let Err(missing) = check_installed(&Application::PACKAGES) {
        println!("\nUnmodified applications are skipped: {missing}");
        return Ok(None);
    }
    let (server_core, load_core) = choose_cores()?;
    println!("\nNow redis, memcached and nginx, unmodified, attached to one daemon.");
    let testbed = FloodTestbed::new(server_core, load_core)?;
    testbed.prepare(Receiver::Server)?;
    let daemon = DaemonProcess::start(&testbed, server_core, &["--admission"])?;
    let mut services = Vec::new();
    for application in Application::PACKAGES {
        services.push((application, start_attached(&testbed, application, server_core, &daemon)?));
    }
    let mut result = Experiment::new("demo-programs");
    for (application, service) in &services {
        let ((calm, flooded), offered_pps) =
            measure_flood(&testbed, service, StackKind::Attached, seconds)?;
        let name = application.name();
        println!(
            "  {name:<9} {} requests/s without a flood, {} while unknown sources send {} packets/s",
            format_number((calm * UNDER_FLOOD_RPS).round()),
            format_number((flooded * UNDER_FLOOD_RPS).round()),
            format_number(offered_pps.round())
        );
        result.figure(&format!("{name}_under_flood"), flooded / calm);
        result.rows.push(json!({
            "program": name,
            "calm_rps": calm * UNDER_FLOOD_RPS,
            "flooded_rps": flooded * UNDER_FLOOD_RPS,
            "flood_pps": offered_pps,
        }));
    }
    services.into_iter().for_each(|(_, service)| service.stop());
    daemon.stop();
    Ok(Some(result))
}
