//! `lab mtcp-server`: a web server written for mTCP, on the C library and on the kernel's epoll.
//!
//! The source is `crates/capi/examples/mtcp_server.c`. The kernel's twin is the same source with the
//! calls of `mtcp_kernel.c` beside it. Both are built when they are needed.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_program::beside;

use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::apps::application::Application;
use crate::testbed::apps::packaged_load;
use crate::testbed::flood::{
    FloodTestbed, KERNEL_ADDRESS, PREFIX_BITS, Receiver, TIDEGATE_ADDRESS,
};
use crate::testbed::folder;
use crate::testbed::netns::run_to_end;
use crate::testbed::process::ServerProcess;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::sysctl::SysctlOverride;
use crate::testbed::tcp::TcpLabConfig;

const SERVER: &str = include_str!("../../../../capi/examples/mtcp_server.c");
const KERNEL_CALLS: &str = include_str!("../../../../capi/examples/mtcp_kernel.c");
const HEADERS: [(&str, &str); 2] = [
    ("mtcp_api.h", include_str!("../../../../capi/include/mtcp_api.h")),
    ("mtcp_epoll.h", include_str!("../../../../capi/include/mtcp_epoll.h")),
];
const LIBRARY: &str = "libtidegate.so";
const PORT: u16 = 8080;
/// Connections of wrk.
const CONNECTIONS: [usize; 3] = [1, 64, 1_000];
/// Connections at which the figure holds: a server under load.
const BUSY_CONNECTIONS: usize = 64;
/// The program pins its first thread to this processor, as programs for mTCP do.
const SERVER_CORE: usize = 0;
const LOAD_CORE: usize = 1;

/// Stack of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StackHost {
    /// The C library, with the stack in the program.
    Tidegate,
    Kernel(ReceiveWork),
}

impl StackHost {
    fn name(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::Kernel(work) => work.kernel_name(),
        }
    }

    fn address(self) -> Ipv4Addr {
        match self {
            Self::Tidegate => TIDEGATE_ADDRESS,
            Self::Kernel(_) => KERNEL_ADDRESS,
        }
    }
}

/// The two programs, in a folder of their own.
struct Programs {
    folder: TempDir,
}

impl Programs {
    /// # Errors
    /// If there is no compiler, or no C library beside this program.
    fn build() -> Result<Self, LabError> {
        let programs = Self { folder: folder::private()? };
        for (name, text) in
            HEADERS.into_iter().chain([("mtcp_server.c", SERVER), ("mtcp_kernel.c", KERNEL_CALLS)])
        {
            let path = programs.path(name);
            fs::write(&path, text).map_err(LabError::file(&path))?;
        }
        let library = beside(LIBRARY).map_err(LabError::io_other("run `make build`"))?;
        let folder = library.parent().unwrap_or(Path::new("."));
        let mut linked = programs.compiler("tidegate");
        linked.arg("-L").arg(folder).arg(format!("-Wl,-rpath,{}", folder.display()));
        run_to_end(linked.arg("-ltidegate"), "gcc")?;
        let mut kernel = programs.compiler("kernel");
        run_to_end(kernel.arg(programs.path("mtcp_kernel.c")), "gcc")?;
        Ok(programs)
    }

