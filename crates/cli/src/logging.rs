//! Log of the commands: lines of text, JSON, or fields of the journal.

use std::io;

use clap::{Args, ValueEnum};
use tracing::Level;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::Failure;

/// Options of the log.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct LoggingOptions {
    /// Least severe messages to log
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "LEVEL",
        default_value_t = LogLevel::Info,
        help_heading = "Log"
    )]
    log_level: LogLevel,
    /// Form of the log
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t = LogFormat::Text,
        help_heading = "Log"
    )]
    log_format: LogFormat,
}

/// Severity of a message.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogLevel {
    /// Errors that end the command, or leave a change undone
    Error,
    /// Problems that need attention
    Warn,
    /// Events
    Info,
    /// Details
    Debug,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// A line a message on standard error
    Text,
    /// An object a line on standard error, with time and level
    Json,
    /// Fields of the journal, with priorities; needs systemd-journald
    Journald,
}

impl LoggingOptions {
    /// Starts the log of this process.
    ///
    /// # Errors
    /// The journal cannot be reached.
    pub(crate) fn start(self) -> Result<(), Failure> {
        let level = LevelFilter::from_level(match self.log_level {
            LogLevel::Error => Level::ERROR,
            LogLevel::Warn => Level::WARN,
            LogLevel::Info => Level::INFO,
            LogLevel::Debug => Level::DEBUG,
        });
        // The reader of standard error may have gone: a failed write is no error.
        let lines =
            || tracing_subscriber::fmt::layer().with_writer(io::stderr).log_internal_errors(false);
        let registry = tracing_subscriber::registry().with(level);
        match self.log_format {
            LogFormat::Text => {
                let plain = lines().without_time().with_level(false).with_target(false);
                registry.with(plain.with_ansi(false)).try_init()?;
            }
            LogFormat::Json => {
                registry.with(lines().json().flatten_event(true).with_target(false)).try_init()?;
            }
            LogFormat::Journald => {
                let journal = tracing_journald::layer().map_err(|error| {
                    format!(
                        "--log-format journald: {error}; is systemd-journald running? \
                         --log-format text needs none"
                    )
                })?;
                registry.with(journal).try_init()?;
            }
        }
        Ok(())
    }
}
