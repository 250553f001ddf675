//! `tidegate serve echo`.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde::{Deserialize, Serialize};
use tidegate::{Limits, Net, TcpOptions};
use tidegate_apps::ServeCounters;
use tidegate_apps::kernel_streams::serve_kernel_streams;
use tidegate_apps::kernel_uring::serve_uring_echo;
use tidegate_apps::streams::{StreamService, serve_streams};
use tidegate_apps::work::Work;

use super::common::{ServerOptions, nonzero_port};
use crate::Failure;
use crate::config::{self, Section};
use crate::host::IoKind;
use crate::metrics::{NetSource, add_requests};
use crate::process::announce_server;
use crate::report::ServeReport;

/// Flags of `serve echo`.
#[derive(Args)]
pub(crate) struct EchoCommand {
    #[command(flatten)]
    common: ServerOptions,
    #[command(flatten)]
    echo: EchoOptions,
}

/// Section `[echo]`.
#[derive(Args, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct EchoOptions {
    /// UDP or TCP port to serve [default: 7]
    #[arg(long, value_name = "PORT")]
    listen: Option<u16>,
    /// Approximate work per datagram, in nanoseconds; calibrated once at the start [default: 0]
    #[arg(long, value_name = "NANOSECONDS")]
    work_ns: Option<u64>,
    /// Receive only, send no answers
    #[arg(long)]
    sink: bool,
    /// Serve TCP instead of UDP
    #[arg(long)]
    tcp: bool,
    /// With --tcp: send as fast as the peer receives, and read nothing
    #[arg(long, conflicts_with = "sink")]
    source: bool,
    /// With --tcp and --io kernel: busy-poll instead of sleeping
    #[arg(long)]
    spin: bool,
    /// With --tcp and --io kernel: use io_uring instead of epoll
    #[arg(long, conflicts_with_all = ["spin", "sink", "source"])]
    io_uring: bool,
}

impl Section for EchoOptions {
    const NAME: &'static str = "echo";
}

impl EchoCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { common, echo } = self;
        let options = config::merge_file(echo, common.config.as_deref())?;
        if options.source && !options.tcp {
            return Err("--source is for streams: give --tcp as well".into());
        }
        if options.tcp {
            return serve_streams_echo(common, &options);
        }
        // Calibrated on the processor that will do the work.
        common.host_options()?.pin()?;
        let began = Instant::now();
        let now_ns = || began.elapsed().as_nanos() as u64;
        let iterations = Work::iterations_for(options.work_ns.unwrap_or(0), now_ns);
        let work = Work::new(iterations, options.sink);
        common.serve("echo", nonzero_port(options.listen, 7)?, work, None, Vec::new(), |_| ())
    }
}

/// Checks section `[echo]` of a file.
pub(crate) fn check_echo(path: &Path) -> Result<(), Failure> {
    let options = config::merge_file(EchoOptions::default(), Some(path))?;
    nonzero_port(options.listen, 7)?;
    Ok(())
}

/// Serves echo streams on Tidegate, or on kernel sockets for comparison.
fn serve_streams_echo(common: ServerOptions, echo: &EchoOptions) -> Result<(), Failure> {
    let port = nonzero_port(echo.listen, 7)?;
    let service = match echo {
        EchoOptions { source: true, .. } => StreamService::Source,
        EchoOptions { sink: true, .. } => StreamService::Sink,
        _ => StreamService::Echo,
    };
    let json = common.json;
    static SERVED: ServeCounters = ServeCounters::new();
    let served = &SERVED;
    let host = common.host_options()?;
    if host.io_kind() == IoKind::Kernel {
        let startup = common.startup(&host)?;
        host.pin()?;
        let (stop, mut reload) = (startup.stop(), None);
        let addresses = host.kernel_addresses(port);
        let ready = || {
            let source = NetSource::new("echo", "", Vec::new(), move |r| add_requests(r, served));
            reload = Some(startup.finish(Vec::new(), &[], source).map_err(std::io::Error::other)?);
            announce_server("echo", &addresses, "kernel sockets")
        };
        if echo.io_uring {
            serve_uring_echo(&addresses, &stop, served, ready)?;
        } else {
            let busy_poll = common.kernel_busy_poll;
            serve_kernel_streams(&addresses, service, echo.spin, busy_poll, &stop, served, ready)?;
        }
        return ServeReport::kernel("echo", served).print(json);
    }
    if echo.io_uring {
        return Err("--io-uring is for --io kernel".into());
    }
    if echo.spin {
        return Err("--spin is for --io kernel: on Tidegate give --mode dedicated".into());
    }
    let options = TcpOptions::default().no_delay(true);
    let server = common.open_stream_server("TCP echo", port, options, Limits::default())?;
    let mut server = server.start("echo", Vec::new(), move |r| add_requests(r, served))?;
    let stop = Arc::clone(&server.stop);
    let serve =
        |net: &Net, listeners: Vec<_>| serve_streams(net, &listeners, service, &stop, served);
    server.run(serve).map_err(|error| host.explain(error))?;
    ServeReport::tidegate("echo", served, &server.nets).print(json)
}
