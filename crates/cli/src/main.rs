//! The `tidegate` command-line program.

// A reader of the output may go at any time: see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod announce;
mod background;
mod capture;
mod choices;
mod config;
mod control;
mod controllable;
mod core_placement;
mod daemon;
mod doctor;
mod drop_log;
mod dump;
mod gate;
mod guard;
mod health_check;
mod help_files;
mod host;
mod lab;
mod load;
mod logging;
mod metrics;
mod monitor;
mod numa;
mod process;
mod reload;
mod report;
mod report_source;
mod router;
mod run;
mod sandbox;
mod serve;
mod server_report;
mod server_watch;
mod service_manager;
mod ss;
mod top;
mod upgrade;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidegate_device::interface_settings::{RestorerRole, run_restorer, set_restorer};

pub(crate) use tidegate_program::{Failure, output};

use crate::output::{OutputClosed, log};

/// User-space network stack that keeps serving under packet floods.
///
/// Tidegate receives the traffic of its own addresses or ports directly from the network
/// device, and leaves all other traffic, ssh included, to the kernel.
///
/// New here? `tidegate doctor` checks this machine, and `tidegate demo` measures a DNS server
/// on real packets against the same server on kernel sockets.
#[derive(Parser)]
#[command(name = "tidegate", version = tidegate_program::VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    logging: logging::LoggingOptions,
}

#[derive(Subcommand)]
enum Command {
    /// Run the network daemon that applications attach to
    Daemon(Box<daemon::DaemonCommand>),
    /// Run a DNS, echo or HTTP server on Tidegate, or on kernel sockets for comparison
    Serve(Box<serve::Serve>),
    /// Replace the running daemon by this version of the program, without losing a connection
    Upgrade(upgrade::Upgrade),
    /// Run an unmodified application on Tidegate
    Run(Box<run::Run>),
    /// List the sockets of attached applications
    Ss(ss::Ss),
    /// Monitor the daemon: core load, frames, drops by reason, activity per application
    Top(top::Top),
    /// Capture the frames of a running server or daemon, with what became of each
    Capture(capture::Capture),
    /// Follow one flow of a running server through admission, stack and program, with times
    Trace(capture::Trace),
    /// Show or change the receive scheduling of a running server
    Ctl(control::Ctl),
    /// Forward IPv4 and IPv6 packets between network interfaces
    Route(router::RouteCommand),
    /// Packet filter for a router: accept or refuse each packet to be forwarded
    #[command(alias = "screen")]
    Filter(router::FilterCommand),
    /// Protect a server on the kernel's stack: under a flood, admit packets by class
    Guard(guard::Guard),
    /// Count the packets of a network interface by flow; its traffic stays with the kernel
    Monitor(monitor::MonitorCommand),
    /// Announce a service's addresses by BIRD, FRR or ExaBGP while the service is healthy
    Announce(Box<announce::Announce>),
    /// Withdraw the addresses that `tidegate announce` announces, before maintenance
    Drain(announce::Drain),
    /// Check this machine and its interfaces, with a remedy for each deficit
    Doctor(doctor::Doctor),
    /// Generate load: packets at a fixed rate (open loop), or TCP connections
    #[command(subcommand)]
    Load(load::Load),
    /// Run an experiment and write its figures
    #[command(disable_help_flag = true)]
    Lab(lab::Arguments),
    /// Demonstrate a DNS server on real packets, beside the same server on kernel sockets
    #[command(disable_help_flag = true)]
    Demo(lab::Arguments),
    /// Write the state of Tidegate on this machine as JSON, for a bug report
    Dump(dump::Dump),
    /// List all drop reasons
    Drops(report::Drops),
    /// Check a configuration file without starting anything
    Check(config::CheckCommand),
    /// List all metrics
    Metrics(metrics::MetricsCommand),
    /// Print a script that completes commands and flags in a shell
    Completions(help_files::Completions),
    /// Write the manual pages into a folder
    Man(help_files::ManualPages),
    /// Restore settings of an interface; Tidegate starts this itself
    #[command(hide = true)]
    RestoreSettings {
        /// Part of this process
        role: RestorerRole,
    },
    /// Resolve neighbours for a server without privileges; Tidegate starts this itself
    #[command(hide = true)]
    ResolveNeighbours {
        /// Index of the interface
        interface: u32,
        /// User of the server
        user: String,
    },
}

