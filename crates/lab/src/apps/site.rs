//! A wire, two cores, and a program that serves in one of several ways.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::program::Program;
use crate::cpu::CoreTicks;
use crate::error::LabError;
use crate::livelock::bench::{
    Bench, CLIENT_ADDRESS, KERNEL_ADDRESS, OWN_ADDRESS, PREFIX, Receiver,
};
use crate::livelock::subject::this_program;
use crate::load::{
    Answer, AskerConfig, LinkKind, Question, TcpLoadConfig, TcpLoadReport, load_tcp_at_device,
};
use crate::process::Process;

/// The daemon's socket in its folder.
const SOCKET: &str = "daemon.sock";
/// The address of a load on a stack of its own.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 100);
/// The first port of those who ask; below those that the kernel gives away.
const FIRST_PORT: u16 = 20_000;
/// How long a program may take to answer one question.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a program is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By the kernel, with receive packet steering to the server's core. The driver's
    /// part and merging stay with the sender's.
    Kernel,
    /// By the kernel, with the device's NAPI context in a thread on the server's core.
    KernelThread,
    /// By a stack inside the program.
    Embedded,
    /// By the daemon.
    Attached,
}

impl Way {
    pub(super) const ALL: [Self; 4] =
        [Self::Kernel, Self::KernelThread, Self::Embedded, Self::Attached];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::KernelThread => "kernel-thread",
            Self::Embedded => "embedded",
            Self::Attached => "attached",
        }
    }

    /// Whether it is not Tidegate's.
    pub(super) fn is_kernels(self) -> bool {
        matches!(self, Self::Kernel | Self::KernelThread)
    }
}

/// A program that serves, and what serves it.
pub(super) struct Served {
    pub(super) program: Process,
    pub(super) daemon: Option<Daemon>,
    pub(super) target: SocketAddr,
    pub(super) question: Question,
    _folder: TempDir,
}

/// What came of asking a program.
pub(super) struct Asked {
    pub(super) load: TcpLoadReport,
    pub(super) server_core_percent: f64,
}

/// Where programs and the daemon run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    pub(super) program: usize,
    pub(super) daemon: usize,
}

/// A daemon that programs can attach to.
pub(super) struct Daemon {
    process: Process,
    folder: TempDir,
}

fn folder() -> Result<TempDir, LabError> {
    tempfile::tempdir().map_err(LabError::io("cannot make a folder"))
}

/// The flags of a stack at the server's end of the wire.
fn host(bench: &Bench) -> [String; 4] {
    let own = format!("{OWN_ADDRESS}/{PREFIX}");
    ["--iface".to_owned(), bench.pair.b.device.clone(), "--address".to_owned(), own]
}

impl Daemon {
    /// Starts it on a core.
    pub(super) fn start(bench: &Bench, core: usize, flags: &[&str]) -> Result<Self, LabError> {
        let folder = folder()?;
        let mut serve = bench.pair.b.namespace.command_on_core(core, this_program()?);
        serve.args(["serve", "--cpu", &core.to_string(), "--socket"]);
        serve.arg(folder.path().join(SOCKET)).args(host(bench)).args(flags);
        let mut process = Process::start("tidegate serve", &mut serve)?;
        process.wait_for_line()?;
        Ok(Self { process, folder })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    pub(super) fn stop(self) {
        self.process.stop();
    }
}

/// Starts a program, and a daemon if it needs one, and waits until it answers.
pub(super) fn serve(
    bench: &Bench,
    program: Program,
    way: Way,
    cores: Cores,
    flags: &[&str],
) -> Result<Served, LabError> {
    let receiver = if way.is_kernels() { Receiver::Kernel } else { Receiver::Server };
    bench.prepare(receiver)?;
    match way {
        Way::Kernel | Way::KernelThread => {
            bench.pair.b.set_rps((way == Way::Kernel).then_some(cores.daemon))?;
            start(bench, program, cores.program, KERNEL_ADDRESS, |_| Ok(()))
        }
        Way::Embedded => start(bench, program, cores.program, OWN_ADDRESS, |command| {
            command.arg(this_program()?).args(["run", "--embedded", "--log", "/dev/null"]);
            command.args(host(bench)).args(flags).arg("--");
            Ok(())
        }),
        Way::Attached => {
            let daemon = Daemon::start(bench, cores.daemon, flags)?;
            let served = attach(bench, program, cores.program, &daemon)?;
            Ok(Served { daemon: Some(daemon), ..served })
        }
    }
}

/// Starts a program that is attached to a daemon, and waits until it answers.
pub(super) fn attach(
    bench: &Bench,
    program: Program,
    core: usize,
    daemon: &Daemon,
) -> Result<Served, LabError> {
    start(bench, program, core, OWN_ADDRESS, |command| {
        command.arg(this_program()?).args(["run", "--log", "/dev/null", "--socket"]);
        command.arg(daemon.socket()).arg("--");
        Ok(())
    })
}

/// Starts a program on a core by what `before` puts in front of it.
fn start(
    bench: &Bench,
    program: Program,
    core: usize,
    address: Ipv4Addr,
    before: impl FnOnce(&mut Command) -> Result<(), LabError>,
) -> Result<Served, LabError> {
    let folder = folder()?;
    let mut command = bench.pair.b.namespace.command_on_core(core, "env");
    before(&mut command)?;
    command.args(program.command_line(folder.path())?);
    let mut process = Process::start(program.name(), &mut command)?;
    let target = SocketAddr::new(address.into(), program.port());
    let client = &bench.pair.a.namespace;
    let mut question = program.question();
    let mut asked = None;
    process.wait_until(|| {
        asked = client.enter(|| prepare(program, target, &question)).ok().and_then(Result::ok);
        asked.is_some()
    })?;
    if let Some(answer_bytes) = asked
        && question.answer.is_empty()
    {
        question.answer = Answer::Bytes(answer_bytes);
    }
    Ok(Served { program: process, daemon: None, target, question, _folder: folder })
}

/// Asks everything once. How long the answer to the question was.
fn prepare(program: Program, target: SocketAddr, question: &Question) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut buf = [0; 4096];
    if let Some(first) = program.preparation() {
        stream.write_all(&first.request)?;
        stream.read_exact(&mut buf[..first.answer.len()])?;
    }
    stream.write_all(&question.request)?;
    if !question.answer.is_empty() {
        stream.read_exact(&mut buf[..question.answer.len()])?;
        return Ok(question.answer.len());
    }
    // A head and a short file come together, or soon after one another.
    stream.read(&mut buf)
}

