//! The `pcap` port: packets out of a capture file, and into another.
//!
//! [`Reader`] takes classic pcap and pcapng; [`Writer`] makes classic pcap with
//! nanoseconds, which every tool reads.

mod reader;
mod writer;

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_memory::{Arena, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Medium};

pub use reader::{PACKET_BYTES_MAX, Reader, Record};
pub(crate) use writer::RECORD_HEADER_BYTES;
pub use writer::Writer;

use crate::{Burst, Capabilities, Port, PortCounters};

/// What is wrong with a capture file.
#[derive(Debug, thiserror::Error)]
pub enum PcapError {
    /// The file does not exist, or may not be read or written.
    #[error("cannot open the capture file {}: {source}", path.display())]
    Open {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading failed.
    #[error("cannot read the capture at byte {offset}: {source}")]
    Read {
        /// Where in the file.
        offset: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Writing failed.
    #[error("cannot write the capture: {0}")]
    Write(io::Error),
    /// The file is damaged, or not a capture.
    #[error("the capture is not valid at byte {offset}: {problem}")]
    Format {
        /// Where in the file.
        offset: u64,
        /// What was found there.
        problem: String,
    },
}

/// How to open a [`PcapPort`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PcapConfig {
    /// The file whose packets arrive; `None` for none.
    pub read: Option<PathBuf>,
    /// The file for packets that are sent, made anew; `None` to count and
    /// forget them.
    pub write: Option<PathBuf>,
}

/// Packets of a capture file, as fast as they are asked for.
///
/// Packets that are sent go to a second file, stamped with the time of the
/// wall clock.
pub struct PcapPort {
    capabilities: Capabilities,
    counters: PortCounters,
    reader: Option<Reader<BufReader<File>>>,
    writer: Option<Writer<BufWriter<File>>>,
}

impl PcapPort {
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
                Some(Writer::new(file, medium, PACKET_BYTES_MAX).map_err(PcapError::Write)?)
            }
            None => None,
        };
        let link_bytes = if medium == Medium::Ethernet { 18 } else { 0 };
        Ok(Self {
            capabilities: Capabilities {
                kind: "pcap",
                detail: detail(config),
                medium,
                // Locally administered; a replay has no station of its own.
                mac: if medium == Medium::Ethernet { [2, 0, 0, 0, 0, 1] } else { [0; 6] },
                mtu: (arena.frame_bytes() - usize::from(HEADROOM_BYTES) - link_bytes).min(1500),
                receive_checksum: false,
                transmit_checksum: false,
                segmentation: false,
                queues: 1,
            },
            counters: PortCounters::default(),
            reader,
            writer,
        })
    }

    /// Whether every packet of the file was read.
    pub fn is_finished(&self) -> bool {
        self.reader.is_none()
    }

    /// Pushes what was sent out to the file. Dropping the port does it too but
    /// cannot tell of errors.
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

impl Port for PcapPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut taken = 0;
        // Packets that are too long count too, so that no file holds us up.
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

    fn counters(&mut self) -> PortCounters {
        self.counters.clone()
    }
}

/// Nanoseconds since 1970.
pub(crate) fn wall_clock_ns() -> u64 {
    // A clock before 1970 stamps as 1970.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
