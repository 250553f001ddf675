//! A Kafka broker on kernel sockets, and clients on librdkafka on any stack.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{ProgramStack, StackKind};
use crate::error::LabError;
use crate::testbed::flood::{CLIENT_ADDRESS, FloodTestbed, PREFIX_BITS, TIDEGATE_ADDRESS};
use crate::testbed::folder;
use crate::testbed::netns::run_to_end;
use crate::testbed::process::ServerProcess;

const PORT: u16 = 9092;
/// Port of the broker's own controller, on the loopback interface.
const CONTROLLER_PORT: u16 = 9093;
/// Name of a cluster of one broker, which Kafka wants as 16 bytes in base64.
const CLUSTER_ID: &str = "dGlkZWdhdGUtbGFiLWthZg";

/// Client of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KafkaClient {
    /// Debian's kcat, unmodified.
    Kcat,
    /// A program linked with the C library, or with the kernel's calls.
    Linked,
}

/// Work of a client: as many messages as `lines` has lines, each of these bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientRun<'a> {
    pub(crate) client: KafkaClient,
    pub(crate) stack: StackKind,
    pub(crate) topic: &'a str,
    pub(crate) messages: u32,
}

/// Broker at the load's end of the veth pair, on the load's core.
pub(crate) struct KafkaBroker<'t> {
    testbed: &'t FloodTestbed,
    /// Folder of the Java archives and of the linked client.
    programs: PathBuf,
    _process: ServerProcess,
    folder: TempDir,
}

impl<'t> KafkaBroker<'t> {
    /// Starts a broker of the Java archives in `programs`, and waits until kcat finds it.
    ///
    /// # Errors
    /// Without Java, the archives or kcat.
    pub(crate) fn start(testbed: &'t FloodTestbed, programs: &Path) -> Result<Self, LabError> {
        let folder = folder::private()?;
        let settings = folder.path().join("server.properties");
        let text = format!(
            "process.roles=broker,controller\nnode.id=1\n\
             controller.quorum.voters=1@127.0.0.1:{CONTROLLER_PORT}\n\
             controller.listener.names=CONTROLLER\n\
             listeners=PLAINTEXT://{CLIENT_ADDRESS}:{PORT},CONTROLLER://127.0.0.1:{CONTROLLER_PORT}\n\
             listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n\
             offsets.topic.replication.factor=1\nlog.dirs={}\n",
            folder.path().join("logs").display()
        );
        fs::write(&settings, text).map_err(LabError::file(&settings))?;
        let namespace = &testbed.pair.a.namespace;
        namespace.ip(&["link", "set", "lo", "up"])?;
        let java = |class: &str| {
            let mut command = namespace.command_on_core(testbed.load_core, "java");
            command.args(["-Xmx1g", "-XX:+UseSerialGC", "-cp"]);
            command.arg(programs.join("*")).arg(class);
            command
        };
        let mut format = java("kafka.tools.StorageTool");
        format.args(["format", "-t", CLUSTER_ID, "-c"]).arg(&settings);
        run_to_end(&mut format, "the formatting of Kafka's storage")?;
        let mut process = ServerProcess::start("Kafka", java("kafka.Kafka").arg(&settings))?;
        process.wait_until(|| {
            let mut list = namespace.command("kcat");
            list.args(["-L", "-m", "1", "-b", &broker()]);
            list.output().is_ok_and(|output| output.status.success())
        })?;
        Ok(Self { testbed, programs: programs.to_owned(), _process: process, folder })
    }

    /// File of the messages to send, each a line.
    pub(crate) fn lines(&self) -> PathBuf {
        self.folder.path().join("lines")
    }

    /// Sends all messages to the topic, and receives them. Returns how long each took, from the start
    /// of a client to its end.
    ///
    /// # Errors
    /// If a client fails, and if a message comes back changed.
    pub(crate) fn exchange(&self, run: &ClientRun<'_>) -> Result<[Duration; 2], LabError> {
        let produced = self.time(run, true)?;
        let consumed = self.time(run, false)?;
        // The linked client compares its messages itself.
        if run.client == KafkaClient::Kcat {
            let read = |path: PathBuf| fs::read(&path).map_err(LabError::file(&path));
            if read(self.lines())? != read(self.received())? {
                let name = run.stack.name();
                return Err(LabError::Config(format!("{name}: messages came back changed")));
            }
        }
        Ok([produced, consumed])
    }

    fn received(&self) -> PathBuf {
        self.folder.path().join("received")
    }

    fn time(&self, run: &ClientRun<'_>, produces: bool) -> Result<Duration, LabError> {
        let testbed = self.testbed;
        let stack = ProgramStack::prepare(testbed, run.stack, testbed.server_core, &[])?;
        let mut command = match run.client {
            KafkaClient::Kcat => self.kcat(run, produces, &stack)?,
            KafkaClient::Linked => self.linked(run, produces, &stack)?,
        };
        let began = Instant::now();
        run_to_end(&mut command, "a client of Kafka")?;
        Ok(began.elapsed())
    }

    fn kcat(
        &self,
        run: &ClientRun<'_>,
        produces: bool,
        stack: &ProgramStack,
    ) -> Result<Command, LabError> {
        let mut command = self.command("sh");
        // Output into a file: nobody else is part of the measurement.
        command.args(["-c", "out=$1; shift; exec \"$@\" >\"$out\"", "sh"]);
        command.arg(if produces { PathBuf::from("/dev/null") } else { self.received() });
        command.args(&stack.prefix);
        command.args(["kcat", "-q", "-b", &broker(), "-t", run.topic, "-p", "0"]);
        match produces {
            true => command.args(["-P", "-l"]).arg(self.lines()),
            false => command.args(["-C", "-o", "beginning", "-e"]),
        };
        Ok(command)
    }

    fn linked(
        &self,
        run: &ClientRun<'_>,
        produces: bool,
        stack: &ProgramStack,
    ) -> Result<Command, LabError> {
        let name = if run.stack.is_kernel() { "kafka_client_kernel" } else { "kafka_client" };
        let mut command = self.command(self.programs.join(name));
        command.arg(if produces { "produce" } else { "consume" });
        command.args([&broker(), run.topic, &run.messages.to_string()]);
        if let Some(daemon) = &stack.daemon {
            command.env("TIDEGATE_SOCKET", daemon.socket());
        } else if !run.stack.is_kernel() {
            let config = self.folder.path().join("stack.toml");
            let device = &self.testbed.pair.b.device;
            let text = format!(
                "[host]\niface = \"{device}\"\naddress = [\"{TIDEGATE_ADDRESS}/{PREFIX_BITS}\"]\n"
            );
            fs::write(&config, text).map_err(LabError::file(&config))?;
            command.env("TIDEGATE_CONFIG", config);
        }
        Ok(command)
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let testbed = self.testbed;
        testbed.pair.b.namespace.command_on_core(testbed.server_core, program)
    }
}

fn broker() -> String {
    format!("{CLIENT_ADDRESS}:{PORT}")
}
