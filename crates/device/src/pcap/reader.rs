//! Reading capture files: classic pcap and pcapng, both byte orders.
//!
//! Formats: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng. Files are untrusted, so every
//! length is checked before use, and memory is bounded for any file.

use std::io::{self, Read};

use tidegate_wire::Medium;

use super::PcapError;

/// Longest packet that is read, in bytes: the largest that tcpdump writes.
pub const MAX_PACKET_BYTES: usize = 262_144;

/// Longest block of a pcapng file in bytes: a packet and its options.
const MAX_BLOCK_BYTES: usize = MAX_PACKET_BYTES + 65_536;

/// Maximum number of interfaces of a pcapng section.
const MAX_INTERFACES: usize = 4096;

/// One packet of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Capture time in nanoseconds since 1970.
    pub time_ns: u64,
    /// Captured bytes.
    pub data: &'a [u8],
    /// Original length of the packet in bytes.
    pub original_bytes: usize,
}

#[derive(Clone, Copy)]
enum ByteOrder {
    Little,
    Big,
}

impl ByteOrder {
    fn u16(self, bytes: [u8; 2]) -> u16 {
        match self {
            Self::Little => u16::from_le_bytes(bytes),
            Self::Big => u16::from_be_bytes(bytes),
        }
    }

    fn u32(self, bytes: [u8; 4]) -> u32 {
        match self {
            Self::Little => u32::from_le_bytes(bytes),
            Self::Big => u32::from_be_bytes(bytes),
        }
    }

    fn u32_at(self, bytes: &[u8], at: usize) -> Option<u32> {
        Some(self.u32(bytes.get(at..)?.first_chunk().copied()?))
    }

    fn u16_at(self, bytes: &[u8], at: usize) -> Option<u16> {
        Some(self.u16(bytes.get(at..)?.first_chunk().copied()?))
    }
}

enum Format {
    Classic {
        medium: Medium,
        /// Nanoseconds per unit of the second time field.
        unit_ns: u32,
    },
    Pcapng {
        interfaces: Vec<Interface>,
    },
}

struct Interface {
    medium: Medium,
    snap_bytes: usize,
    /// Timestamp units per second.
    units_per_second: u64,
}

/// Reads the packets of a capture file in order.
///
/// # Examples
/// ```no_run
/// use std::fs::File;
/// use tidegate_device::pcap::Reader;
///
/// let mut reader = Reader::new(File::open("capture.pcap")?)?;
/// while let Some(record) = reader.next_record()? {
///     println!("{} ns: {} bytes", record.time_ns, record.original_bytes);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reader<R> {
    source: R,
    order: ByteOrder,
    format: Format,
    /// Bytes read so far, for the offset in errors.
    offset: u64,
    buffer: Vec<u8>,
}

// Block types of pcapng.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;

impl<R: Read> Reader<R> {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// When the file is not a capture, or its link type is neither Ethernet nor bare IP.
    pub fn new(source: R) -> Result<Self, PcapError> {
        let format = Format::Pcapng { interfaces: Vec::new() };
        let mut reader =
            Self { source, order: ByteOrder::Little, format, offset: 0, buffer: Vec::new() };
        let Some(magic) = reader.array_or_end::<4>()? else {
            return Err(PcapError::Format { offset: 0, problem: "the file is empty".into() });
        };
        let classic = |order, unit_ns| (order, Some(unit_ns));
        let (order, unit_ns) = match u32::from_le_bytes(magic) {
            0xa1b2_c3d4 => classic(ByteOrder::Little, 1000),
            0xa1b2_3c4d => classic(ByteOrder::Little, 1),
            0xd4c3_b2a1 => classic(ByteOrder::Big, 1000),
            0x4d3c_b2a1 => classic(ByteOrder::Big, 1),
            SECTION_HEADER => (ByteOrder::Little, None),
            other => {
                let problem =
                    format!("0x{other:08x} is not the magic number of a pcap or pcapng file");
                return Err(PcapError::Format { offset: 0, problem });
            }
        };
        reader.order = order;
        match unit_ns {
            Some(unit_ns) => reader.read_classic_header(unit_ns)?,
            None => {
                reader.read_section_header()?;
                reader.read_first_interface()?;
            }
        }
        Ok(reader)
    }

    /// Header that packets begin with.
    pub fn medium(&self) -> Medium {
        match &self.format {
            Format::Classic { medium, .. } => *medium,
            // A file without an interface has no packets either.
            Format::Pcapng { interfaces } => {
                interfaces.first().map_or(Medium::Ethernet, |interface| interface.medium)
            }
        }
    }

