//! Experiment kafka: messages per second between clients on librdkafka and a Kafka broker.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::error::LabError;
use crate::experiments::kernel_best::{FirstPass, Goal, distinct_best};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::apps::StackKind;
use crate::testbed::apps::kafka::{ClientRun, KafkaBroker, KafkaClient};
use crate::testbed::cpu::CoreTicks;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::tcp::choose_cores;

/// Bytes of a message, which the linked client has too.
const MESSAGE_BYTES: usize = 100;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct KafkaConfig {
    /// Messages of each run.
    pub messages: u32,
    /// Number of repetitions; the median counts.
    pub repeats: usize,
    /// Folder of the broker's Java archives and of the linked client.
    pub programs: PathBuf,
}

/// Results of one client on one stack.
struct Row {
    client: KafkaClient,
    stack: StackKind,
    runs: Vec<Run>,
}

/// Messages per second in each direction, and how busy the client's core was.
#[derive(Clone, Copy, Debug)]
struct Run {
    produced_per_s: f64,
    consumed_per_s: f64,
    core_percent: f64,
}

/// Figure of a run.
type Rate = fn(&Run) -> f64;

/// The directions, with their names in figures.
const DIRECTIONS: [(&str, Rate); 2] =
    [("produce", |run| run.produced_per_s), ("consume", |run| run.consumed_per_s)];

/// Produces and consumes messages on the kernel's ways, embedded, and attached to the daemon.
///
/// # Errors
/// If the broker or a client is not installed or fails, and if a message arrives changed.
pub fn run(config: &KafkaConfig) -> Result<Experiment, LabError> {
    for (file, part) in [("kafka_2.13-3.9.1.jar", "broker"), ("kafka_client", "client")] {
        if !config.programs.join(file).exists() {
            let folder = config.programs.display();
            let problem = format!("{folder} has no {part}: scripts/kafka {part} {folder}");
            return Err(LabError::Config(problem));
        }
    }
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let broker = KafkaBroker::start(&testbed, &config.programs)?;
    let lines = broker.lines();
    write_lines(&lines, config.messages).map_err(LabError::file(&lines))?;
    let mut topics = 0;
    let mut measure = |client, stack| {
        topics += 1;
        let topic = format!("tide-{topics}");
        let run = ClientRun { client, stack, topic: &topic, messages: config.messages };
        let before = CoreTicks::read(server_core)?;
        let times = broker.exchange(&run)?;
        let core = CoreTicks::read(server_core)?.since(before);
        let [produced_per_s, consumed_per_s] =
            times.map(|time| f64::from(config.messages) / time.as_secs_f64());
        Ok::<_, LabError>(Run { produced_per_s, consumed_per_s, core_percent: core.busy_percent })
    };

    let ways = StackKind::kernel();
    // The first run on a new broker is slower.
    measure(KafkaClient::Kcat, ways[0])?;
    let progress = Progress::of_part("first pass", 2 * ways.len());
    let (mut passes, mut rows) = (Vec::new(), Vec::new());
    for client in [KafkaClient::Kcat, KafkaClient::Linked] {
        let mut measured = Vec::new();
        for way in ways {
            let run = measure(client, way)?;
            progress.step(format_args!("first pass {}", describe(client, way, &run)));
            measured.push((way, run));
        }
        let of_client = DIRECTIONS.map(|(direction, rate)| {
            let ways = measured.iter().map(|(way, run)| (*way, way.name().to_owned(), rate(run)));
            (client, direction, rate, FirstPass::new(Goal::Highest, ways))
        });
        let kernel = distinct_best(of_client.iter().map(|(.., pass)| pass));
        let stacks = kernel.into_iter().chain([StackKind::Embedded, StackKind::Attached]);
        rows.extend(stacks.map(|stack| Row { client, stack, runs: Vec::new() }));
        passes.extend(of_client);
    }
    drop(progress);
    let progress = Progress::new(rows.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let run = measure(row.client, row.stack)?;
            progress.step(format_args!("{repeat} {}", describe(row.client, row.stack, &run)));
            row.runs.push(run);
        }
    }

    Ok(report(config, &passes, &rows))
}

/// First pass of a client in one direction.
type DirectionPass = (KafkaClient, &'static str, Rate, FirstPass<StackKind>);

fn report(config: &KafkaConfig, passes: &[DirectionPass], rows: &[Row]) -> Experiment {
    let mut result = Experiment::new("kafka");
    for (client, direction, rate, pass) in passes {
        let of = |stack: StackKind| {
            let row = rows.iter().find(|row| row.client == *client && row.stack == stack);
            row.map_or(f64::NAN, |row| row.median(*rate))
        };
        let kernel = of(pass.best());
        for stack in [StackKind::Embedded, StackKind::Attached] {
            let figure = format!("{}_{direction}_ratio_{}", client.name(), stack.name());
            result.compare_with_best(&figure, of(stack) / kernel, pass.rows(kernel));
        }
    }
    result.rows = rows.iter().map(Row::to_json).collect();
    result.columns =
        vec!["client", "way", "produced_per_second", "consumed_per_second", "core_percent"];
    result.note(format!(
        "kcat of Debian's package, unmodified, and a client linked with the C library, both on \
         librdkafka with its defaults, on core 1 with the daemon where there is one; a \
         Kafka broker on kernel sockets on core 0; {} messages of {MESSAGE_BYTES} bytes, \
         each way from the start of the client to its end, compared when they have come back; \
         medians of {}; the kernel's ways as in `apps`",
        config.messages, config.repeats
    ));
    result
}

impl KafkaClient {
    fn name(self) -> &'static str {
        match self {
            Self::Kcat => "kcat",
            Self::Linked => "linked",
        }
    }
}

impl Row {
    fn median(&self, figure: Rate) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn to_json(&self) -> serde_json::Value {
        json!({
            "client": self.client.name(),
            "way": self.stack.name(),
            "produced_per_second": self.median(|run| run.produced_per_s).round(),
            "consumed_per_second": self.median(|run| run.consumed_per_s).round(),
            "core_percent": self.median(|run| run.core_percent).round(),
        })
    }
}

fn describe(client: KafkaClient, stack: StackKind, run: &Run) -> String {
    format!(
        "{:<6} {:<18} {:>8.0} messages/s produced, {:>8.0} consumed",
        client.name(),
        stack.name(),
        run.produced_per_s,
        run.consumed_per_s
    )
}

/// Writes messages, each another.
fn write_lines(path: &Path, messages: u32) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for number in 0..messages {
        writeln!(file, "{number:0MESSAGE_BYTES$}")?;
    }
    file.flush()
}