/// This program, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";

fn main() -> ExitCode {
    set_restorer(OWN_PROGRAM);
    let cli = Cli::parse_from(with_new_spelling(std::env::args_os().collect()));
    if let Err(error) = cli.logging.start() {
        log(format_args!("tidegate: {error}"));
        return ExitCode::FAILURE;
    }
    let result = match cli.command {
        Command::Daemon(daemon) => daemon.run(),
        Command::Serve(serve) => serve.run(),
        Command::Upgrade(upgrade) => upgrade.run(),
        Command::Run(run) => run.run(),
        Command::Ss(ss) => ss.run(),
        Command::Top(top) => top.run(),
        Command::Capture(capture) => capture.run(),
        Command::Trace(trace) => trace.run(),
        Command::Ctl(ctl) => ctl.run(),
        Command::Route(route) => route.run(),
        Command::Filter(filter) => filter.run(),
        Command::Guard(guard) => guard.run(),
        Command::Monitor(monitor) => monitor.run(),
        Command::Announce(announce) => announce.run(),
        Command::Drain(drain) => drain.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Load(load) => load.run(),
        Command::Lab(arguments) => arguments.run(None),
        Command::Demo(arguments) => arguments.run(Some("demo")),
        Command::Dump(dump) => dump.run(),
        Command::Drops(drops) => drops.run(),
        Command::Check(check) => check.run(),
        Command::Metrics(metrics) => metrics.run(),
        Command::Completions(completions) => completions.run(),
        Command::Man(pages) => pages.run(),
        Command::ResolveNeighbours { interface, user } => {
            sandbox::resolve_neighbours(interface, &user)
        }
        Command::RestoreSettings { role } => run_restorer(role).map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("tidegate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the arguments with `serve` replaced by `daemon` where only flags follow, which is how
/// the daemon was once started.
fn with_new_spelling(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let flag = arguments.get(2).and_then(|argument| argument.to_str());
    let is_daemon =
        flag.is_some_and(|flag| flag.starts_with('-') && !matches!(flag, "-h" | "--help"));
    if is_daemon && arguments[1] == "serve" {
        arguments[1] = "daemon".into();
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(arguments: &[&str]) -> Vec<OsString> {
        with_new_spelling(arguments.iter().map(OsString::from).collect())
    }

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_without_server_is_daemon() {
        assert_eq!(spelled(&["tidegate", "serve", "--iface", "eth0"])[1], "daemon");
        for unchanged in [
            &["tidegate", "serve", "dns", "--shared"] as &[&str],
            &["tidegate", "serve", "--help"],
            &["tidegate", "serve"],
            &["tidegate"],
            &["tidegate", "run", "--embedded"],
        ] {
            assert_eq!(spelled(unchanged), unchanged);
        }
    }

    #[test]
    fn former_names_still_work() {
        for former in [
            &["tidegate", "screen", "--rules", "r", "--listen", "l"] as &[&str],
            &[
                "tidegate",
                "route",
                "-p",
                "xdp:a,10.0.0.1/24",
                "--screen",
                "s",
                "--screen-batch",
                "2",
            ],
            &["tidegate", "serve", "echo", "--port", "kernel"],
            &["tidegate", "serve", "--sockets", "1", "--ports", "2"],
            &["tidegate", "guard", "--iface", "a", "--port", "udp/53", "--friend", "10.0.0.0/8"],
            &["tidegate", "load", "udp", "10.0.0.1:7", "--port", "xdp"],
        ] {
            let parsed = Cli::try_parse_from(spelled(former));
            if let Err(error) = parsed {
                panic!("{former:?}: {error}");
            }
        }
    }
}
