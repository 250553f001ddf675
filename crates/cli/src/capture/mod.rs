//! `tidegate capture`: frames of a running server or daemon, with what became of them.

mod file;
mod filter;
mod programs;
mod serve;
mod session;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use tidegate::capture::{CaptureDirection, CaptureRecord, MAX_SNAP_BYTES};
use tidegate_device::trace::Summary;
use tidegate_wire::{DropReason, Medium};

use self::file::FileSeries;
use self::programs::Programs;
use self::session::Session;
use crate::output::{log, print_line};
use crate::process::stop_flag;
use crate::{Failure, control};

pub(crate) use self::trace::Trace;

pub(crate) use self::serve::{CaptureInfo, CaptureSessions, CaptureSettings, info};

/// Time between two searches for new records while there is none.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Flags of `capture`.
#[derive(Args)]
#[command(
    override_usage = "tidegate capture [OPTIONS] SOCKET [FILTER]...",
    after_help = "\
Without -w each frame is printed as a line: time, < received or > transmitted, length, summary,
and the drop reason if the stack has dropped the frame.

Examples:
  tidegate capture /run/dns.ctl -c 20 udp port 53
  tidegate capture /run/dns.ctl -w flood.pcapng -C 100 -W 10 -s 128
  tidegate capture /run/dns.ctl -w - tcp | tshark -r -"
)]
pub(crate) struct Capture {
    /// Control socket of the server or daemon, as given to its --control
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Write the frames to this file in pcapng, or to standard output if it is "-"
    #[arg(short, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Begin another file after this many million bytes
    #[arg(short = 'C', value_name = "SIZE", requires = "write")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    size: Option<u64>,
    /// With -C: number of files, after which the first one is written again
    #[arg(short = 'W', value_name = "COUNT", requires = "size")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    files: Option<u32>,
    /// End after this many frames
    #[arg(short, value_name = "COUNT")]
    count: Option<u64>,
    /// Bytes of each frame to copy
    #[arg(short, value_name = "BYTES", default_value_t = MAX_SNAP_BYTES as u32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    snap_bytes: u32,
    /// Memory for frames that wait for this command, in MiB for each network core; a power of two
    #[arg(long, value_name = "MIB", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    buffer: u32,
    /// Filter expression of tcpdump, see pcap-filter(7); all frames without one
    #[arg(value_name = "FILTER", trailing_var_arg = true)]
    filter: Vec<String>,
}

impl Capture {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let stop = stop_flag(None)?;
        if self.size.is_some() && self.write.as_deref() == Some(Path::new("-")) {
            return Err("-C needs a file: standard output is one".into());
        }
        let info = control::capture_info(&self.socket)?;
        let medium = if info.is_ip { Medium::Ip } else { Medium::Ethernet };
        let expression = self.filter.join(" ");
        let program = match expression.is_empty() {
            true => Vec::new(),
            false => filter::compile(&expression, medium)?,
        };
        let snap_bytes = self.snap_bytes as usize;
        let ring_bytes = self.buffer as usize * 1024 * 1024;
        let mut files = self
            .write
            .as_ref()
            .map(|path| {
                let limits = (self.size.map(|size| size * 1_000_000), self.files);
                FileSeries::create(path, limits, &info, (snap_bytes, &expression))
            })
            .transpose()?;
        let mut session =
            Session::start(&self.socket, &info, &program, (snap_bytes, false), ring_bytes)?;
        let (cores, program, pid) = (info.cores, &info.program, info.pid);
        log(format_args!("capturing on {cores} network cores of {program} (pid {pid})"));
        let mut programs = info.has_programs.then(|| Programs::new(self.socket.clone(), medium));
        let offset_ns = session.wall_offset_ns();
        let mut left = self.count.unwrap_or(u64::MAX);
        let mut taken = 0_u64;
        while left > 0 {
            if stop.load(Ordering::Relaxed) {
                session.end();
            }
            // In this order, so that what the server sent at last is read.
            let has_ended = session.has_ended();
            let read = session.read(|core, record| {
                let time = Session::wall_time(offset_ns, record.time_ns);
                let program = programs.as_mut().and_then(|programs| programs.find(record));
                match &mut files {
                    Some(files) => {
                        files.write(core, time, record, &comment(&info, record, program))?;
                    }
                    None => print_record(medium, time, (&info, program), record)?,
                }
                (left, taken) = (left - 1, taken + 1);
                Ok(left > 0)
            })?;
            if read > 0 {
                continue;
            }
            if let Some(files) = &mut files {
                files.flush()?;
            }
            if has_ended {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let counts = session.counts();
        if let Some(files) = &mut files {
            let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
            files.finish(now, &counts)?;
        }
        let lost: u64 = counts.iter().map(|core| core.lost).sum();
        log(format_args!(
            "{taken} frames captured, {lost} copies lost because this command was slow"
        ));
        Ok(())
    }
}

/// Name of the drop reason of a record.
fn drop_reason<'i>(info: &'i CaptureInfo, record: &CaptureRecord<'_>) -> Option<&'i str> {
    let reason = record.drop_reason?;
    Some(info.drop_reasons.get(usize::from(reason)).map_or("unknown", String::as_str))
}

/// Comment of a record in a file.
fn comment(info: &CaptureInfo, record: &CaptureRecord<'_>, program: Option<&str>) -> String {
    let direction = match record.direction {
        CaptureDirection::Received => "received",
        CaptureDirection::Transmitted => "transmitted",
        CaptureDirection::Loopback => "received from the own address",
        CaptureDirection::Notified => "program notified",
    };
    let dropped = match drop_reason(info, record) {
        Some(name) => match DropReason::from_name(name) {
            Some(reason) => format!("; dropped: {name}: {}", reason.sentence()),
            None => format!("; dropped: {name}"),
        },
        None => String::new(),
    };
    let program = program.map(|program| format!("; program: {program}")).unwrap_or_default();
    format!("{direction}{dropped}{program}")
}

fn print_record(
    medium: Medium,
    time: Duration,
    (info, program): (&CaptureInfo, Option<&str>),
    record: &CaptureRecord<'_>,
) -> Result<(), Failure> {
    let direction = if record.direction == CaptureDirection::Transmitted { '>' } else { '<' };
    let (seconds, micros) = (time.as_secs(), time.subsec_micros());
    let (length, summary) = (record.original_bytes, Summary::new(medium, record.data));
    let dropped = drop_reason(info, record).map(|name| format!(" dropped: {name}"));
    let dropped = dropped.unwrap_or_default();
    let program = program.map(|program| format!(" program: {program}")).unwrap_or_default();
    print_line!("{seconds}.{micros:06} {direction} {length} {summary}{dropped}{program}")
}
