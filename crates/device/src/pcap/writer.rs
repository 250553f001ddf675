//! Writing capture files: classic pcap with nanoseconds.

use std::io::{self, Write};

use tidegate_wire::Medium;

use super::Record;

/// Writes packets to a capture file, in the byte order of this machine.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
    snap_bytes: usize,
    written_bytes: u64,
}

/// Bytes of the file header.
const FILE_HEADER_BYTES: usize = 24;
/// Bytes of the header of each packet.
pub(crate) const RECORD_HEADER_BYTES: usize = 16;

impl<W: Write> Writer<W> {
    /// Writes the file header; each packet is cut to at most `snap_bytes`.
    ///
    /// # Errors
    /// When writing fails.
    pub fn new(mut to: W, medium: Medium, snap_bytes: usize) -> io::Result<Self> {
        let snap = u32::try_from(snap_bytes).unwrap_or(u32::MAX);
        let link_type: u32 = match medium {
            Medium::Ethernet => 1,
            Medium::Ip => 101,
        };
        let mut header = Vec::with_capacity(FILE_HEADER_BYTES);
        // The magic of files with nanoseconds, version 2.4, two zero fields.
        header.extend(0xa1b2_3c4du32.to_ne_bytes());
        header.extend(2u16.to_ne_bytes());
        header.extend(4u16.to_ne_bytes());
        header.extend([0; 8]);
        header.extend(snap.to_ne_bytes());
        header.extend(link_type.to_ne_bytes());
        to.write_all(&header)?;
        Ok(Self { to, snap_bytes, written_bytes: header.len() as u64 })
    }

    /// Writes one packet, truncated to the snap length.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&mut self, packet: Record<'_>) -> io::Result<()> {
        let kept = &packet.data[..packet.data.len().min(self.snap_bytes)];
        let header = record_header(packet.time_ns, kept.len(), packet.original_bytes);
        self.to.write_all(&header)?;
        self.to.write_all(kept)?;
        self.written_bytes += (RECORD_HEADER_BYTES + kept.len()) as u64;
        Ok(())
    }

    /// Bytes written so far, headers included.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Flushes all packets to the file.
    ///
    /// # Errors
    /// When writing fails.
    pub fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }

    /// Flushes all packets and returns the file.
    ///
    /// # Errors
    /// When writing fails.
    pub fn into_inner(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

fn record_header(time_ns: u64, kept: usize, original: usize) -> [u8; RECORD_HEADER_BYTES] {
    let word = |number: u64| u32::try_from(number).unwrap_or(u32::MAX).to_ne_bytes();
    let mut header = [0; RECORD_HEADER_BYTES];
    let fields = [time_ns / 1_000_000_000, time_ns % 1_000_000_000, kept as u64, original as u64];
    for (to, field) in header.chunks_exact_mut(4).zip(fields) {
        to.copy_from_slice(&word(field));
    }
    header
}
