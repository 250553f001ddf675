//! The end of the demonstration: redis, memcached and nginx, unmodified, on one
//! daemon, while strangers flood it.

use serde_json::json;

use super::program::Program;
use super::site::{Daemon, Way, attach, check};
use super::speed::{UNDER_FLOOD_RPS, flood};
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::livelock::bench::{Bench, Receiver};
use crate::tcp::cores;

/// Serves the programs and floods their daemon. `None`, with a sentence, when one
/// of them is not there.
///
/// # Errors
/// When namespaces cannot be made or a program does not start.
pub fn run(seconds: f64) -> Result<Option<Experiment>, LabError> {
    if let Err(missing) = check(&Program::ALL) {
        println!("\nUnmodified programs are left out: {missing}");
        return Ok(None);
    }
    let (server_core, load_core) = cores()?;
    println!("\nNow redis, memcached and nginx, as they are installed, attached to one daemon.");
    let bench = Bench::new(server_core, load_core)?;
    bench.prepare(Receiver::Server)?;
    let daemon = Daemon::start(&bench, server_core, &["--admission"])?;
    let mut all = Vec::new();
    for program in Program::ALL {
        all.push((program, attach(&bench, program, server_core, &daemon)?));
    }
    let mut result = Experiment::new("demo-programs");
    for (program, served) in &all {
        let ((calm, flooded), offered_pps) = flood(&bench, served, Way::Attached, seconds)?;
        let name = program.name();
        println!(
            "  {name:<9} {} requests/s calm, {} while strangers send {} packets/s",
            number((calm * UNDER_FLOOD_RPS).round()),
            number((flooded * UNDER_FLOOD_RPS).round()),
            number(offered_pps.round())
        );
        result.figure(&format!("{name}_under_flood"), flooded / calm);
        result.rows.push(json!({
            "program": name,
            "calm_rps": calm * UNDER_FLOOD_RPS,
            "flooded_rps": flooded * UNDER_FLOOD_RPS,
            "flood_pps": offered_pps,
        }));
    }
    all.into_iter().for_each(|(_, served)| served.stop());
    daemon.stop();
    Ok(Some(result))
}