    /// Offset of the next packet in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next packet; `None` at the end of the file.
    ///
    /// # Errors
    /// When the file is damaged or truncated; the error has the offset. No further packet can be
    /// read then.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, PcapError> {
        match self.format {
            Format::Classic { unit_ns, .. } => self.next_classic(unit_ns),
            Format::Pcapng { .. } => self.next_pcapng(),
        }
    }

    fn invalid<T>(&self, problem: impl Into<String>) -> Result<T, PcapError> {
        Err(PcapError::Format { offset: self.offset, problem: problem.into() })
    }

    /// Reads exactly `N` bytes; `None` when the file ends before the first.
    fn array_or_end<const N: usize>(&mut self) -> Result<Option<[u8; N]>, PcapError> {
        let mut bytes = [0; N];
        let mut filled = 0;
        while filled < N {
            match self.source.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return self.invalid("the file ends in the middle of a header"),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(PcapError::Read { offset: self.offset, source }),
            }
        }
        self.offset += N as u64;
        Ok(Some(bytes))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PcapError> {
        match self.array_or_end()? {
            Some(bytes) => Ok(bytes),
            None => self.invalid("the file ends where a header should be"),
        }
    }

    /// Reads `len` bytes into the buffer; the caller has checked the length.
    fn fill(&mut self, len: usize) -> Result<(), PcapError> {
        self.buffer.resize(len, 0);
        match self.source.read_exact(&mut self.buffer) {
            Ok(()) => {
                self.offset += len as u64;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.invalid(format!("the file ends inside a packet or block of {len} bytes"))
            }
            Err(source) => Err(PcapError::Read { offset: self.offset, source }),
        }
    }

    fn medium_of(&self, link_type: u32) -> Result<Medium, PcapError> {
        match link_type {
            1 => Ok(Medium::Ethernet),
            // LINKTYPE_RAW, its number on OpenBSD and elsewhere, IPV4, IPV6.
            101 | 12 | 14 | 228 | 229 => Ok(Medium::Ip),
            other => self.invalid(format!(
                "the link type is {other}; only Ethernet (1) and bare IP (101) are supported"
            )),
        }
    }

    fn read_classic_header(&mut self, unit_ns: u32) -> Result<(), PcapError> {
        // Version, two unused fields, snap length, link type.
        let header: [u8; 20] = self.array()?;
        let major = self.order.u16([header[0], header[1]]);
        if major != 2 {
            return self
                .invalid(format!("version {major} of pcap is not supported, only version 2"));
        }
        // The upper bits describe frame check sequences.
        let link_type = self.order.u32_at(&header, 16).unwrap_or(0) & 0x03ff_ffff;
        self.format = Format::Classic { medium: self.medium_of(link_type)?, unit_ns };
        Ok(())
    }

    fn next_classic(&mut self, unit_ns: u32) -> Result<Option<Record<'_>>, PcapError> {
        let Some(header) = self.array_or_end::<16>()? else { return Ok(None) };
        let [seconds, fraction, kept, original] =
            [0, 4, 8, 12].map(|at| self.order.u32_at(&header, at).unwrap_or(0));
        if kept as usize > MAX_PACKET_BYTES {
            return self.invalid(too_long(kept));
        }
        self.fill(kept as usize)?;
        let time_ns = u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * u64::from(unit_ns);
        let original_bytes = original as usize;
        Ok(Some(Record { time_ns, data: &self.buffer, original_bytes }))
    }

    /// Reads the rest of a section header block, after its type.
    fn read_section_header(&mut self) -> Result<(), PcapError> {
        let head: [u8; 8] = self.array()?;
        self.order = match self.order.u32_at(&head, 4) {
            _ if head[4..] == [0x4d, 0x3c, 0x2b, 0x1a] => ByteOrder::Little,
            _ if head[4..] == [0x1a, 0x2b, 0x3c, 0x4d] => ByteOrder::Big,
            _ => return self.invalid("the byte-order mark of the section is wrong"),
        };
        let total = self.order.u32_at(&head, 0).unwrap_or(0);
        self.fill_block(total, 12)?;
        let major = self.order.u16_at(&self.buffer, 0);
        if major != Some(1) {
            return self.invalid("only version 1 of pcapng is supported");
        }
        // Interfaces are numbered anew in each section.
        self.format = Format::Pcapng { interfaces: Vec::new() };
        Ok(())
    }

    /// Reads the rest of a block of `total` bytes, of which `read` have been read, without the
    /// trailing length.
    fn fill_block(&mut self, total: u32, read: usize) -> Result<(), PcapError> {
        let total_bytes = total as usize;
        if total_bytes < read + 4 || !total_bytes.is_multiple_of(4) || total_bytes > MAX_BLOCK_BYTES
        {
            return self.invalid(format!("a block has the invalid length of {total} bytes"));
        }
        self.fill(total_bytes - read)?;
        let body = self.buffer.len() - 4;
        if self.order.u32_at(&self.buffer, body) != Some(total) {
            return self.invalid(format!("a block of {total} bytes ends with a different length"));
        }
        self.buffer.truncate(body);
        Ok(())
    }

    /// Reads up to the first interface, so that the medium is known.
    fn read_first_interface(&mut self) -> Result<(), PcapError> {
        while let Some(kind) = self.next_block()? {
            match kind {
                INTERFACE_DESCRIPTION => return self.add_interface(),
                SIMPLE_PACKET | ENHANCED_PACKET => {
                    return self.invalid("a packet precedes the description of its interface");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads a block into the buffer and returns its type.
    fn next_block(&mut self) -> Result<Option<u32>, PcapError> {
        let Some(kind) = self.array_or_end::<4>()? else { return Ok(None) };
        let kind = self.order.u32(kind);
        // The type of a section header reads the same in both byte orders.
        if kind == SECTION_HEADER {
            self.read_section_header()?;
        } else {
            let total = self.array()?;
            self.fill_block(self.order.u32(total), 8)?;
        }
        Ok(Some(kind))
    }

    fn add_interface(&mut self) -> Result<(), PcapError> {
        let (Some(link_type), Some(snap)) =
            (self.order.u16_at(&self.buffer, 0), self.order.u32_at(&self.buffer, 4))
        else {
            return self.invalid("the description of an interface is too short");
        };
        let medium = self.medium_of(link_type.into())?;
        let first = self.medium();
        let units_per_second = match time_resolution(self.order, &self.buffer[8..]) {
            Some(units) => units,
            None => return self.invalid("the time resolution of an interface is out of range"),
        };
        let snap_bytes = if snap == 0 { usize::MAX } else { snap as usize };
        let Format::Pcapng { interfaces } = &mut self.format else { return Ok(()) };
        if interfaces.len() == MAX_INTERFACES {
            return self.invalid(format!("more than {MAX_INTERFACES} interfaces"));
        }
        if !interfaces.is_empty() && medium != first {
            return self.invalid("interfaces of different link types in one file");
        }
        interfaces.push(Interface { medium, snap_bytes, units_per_second });
        Ok(())
    }

    fn next_pcapng(&mut self) -> Result<Option<Record<'_>>, PcapError> {
        loop {
            match self.next_block()? {
                None => return Ok(None),
                Some(INTERFACE_DESCRIPTION) => self.add_interface()?,
                Some(ENHANCED_PACKET) => return self.enhanced_packet().map(Some),
                Some(SIMPLE_PACKET) => return self.simple_packet().map(Some),
                Some(_) => {}
            }
        }
    }

    fn enhanced_packet(&self) -> Result<Record<'_>, PcapError> {
        let [interface, high, low, kept, original] =
            [0, 4, 8, 12, 16].map(|at| self.order.u32_at(&self.buffer, at));
        let (Some(interface), Some(high), Some(low), Some(kept), Some(original)) =
            (interface, high, low, kept, original)
        else {
            return self.invalid("a packet block is too short");
        };
        let Some(interface) = self.interface(interface as usize) else {
            return self.invalid(format!(
                "a packet refers to interface {interface}, which has no description"
            ));
        };
        let units = u64::from(high) << 32 | u64::from(low);
        let time_ns =
            u128::from(units) * 1_000_000_000 / u128::from(interface.units_per_second.max(1));
        let data = self.packet_data(20, kept)?;
        let time_ns = u64::try_from(time_ns).unwrap_or(u64::MAX);
        Ok(Record { time_ns, data, original_bytes: original as usize })
    }

    fn simple_packet(&self) -> Result<Record<'_>, PcapError> {
        let (Some(original), Some(interface)) =
            (self.order.u32_at(&self.buffer, 0), self.interface(0))
        else {
            return self.invalid("a simple packet block is too short, or has no interface");
        };
        let kept = (original as usize).min(interface.snap_bytes);
        let data = self.packet_data(4, u32::try_from(kept).unwrap_or(u32::MAX))?;
        Ok(Record { time_ns: 0, data, original_bytes: original as usize })
    }

    fn interface(&self, index: usize) -> Option<&Interface> {
        match &self.format {
            Format::Pcapng { interfaces } => interfaces.get(index),
            Format::Classic { .. } => None,
        }
    }

    fn packet_data(&self, at: usize, kept: u32) -> Result<&[u8], PcapError> {
        if kept as usize > MAX_PACKET_BYTES {
            return self.invalid(too_long(kept));
        }
        match self.buffer.get(at..).and_then(|rest| rest.get(..kept as usize)) {
            Some(data) => Ok(data),
            None => self.invalid(format!("a packet of {kept} bytes is longer than its block")),
        }
    }
}

fn too_long(kept: u32) -> String {
    format!("a packet of {kept} bytes; the maximum is {MAX_PACKET_BYTES}")
}

/// The option `if_tsresol`: timestamp units per second, a power of ten or of two.
/// Microseconds without the option.
fn time_resolution(order: ByteOrder, mut options: &[u8]) -> Option<u64> {
    const END: u16 = 0;
    const TIME_RESOLUTION: u16 = 9;
    while let (Some(code), Some(len)) = (order.u16_at(options, 0), order.u16_at(options, 2)) {
        let value = options.get(4..)?;
        match code {
            END => break,
            TIME_RESOLUTION => {
                let exponent = *value.first()?;
                return if exponent & 0x80 == 0 {
                    10u64.checked_pow(exponent.into())
                } else {
                    1u64.checked_shl(u32::from(exponent & 0x7f))
                };
            }
            _ => options = value.get(usize::from(len).next_multiple_of(4)..)?,
        }
    }
    Some(1_000_000)
}
