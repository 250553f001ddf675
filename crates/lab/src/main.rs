//! The `tidegate-lab` program: experiments, baselines and the demonstration.

// A reader of the output may go at any time: see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod commands;

use std::process::ExitCode;

use clap::Parser;
use tidegate_device::interface_settings::{RestorerRole, run_restorer, set_restorer};
use tidegate_program::output::{self, OutputClosed, log};
use tidegate_program::{Failure, VERSION};

use crate::commands::Lab;
use crate::commands::demo::Demo;
use crate::commands::report::ReportCommand;
use crate::commands::summary::SummaryCommand;

/// Laboratory of Tidegate: experiments that measure and write their figures, and the demonstration.
///
/// `tidegate lab` and `tidegate demo` run this program. It measures the program `tidegate` in its
/// own folder, of the same build.
#[derive(Parser)]
#[command(name = "tidegate-lab", version = VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    #[command(flatten)]
    Lab(Box<Lab>),
    /// Demonstrate a DNS server on real packets, beside the same server on kernel sockets
    Demo(Demo),
    /// Repeat the tables and figures of the five papers: one page with the published numbers, the
    /// kernel's and Tidegate's, from all experiments
    Report(ReportCommand),
    /// Make docs/benchmarks.md from its template and the results in docs/benchmarks, and compare
    /// README.md with them
    Summary(SummaryCommand),
    /// Restore settings of an interface; the laboratory starts this itself
    #[command(hide = true)]
    RestoreSettings {
        /// Part of this process
        role: RestorerRole,
    },
}

/// This program, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";

fn main() -> ExitCode {
    set_restorer(OWN_PROGRAM);
    let result = match Cli::parse().command {
        Command::Lab(lab) => lab.run(),
        Command::Demo(demo) => demo.run(),
        Command::Report(report) => report.run(),
        Command::Summary(summary) => summary.run(),
        Command::RestoreSettings { role } => run_restorer(role).map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            log(format_args!("tidegate-lab: {error}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn former_names_still_work() {
        for former in [
            &["echo-1"] as &[&str],
            &["echo-2"],
            &["echo-3"],
            &["asymmetric"],
            &["queues"],
            &["readers", "--places", "one-core"],
            &["locks"],
            &["share"],
            &["reads"],
            &["attach"],
            &["trace"],
            &["livelock", "--carriers", "kernel"],
            &["protect", "--carriers", "kernel"],
            &["connections", "--most", "1000"],
        ] {
            let parsed = Cli::try_parse_from([&["tidegate-lab"], former].concat());
            if let Err(error) = parsed {
                panic!("{former:?}: {error}");
            }
        }
    }
}
