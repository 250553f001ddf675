//! The `pcap` device: receives packets from a capture file and writes sent packets to another.
//!
//! [`Reader`] reads classic pcap and pcapng; [`Writer`] writes classic pcap with nanoseconds, which
//! every tool reads.

mod reader;
mod writer;

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_memory::{Arena, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

pub use reader::{MAX_PACKET_BYTES, Reader, Record};
pub(crate) use writer::RECORD_HEADER_BYTES;
pub use writer::Writer;

use crate::{Burst, Capabilities, Device, DeviceCounters};

/// Error of reading or writing a capture file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PcapError {
    /// The file does not exist, or access is denied.
    #[error("cannot open the capture file {}: {source}", path.display())]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Reading failed.
    #[error("cannot read the capture at byte {offset}: {source}")]
    Read {
        /// Offset in the file, in bytes.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Writing failed.
    #[error("cannot write the capture: {0}")]
    Write(io::Error),
    /// The file is damaged or not a capture.
    #[error("the capture is not valid at byte {offset}: {problem}")]
    Format {
        /// Offset in the file, in bytes.
        offset: u64,
        /// Description of the problem.
        problem: String,
    },
}

/// Files of a [`PcapDevice`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcapConfig {
    /// File to receive packets from; `None` for none.
    pub read: Option<PathBuf>,
    /// File to write sent packets to, overwritten; `None` to count and discard them.
    pub write: Option<PathBuf>,
}

impl PcapConfig {
    /// Sets the file to receive packets from.
    pub fn read(self, read: impl Into<Option<PathBuf>>) -> Self {
        Self { read: read.into(), ..self }
    }

    /// Sets the file to write sent packets to.
    pub fn write(self, write: impl Into<Option<PathBuf>>) -> Self {
        Self { write: write.into(), ..self }
    }
}

/// Packets of a capture file, delivered as fast as the caller receives.
///
/// Sent packets go to a second file, with the wall-clock time as timestamp.
pub struct PcapDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
    reader: Option<Reader<BufReader<File>>>,
    writer: Option<Writer<BufWriter<File>>>,
}

impl PcapDevice {
    /// Opens the files.
    ///
    /// # Errors
    /// See [`PcapError`].
    pub fn open(config: &PcapConfig, arena: &mut Arena) -> Result<Self, PcapError> {
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| PcapError::Open { path, source }
        };
        let reader = match &config.read {
            Some(path) => Some(Reader::new(BufReader::new(File::open(path).map_err(fail(path))?))?),
            None => None,
        };
        let medium = reader.as_ref().map_or(Medium::Ethernet, Reader::medium);
        let writer = match &config.write {
            Some(path) => {
                let file = BufWriter::new(File::create(path).map_err(fail(path))?);
                Some(Writer::new(file, medium, MAX_PACKET_BYTES).map_err(PcapError::Write)?)
            }
            None => None,
        };
        let link_bytes = if medium == Medium::Ethernet { 18 } else { 0 };
        Ok(Self {
            capabilities: Capabilities {
                kind: "pcap",
                detail: detail(config),
                medium,
                // Locally administered; a replay has no address of its own.
                mac: if medium == Medium::Ethernet { [2, 0, 0, 0, 0, 1] } else { [0; 6] },
                mtu: (arena.frame_bytes() - usize::from(HEADROOM_BYTES) - link_bytes).min(1500),
                receive_checksum: false,
                transmit_checksum: false,
                segmentation: false,
                queues: 1,
            },
            counters: DeviceCounters::default(),
            reader,
            writer,
        })
    }

    /// Returns true when every packet of the file was read.
    pub fn is_finished(&self) -> bool {
        self.reader.is_none()
    }

    /// Flushes sent packets to the file. Dropping the device also flushes but cannot report
    /// errors.
    ///
    /// # Errors
    /// When writing fails.
    pub fn flush(&mut self) -> Result<(), PcapError> {
        self.writer.as_mut().map_or(Ok(()), Writer::flush).map_err(PcapError::Write)
    }
}

fn detail(config: &PcapConfig) -> String {
    let name = |path: &Option<PathBuf>| {
        path.as_ref().map_or("nothing".to_owned(), |path| path.display().to_string())
    };
    format!("from {} to {}", name(&config.read), name(&config.write))
}

impl Device for PcapDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut taken = 0;
        // Packets that are too long count too, so that no file stalls the caller.
        for _ in 0..quota {
            let Some(reader) = &mut self.reader else { break };
            if arena.available() == 0 {
                break;
            }
            match reader.next_record() {
                Ok(Some(record)) => match arena.alloc_from(record.data) {
                    Some(frame) => {
                        self.counters.received += 1;
                        self.counters.received_bytes += frame.len() as u64;
                        burst.push_back(frame);
                        taken += 1;
                    }
                    None => self.counters.drops.count(DropReason::FrameTooLong),
                },
                Ok(None) => self.reader = None,
                Err(error) => {
                    self.reader = None;
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let time_ns = wall_clock_ns();
        let mut taken = 0;
        while let Some(frame) = burst.pop_front() {
            let written = match &mut self.writer {
                Some(writer) => {
                    let data = arena.bytes(&frame);
                    writer.write(Record { time_ns, data, original_bytes: data.len() })
                }
                None => Ok(()),
            };
            self.counters.transmitted += 1;
            self.counters.transmitted_bytes += frame.len() as u64;
            taken += 1;
            arena.free(frame);
            written?;
        }
        Ok(taken)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        Ok(self.reader.is_none())
    }

    fn counters(&mut self) -> DeviceCounters {
        self.counters.clone()
    }
}

/// Nanoseconds since 1970.
pub(crate) fn wall_clock_ns() -> u64 {
    // A clock before 1970 gives 1970.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
