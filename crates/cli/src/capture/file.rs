//! Capture files in pcapng: frames with their direction and what became of them.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness, PcapError};
use tidegate::capture::{CaptureCounts, CaptureDirection, CaptureRecord};

use super::serve::CaptureInfo;
use crate::Failure;
use crate::output::OutputClosed;

/// Bits of `epb_flags` for the direction.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
/// Resolution of times: nanoseconds.
const NANOSECONDS: u8 = 9;

/// Files to write, one after another.
pub(super) struct FileSeries {
    /// Path as the user gives it; `-` is standard output.
    path: PathBuf,
    /// Size after which the next file begins.
    max_bytes: Option<u64>,
    /// Number of files; then the first one is written again.
    max_files: Option<u32>,
    interfaces: Vec<InterfaceDescriptionBlock<'static>>,
    /// Files begun before the current one.
    begun: u32,
    file: PcapNgWriter<Output>,
}

/// Open file that counts its bytes.
struct Output {
    to: BufWriter<Box<dyn Write>>,
    written: u64,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl FileSeries {
    /// Creates the first file.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub(super) fn create(
        path: &Path,
        (max_bytes, max_files): (Option<u64>, Option<u32>),
        info: &CaptureInfo,
        (snap_bytes, filter): (usize, &str),
    ) -> Result<Self, Failure> {
        let link = if info.is_ip { DataLink::RAW } else { DataLink::ETHERNET };
        let interface = |core: usize| {
            let mut options = vec![
                InterfaceDescriptionOption::IfName(format!("core{core}").into()),
                InterfaceDescriptionOption::IfDescription(
                    format!("network core {core} of {} (pid {})", info.program, info.pid).into(),
                ),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ];
            if !filter.is_empty() {
                // A filter begins with its format: 0 is an expression.
                let filter = format!("\0{filter}").into_bytes();
                options.push(InterfaceDescriptionOption::IfFilter(filter.into()));
            }
            InterfaceDescriptionBlock { linktype: link, snaplen: snap_bytes as u32, options }
        };
        let interfaces: Vec<_> = (0..info.cores).map(interface).collect();
        let file = open(&name(path, 0, max_bytes.and(max_files)), &interfaces)?;
        Ok(Self { path: path.to_owned(), max_bytes, max_files, interfaces, begun: 0, file })
    }

    /// Writes a record of network core `core`, with a comment.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(
        &mut self,
        core: usize,
        time: Duration,
        record: &CaptureRecord<'_>,
        comment: &str,
    ) -> Result<(), Failure> {
        if self.max_bytes.is_some_and(|max| self.file.get_ref().written >= max) {
            self.begin_next()?;
        }
        let direction = match record.direction {
            CaptureDirection::Transmitted => OUTBOUND,
            _ => INBOUND,
        };
        let mut options = vec![
            EnhancedPacketOption::Comment(comment.into()),
            EnhancedPacketOption::Flags(direction),
        ];
        if record.lost > 0 {
            options.push(EnhancedPacketOption::DropCount(record.lost.into()));
        }
        let block = EnhancedPacketBlock {
            interface_id: core as u32,
            timestamp: time,
            original_len: record.original_bytes as u32,
            data: Cow::Borrowed(record.data),
            options,
        };
        self.file.write_pcapng_block(block).map_err(failure)?;
        Ok(())
    }

    fn begin_next(&mut self) -> Result<(), Failure> {
        self.flush()?;
        self.begun += 1;
        let number = self.max_files.map_or(self.begun, |files| self.begun % files.max(1));
        self.file = open(&name(&self.path, number, self.max_files), &self.interfaces)?;
        Ok(())
    }

    /// Writes out what is buffered.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        self.file.get_mut().flush().map_err(|error| failure(PcapError::IoError(error)))
    }

    /// Writes the statistics of each core, and what is buffered.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn finish(
        &mut self,
        time: Duration,
        counts: &[CaptureCounts],
    ) -> Result<(), Failure> {
        for (core, counts) in counts.iter().enumerate() {
            let block = InterfaceStatisticsBlock {
                interface_id: core as u32,
                timestamp: time.as_nanos() as u64,
                options: vec![
                    InterfaceStatisticsOption::IsbFilterAccept(counts.selected),
                    InterfaceStatisticsOption::IsbIfDrop(counts.lost),
                ],
            };
            self.file.write_pcapng_block(block).map_err(failure)?;
        }
        self.flush()
    }
}

/// Name of file `number` of a series; numbers of a ring have the same length.
fn name(path: &Path, number: u32, files: Option<u32>) -> PathBuf {
    let suffix = match files {
        Some(files) => {
            let digits = files.saturating_sub(1).max(1).ilog10() as usize + 1;
            format!("{number:0digits$}")
        }
        None if number == 0 => return path.to_owned(),
        None => number.to_string(),
    };
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn open(
    path: &Path,
    interfaces: &[InterfaceDescriptionBlock<'static>],
) -> Result<PcapNgWriter<Output>, Failure> {
    let to: Box<dyn Write> = if path == Path::new("-") {
        Box::new(io::stdout())
    } else {
        Box::new(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?)
    };
    let section = SectionHeaderBlock {
        // The order of bytes in which the times of statistics are right.
        endianness: Endianness::Big,
        options: vec![SectionHeaderOption::UserApplication(
            format!("tidegate {}", tidegate_program::VERSION).into(),
        )],
        ..SectionHeaderBlock::default()
    };
    let output = Output { to: BufWriter::new(to), written: 0 };
    let mut file = PcapNgWriter::with_section_header(output, section).map_err(failure)?;
    for interface in interfaces {
        file.write_pcapng_block(interface.clone()).map_err(failure)?;
    }
    Ok(file)
}

fn failure(error: PcapError) -> Failure {
    match error {
        PcapError::IoError(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            OutputClosed.into()
        }
        error => format!("cannot write the capture: {error}").into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_series_have_numbers() {
        let path = Path::new("/tmp/a.pcapng");
        for (number, files, expected) in [
            (0, None, "/tmp/a.pcapng"),
            (12, None, "/tmp/a.pcapng12"),
            (3, Some(4), "/tmp/a.pcapng3"),
            (3, Some(11), "/tmp/a.pcapng03"),
        ] {
            assert_eq!(name(path, number, files), Path::new(expected));
        }
    }
}