    fn compiler(&self, program: &str) -> Command {
        let mut compiler = Command::new("cc");
        compiler.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread", "-I"]);
        compiler.arg(self.folder.path()).arg("-o").arg(self.path(program));
        compiler.arg(self.path("mtcp_server.c"));
        compiler
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Command of the server on a stack.
    fn command(&self, testbed: &FloodTestbed, host: StackHost) -> Result<Command, LabError> {
        let program = self.path(if host == StackHost::Tidegate { "tidegate" } else { "kernel" });
        let config = self.path("mtcp.conf");
        let device = &testbed.pair.b.device;
        let text = format!("io = xdp\nport = {device}\naddr = {TIDEGATE_ADDRESS}/{PREFIX_BITS}\n");
        fs::write(&config, text).map_err(LabError::file(&config))?;
        let mut command = testbed.pair.b.namespace.command_on_core(SERVER_CORE, program);
        command.arg("-f").arg(config).args(["-N", "1", "-P", &PORT.to_string()]);
        Ok(command)
    }
}

/// Server that answers.
struct Running {
    process: ServerProcess,
    _settings: Vec<SysctlOverride>,
}

impl Running {
    fn start(
        programs: &Programs,
        testbed: &FloodTestbed,
        host: StackHost,
    ) -> Result<Self, LabError> {
        let settings = match host {
            StackHost::Tidegate => {
                testbed.prepare(Receiver::Server)?;
                Vec::new()
            }
            StackHost::Kernel(work) => {
                testbed.prepare(Receiver::Kernel)?;
                work.place(&testbed.pair.b, SERVER_CORE)?;
                work.program_settings()?
            }
        };
        let mut command = programs.command(testbed, host)?;
        let mut process = ServerProcess::start("mtcp_server", &mut command)?;
        let target = SocketAddr::new(host.address().into(), PORT);
        let client = &testbed.pair.a.namespace;
        process.wait_until(|| {
            client.enter(|| TcpStream::connect(target).is_ok()).is_ok_and(|connected| connected)
        })?;
        Ok(Self { process, _settings: settings })
    }
}

fn measure(
    programs: &Programs,
    testbed: &FloodTestbed,
    (host, connections): (StackHost, usize),
    seconds: f64,
) -> Result<f64, LabError> {
    let server = Running::start(programs, testbed, host)?;
    let target = SocketAddr::new(host.address().into(), PORT);
    let rate = packaged_load::measure(testbed, Application::Nginx, target, connections, seconds);
    server.process.stop();
    rate.unwrap_or_else(|| Err(LabError::Config("there is no load for web servers".to_owned())))
}

/// Requests/s of Tidegate and of the kernel's best at one number of connections.
struct Comparison {
    connections: usize,
    kernel: FirstPass<StackHost>,
    rates: [Vec<f64>; 2],
}

impl Comparison {
    fn hosts(&self) -> [StackHost; 2] {
        [StackHost::Tidegate, self.kernel.best()]
    }

    fn rows(&self) -> impl Iterator<Item = Value> {
        self.hosts().into_iter().zip(&self.rates).map(|(host, rates)| {
            json!({
                "server": host.name(),
                "connections": self.connections,
                "requests_per_s": median(rates.iter().copied()).round(),
            })
        })
    }

    fn ratio(&self) -> (f64, f64) {
        let [tidegate, kernel] = self.rates.each_ref().map(|rates| median(rates.iter().copied()));
        (tidegate / kernel.max(1.0), kernel)
    }
}

/// Measures the server by wrk.
///
/// # Errors
/// If a compiler, wrk or the C library is missing, or a server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let programs = Programs::build()?;
    let testbed = FloodTestbed::new(SERVER_CORE, LOAD_CORE)?;
    let ways = ReceiveWork::PROGRAMS.map(StackHost::Kernel);
    let name = |host: StackHost| host.name().to_owned();
    let first_seconds = config.seconds.min(FIRST_PASS_SECONDS);
    let progress = Progress::of_part("first pass", CONNECTIONS.len());
    let mut comparisons = Vec::new();
    for connections in CONNECTIONS {
        let kernel = FirstPass::measure(Goal::Highest, &ways, name, |host| {
            measure(&programs, &testbed, (host, connections), first_seconds)
        })?;
        let best = kernel.best().name();
        progress.step(format_args!("{connections} connections: {best} is the kernel's best"));
        comparisons.push(Comparison { connections, kernel, rates: Default::default() });
    }
    let progress = Progress::new(2 * comparisons.len() * config.repeats);
    for _ in 0..config.repeats {
        for comparison in &mut comparisons {
            for (side, host) in comparison.hosts().into_iter().enumerate() {
                let case = (host, comparison.connections);
                let rate = measure(&programs, &testbed, case, config.seconds)?;
                let (name, connections) = (host.name(), comparison.connections);
                progress.step(format_args!("{name}, {connections} connections: {rate:.0}/s"));
                comparison.rates[side].push(rate);
            }
        }
    }
    let mut result = Experiment::new("mtcp-server");
    for comparison in &comparisons {
        let (ratio, kernel) = comparison.ratio();
        let rows = comparison.kernel.rows(kernel);
        match comparison.connections {
            BUSY_CONNECTIONS => result.compare_with_best("mtcp_example_ratio", ratio, rows),
            other => {
                let name = format!("mtcp_example_ratio_{other}");
                result.figure(&name, round_to_thousandths(ratio));
            }
        }
    }
    result.rows = comparisons.iter().flat_map(Comparison::rows).collect();
    result.columns = vec!["server", "connections", "requests_per_s"];
    result.note(format!(
        "crates/capi/examples/mtcp_server.c on the C library, with the stack in the program on AF_XDP, \
         and on the kernel's epoll, by wrk with one thread on core {LOAD_CORE}; the server on core \
         {SERVER_CORE}; frames as on a wire; mtcp_example_ratio: requests/s with {BUSY_CONNECTIONS} \
         connections over the kernel's best way"
    ));
    Ok(result)
}
