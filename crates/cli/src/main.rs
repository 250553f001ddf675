//! The `tidegate` program.

mod config;
mod control;
mod demo;
mod doctor;
mod gate;
mod guard;
mod host;
mod lab;
mod load;
mod process;
mod report;
mod router;
mod run;
mod serve;
mod ss;
mod top;
mod upgrade;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What ends a command early: said once on standard error, exit code 1.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A flood-proof user-space network stack.
///
/// Tidegate takes the ports it was told to take straight from the network
/// card, and leaves everything else, ssh included, to the kernel.
///
/// New here? `tidegate doctor` says what this machine can do, and
/// `tidegate demo` shows a DNS server on real packets beside the same server
/// on kernel sockets.
#[derive(Parser)]
#[command(name = "tidegate", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the stack for other programs to attach to, or a server on it
    Serve(Box<serve::Serve>),
    /// Replace the daemon by the program that is installed now; no connection is lost
    Upgrade(upgrade::Upgrade),
    /// Run an unmodified program on Tidegate
    Run(Box<run::Run>),
    /// List the sockets of programs that are attached
    Ss(ss::Ss),
    /// Watch the daemon: its core, frames, drops by reason, what each program does
    Top(top::Top),
    /// Show or change the receive scheduling of a server that runs
    Ctl(control::Ctl),
    /// Forward IPv4 and IPv6 packets between ports
    Route(router::RouteCommand),
    /// Accept or refuse each packet that a router would forward
    Screen(router::ScreenCommand),
    /// Guard a server on the kernel's stack: under a flood, say which packets go first
    Guard(guard::Guard),
    /// Say what this machine and its interfaces can do, and what to type for the rest
    Doctor(doctor::Doctor),
    /// Generate load: packets at a rate, however slowly they are answered, or TCP
    #[command(subcommand)]
    Load(load::Load),
    /// Run an experiment and write its figures
    #[command(subcommand)]
    Lab(lab::Lab),
    /// Show a DNS server on real packets, beside the same server on kernel sockets
    Demo(demo::Demo),
    /// List every reason for which a packet can be dropped
    Drops(report::Drops),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(serve) => serve.run(),
        Command::Upgrade(upgrade) => upgrade.run(),
        Command::Run(run) => run.run(),
        Command::Ss(ss) => ss.run(),
        Command::Top(top) => top.run(),
        Command::Ctl(ctl) => ctl.run(),
        Command::Route(route) => route.run(),
        Command::Screen(screen) => screen.run(),
        Command::Guard(guard) => guard.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Load(load) => load.run(),
        Command::Lab(lab) => lab.run(),
        Command::Demo(demo) => demo.run(),
        Command::Drops(drops) => drops.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidegate: {error}");
            ExitCode::FAILURE
        }
    }
}
