//! `tidegate serve echo`.

use std::time::Instant;

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate::TcpOptions;
use tidegate_apps::ServeCounters;
use tidegate_apps::kernel_streams::serve_kernel_streams;
use tidegate_apps::kernel_uring::echo_by_uring;
use tidegate_apps::streams::{StreamService, serve_streams};
use tidegate_apps::work::Work;

use super::common::{Common, StreamServer};
use crate::Failure;
use crate::config::{self, Section};
use crate::host::PortKind;
use crate::process::{ready, stop_flag};
use crate::report::ServeReport;

/// Flags of `serve echo`.
#[derive(Args)]
pub(crate) struct EchoCommand {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    echo: EchoOptions,
}

/// Section `[echo]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct EchoOptions {
    /// The port to serve [default: 7]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Work on each datagram for about so long; measured once at the start
    #[arg(long, value_name = "NANOSECONDS")]
    work_ns: Option<u64>,
    /// Answer nothing
    #[arg(long)]
    sink: bool,
    /// Serve TCP instead of UDP
    #[arg(long)]
    tcp: bool,
    /// With --tcp: send bytes as fast as they are taken, and read none
    #[arg(long, conflicts_with = "sink")]
    source: bool,
    /// With --tcp and --port kernel: never sleep
    #[arg(long)]
    spin: bool,
    /// With --tcp and --port kernel: by io_uring instead of epoll
    #[arg(long, conflicts_with_all = ["spin", "sink", "source"])]
    io_uring: bool,
}

impl Section for EchoOptions {
    const NAME: &'static str = "echo";
}

impl EchoCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, echo } = self;
        let options = config::over(echo, common.config.as_deref())?;
        if options.source && !options.tcp {
            return Err("--source is for streams: give --tcp as well".into());
        }
        if options.tcp {
            return serve_streams_echo(common, &options);
        }
        // On the processor that will do the work.
        common.host()?.pin()?;
        let began = Instant::now();
        let now_ns = || began.elapsed().as_nanos() as u64;
        let turns = Work::turns_for(options.work_ns.unwrap_or(0), now_ns);
        let work = Work::new(turns, options.sink);
        common.serve("echo", options.listen.unwrap_or(7), work, None)
    }
}

/// Streams on Tidegate, or on kernel sockets to compare.
fn serve_streams_echo(common: Common, echo: &EchoOptions) -> Result<(), Failure> {
    let port = echo.listen.unwrap_or(7);
    let service = match echo {
        EchoOptions { source: true, .. } => StreamService::Source,
        EchoOptions { sink: true, .. } => StreamService::Sink,
        _ => StreamService::Echo,
    };
    let json = common.json;
    let served = ServeCounters::new();
    let host = common.host()?;
    if host.port_kind() == PortKind::Kernel {
        host.pin()?;
        let stop = stop_flag(common.duration)?;
        let addresses = host.kernel_addresses(port);
        let ready = || ready("echo", &addresses, "kernel sockets");
        if echo.io_uring {
            echo_by_uring(&addresses, &stop, &served, ready)?;
        } else {
            serve_kernel_streams(&addresses, service, echo.spin, &stop, &served, ready)?;
        }
        return ServeReport::kernel("echo", &served).print(json);
    }
    if echo.io_uring {
        return Err("--io-uring is for --port kernel".into());
    }
    if echo.spin {
        return Err("--spin is for --port kernel: on Tidegate give --mode dedicated".into());
    }
    let options = TcpOptions { no_delay: true, ..TcpOptions::default() };
    let server = common.open_streams("TCP echo", port, options)?;
    server.ready("echo")?;
    let StreamServer { net, listeners, stop, .. } = &server;
    serve_streams(net, listeners, service, stop, &served)?;
    ServeReport::tidegate("echo", &served, net).print(json)
}