impl Served {
    /// A load on a stack of its own.
    pub(super) fn load(&self, bench: &Bench, connections: usize) -> TcpLoadConfig {
        TcpLoadConfig {
            interface: Some(bench.pair.a.device.clone()),
            source: Some(CLIENT.into()),
            prefix: PREFIX,
            connections,
            question: Some(self.question.clone()),
            core: Some(bench.load_core),
            ..TcpLoadConfig::new(LinkKind::Xdp, self.target)
        }
    }

    /// The same questions from the load's device itself, as fast as the answers come. The
    /// server's device is received from on the server's core, but for [`Way::Kernel`].
    pub(super) fn ask(
        &self,
        bench: &Bench,
        way: Way,
        connections: u16,
        seconds: f64,
    ) -> Result<Asked, LabError> {
        let SocketAddr::V4(target) = self.target else {
            return Err(LabError::Config("this load speaks IPv4".into()));
        };
        let config = AskerConfig {
            target: (target, bench.pair.b.mac),
            source: SocketAddrV4::new(CLIENT_ADDRESS, FIRST_PORT),
            connections,
            question: self.question.clone(),
            warm_up_seconds: seconds / 4.0,
            seconds,
            core: bench.load_core,
        };
        if way != Way::Kernel {
            bench.pair.b.set_threaded_napi(bench.server_core)?;
        }
        let before = CoreTicks::read(bench.server_core)?;
        let load = load_tcp_at_device(&bench.pair.a, &config)?;
        let server_core = CoreTicks::read(bench.server_core)?.since(before);
        bench.pair.b.set_softirq_napi()?;
        Ok(Asked { load, server_core_percent: server_core.busy_percent })
    }

    /// Everything that serves, by process.
    pub(super) fn processes(&self) -> Vec<u32> {
        let daemon = self.daemon.as_ref().map(|daemon| daemon.process.pid());
        daemon.into_iter().chain([self.program.pid()]).collect()
    }

    /// Ends it: the program first.
    pub(super) fn stop(self) {
        let Self { program, daemon, .. } = self;
        program.stop();
        if let Some(daemon) = daemon {
            daemon.stop();
        }
    }
}

/// What programs need that is not there, by what installs it.
pub(super) fn check(programs: &[Program]) -> Result<(), LabError> {
    for program in programs {
        if !program.is_installed() {
            let name = program.name();
            let what = format!("{name} is not installed: apt-get install {name}");
            return Err(LabError::Config(what));
        }
    }
    let library = Path::new(&this_program()?).with_file_name("libtidegate_preload.so");
    if !library.is_file() && std::env::var_os("TIDEGATE_PRELOAD_LIBRARY").is_none() {
        return Err(LabError::Config(format!(
            "{} is missing: `make build` builds it",
            library.display()
        )));
    }
    Ok(())
}
