//! Capture files: reading, replaying, writing, and damaged files.

use std::fs;
use std::io::Read;

use proptest::prelude::*;
use tidegate_device::pcap::{
    MAX_PACKET_BYTES, PcapConfig, PcapDevice, PcapError, Reader, Record, Writer,
};
use tidegate_device::{Burst, Device, Medium};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_wire::DropReason;

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

/// Packet as the tests compare it: time in nanoseconds, data, original length in bytes.
type Packet = (u64, Vec<u8>, usize);

fn read_all(source: impl Read) -> Result<(Medium, Vec<Packet>), PcapError> {
    let mut reader = Reader::new(source)?;
    let mut packets = Vec::new();
    while let Some(record) = reader.next_record()? {
        packets.push((record.time_ns, record.data.to_vec(), record.original_bytes));
    }
    Ok((reader.medium(), packets))
}

/// Builder of capture files in either byte order.
#[derive(Clone, Copy)]
struct FileBuilder {
    big_endian: bool,
}

impl FileBuilder {
    fn u32(self, number: u32) -> [u8; 4] {
        if self.big_endian { number.to_be_bytes() } else { number.to_le_bytes() }
    }

    fn u16(self, number: u16) -> [u8; 2] {
        if self.big_endian { number.to_be_bytes() } else { number.to_le_bytes() }
    }

    fn classic(self, magic: u32, link_type: u32) -> Vec<u8> {
        let mut file = self.u32(magic).to_vec();
        file.extend(self.u16(2));
        file.extend(self.u16(4));
        file.extend([0; 8]);
        file.extend(self.u32(65535));
        file.extend(self.u32(link_type));
        file
    }

    fn record(self, seconds: u32, fraction: u32, kept: u32, original: u32) -> Vec<u8> {
        [seconds, fraction, kept, original].into_iter().flat_map(|n| self.u32(n)).collect()
    }

    fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let total = 12 + body.len().next_multiple_of(4) as u32;
        let mut block = self.u32(kind).to_vec();
        block.extend(self.u32(total));
        block.extend(body);
        block.resize(total as usize - 4, 0);
        block.extend(self.u32(total));
        block
    }

    fn section(self) -> Vec<u8> {
        let mut body = self.u32(0x1a2b_3c4d).to_vec();
        body.extend(self.u16(1));
        body.extend(self.u16(0));
        body.extend([0xff; 8]);
        self.block(0x0a0d_0d0a, &body)
    }

    fn interface(self, link_type: u16, snap: u32, options: &[u8]) -> Vec<u8> {
        let mut body = self.u16(link_type).to_vec();
        body.extend([0; 2]);
        body.extend(self.u32(snap));
        body.extend(options);
        self.block(1, &body)
    }

    fn enhanced(self, interface: u32, units: u64, data: &[u8], original: u32) -> Vec<u8> {
        let fields = [interface, (units >> 32) as u32, units as u32, data.len() as u32, original];
        let mut body: Vec<u8> = fields.into_iter().flat_map(|n| self.u32(n)).collect();
        body.extend(data);
        self.block(6, &body)
    }
}

const BOTH_BYTE_ORDERS: [FileBuilder; 2] =
    [FileBuilder { big_endian: false }, FileBuilder { big_endian: true }];

#[test]
fn reads_pcap_in_both_byte_orders_and_units() {
    for builder in BOTH_BYTE_ORDERS {
        for (magic, time_ns) in [(0xa1b2_c3d4, 7_000_005_000), (0xa1b2_3c4d, 7_000_000_005)] {
            let mut file = builder.classic(magic, 101);
            file.extend(builder.record(7, 5, 3, 99));
            file.extend(b"abc");
            let (medium, packets) = read_all(&file[..]).unwrap();
            assert_eq!(medium, Medium::Ip);
            assert_eq!(packets, [(time_ns, b"abc".to_vec(), 99)]);
        }
    }
}

#[test]
fn reads_pcapng_in_both_byte_orders() {
    for builder in BOTH_BYTE_ORDERS {
        let mut file = builder.section();
        file.extend(builder.block(0xbad, b"a block that nobody knows"));
        file.extend(builder.interface(1, 4, &[]));
        // if_tsresol: nanoseconds.
        let mut options = builder.u16(9).to_vec();
        options.extend(builder.u16(1));
        options.extend([9, 0, 0, 0]);
        file.extend(builder.interface(1, 0, &options));
        file.extend(builder.enhanced(0, 5_000_000_000, b"microseconds", 12));
        file.extend(builder.enhanced(1, 5_000_000_000, b"nanoseconds", 500));
        let mut simple = builder.u32(9).to_vec();
        simple.extend(b"simp");
        file.extend(builder.block(3, &simple));
        let (medium, packets) = read_all(&file[..]).unwrap();
        assert_eq!(medium, Medium::Ethernet);
        assert_eq!(
            packets,
            [
                (5_000_000_000_000, b"microseconds".to_vec(), 12),
                (5_000_000_000, b"nanoseconds".to_vec(), 500),
                (0, b"simp".to_vec(), 9),
            ]
        );
    }
}

/// Error message of the reader for a file.
fn read_error(file: &[u8]) -> String {
    read_all(file).unwrap_err().to_string()
}

#[test]
fn rejects_damaged_files_with_byte_offset() {
    let builder = FileBuilder { big_endian: false };
    assert!(read_error(b"").contains("empty"));
    assert!(read_error(b"\x7fELF").contains("byte 0"));
    assert!(read_error(&builder.classic(0xa1b2_c3d4, 105)).contains("link type is 105"));

    let mut cut = builder.classic(0xa1b2_c3d4, 1);
    cut.extend(&builder.record(0, 0, 10, 10)[..9]);
    assert!(read_error(&cut).contains("byte 24"), "{}", read_error(&cut));

    let mut short = builder.classic(0xa1b2_c3d4, 1);
    short.extend(builder.record(0, 0, 10, 10));
    short.extend(b"too few");
    assert!(read_error(&short).contains("byte 40"), "{}", read_error(&short));

    let mut huge = builder.classic(0xa1b2_c3d4, 1);
    huge.extend(builder.record(0, 0, u32::MAX, u32::MAX));
    assert!(read_error(&huge).contains(&MAX_PACKET_BYTES.to_string()));

    let mut unknown = builder.section();
    unknown.extend(builder.interface(1, 0, &[]));
    unknown.extend(builder.enhanced(3, 0, b"", 0));
    assert!(read_error(&unknown).contains("interface 3"));

    let mut early = builder.section();
    early.extend(builder.enhanced(0, 0, b"", 0));
    assert!(read_error(&early).contains("precedes"));

    let mut mixed = builder.section();
    mixed.extend(builder.interface(1, 0, &[]));
    mixed.extend(builder.interface(101, 0, &[]));
    assert!(read_error(&mixed).contains("different link types"));

    for total in [0, 8, 13, u32::MAX - 3] {
        let mut block = builder.section();
        block.extend(builder.u32(1));
        block.extend(builder.u32(total));
        block.extend([0; 64]);
        assert!(read_error(&block).contains(&total.to_string()), "{total}");
    }
}

proptest! {
    #[test]
    fn written_files_read_back(
        packets in proptest::collection::vec(
            (0u64..4_000_000_000_000_000_000, proptest::collection::vec(any::<u8>(), 0..200)),
            0..20,
        ),
        snap in 1usize..250,
        ip: bool,
    ) {
        let medium = if ip { Medium::Ip } else { Medium::Ethernet };
        let mut writer = Writer::new(Vec::new(), medium, snap).unwrap();
        for (time_ns, data) in &packets {
            writer.write(Record { time_ns: *time_ns, data, original_bytes: data.len() }).unwrap();
        }
        let expected: Vec<Packet> = packets
            .iter()
            .map(|(time, data)| (*time, data[..data.len().min(snap)].to_vec(), data.len()))
            .collect();
        let written_bytes = writer.written_bytes();
        let file = writer.into_inner().unwrap();
        prop_assert_eq!(written_bytes, file.len() as u64);
        prop_assert_eq!(read_all(&file[..]).unwrap(), (medium, expected));
    }

    #[test]
    fn reading_any_file_terminates(
        file in proptest::collection::vec(any::<u8>(), 0..300),
        start in 0usize..6,
        big_endian: bool,
    ) {
        let builder = FileBuilder { big_endian };
        let mut whole = match start {
            0 => Vec::new(),
            1 => builder.classic(0xa1b2_c3d4, 1),
            2 => builder.classic(0xa1b2_3c4d, 101),
            3 => builder.section(),
            _ => [builder.section(), builder.interface(1, 0, &file[..file.len() / 2])].concat(),
        };
        whole.extend(file);
        if let Ok((_, packets)) = read_all(&whole[..]) {
            prop_assert!(packets.iter().map(|packet| packet.1.len()).sum::<usize>() <= whole.len());
        }
    }

    #[test]
    fn survives_one_wrong_byte(at in any::<prop::sample::Index>(), byte: u8, big_endian: bool) {
        let builder = FileBuilder { big_endian };
        let mut file = [
            builder.section(),
            builder.interface(1, 0, &[]),
            builder.enhanced(0, 1, &[1; 60], 60),
            builder.enhanced(0, 2, &[2; 61], 61),
        ]
        .concat();
        let at = at.index(file.len());
        file[at] = byte;
        if let Ok((_, packets)) = read_all(&file[..]) {
            prop_assert!(packets.len() <= 2);
        }
    }
}

#[test]
fn device_replays_one_file_and_writes_another() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.pcap"), folder.path().join("out.pcap"));
    let mut writer = Writer::new(Vec::new(), Medium::Ethernet, MAX_PACKET_BYTES).unwrap();
    for (number, len) in [60, 1514, 3000, 70].into_iter().enumerate() {
        let data = vec![number as u8; len];
        let time_ns = number as u64;
        writer.write(Record { time_ns, data: &data, original_bytes: len }).unwrap();
    }
    fs::write(&input, writer.into_inner().unwrap()).unwrap();

    // Fewer buffers than packets: the rest waits in the file.
    let mut arena = arena(2);
    let config = PcapConfig::default().read(input).write(output.clone());
    let mut device = PcapDevice::open(&config, &mut arena).unwrap();
    let mut burst = Burst::new();
    let mut passed = 0;
    while !device.is_finished() {
        assert!(!device.prepare_sleep().unwrap());
        passed += device.receive(&mut arena, &mut burst, 8).unwrap();
        device.transmit(&mut arena, &mut burst).unwrap();
    }
    assert!(device.prepare_sleep().unwrap());
    device.flush().unwrap();
    assert_eq!(passed, 3);
    assert_eq!(arena.available(), 2);
    let counters = device.counters();
    assert_eq!((counters.received, counters.transmitted), (3, 3));
    assert_eq!(counters.drops.get(DropReason::FrameTooLong), 1);
    let (_, packets) = read_all(&fs::read(&output).unwrap()[..]).unwrap();
    let lengths: Vec<_> = packets.iter().map(|packet| packet.2).collect();
    assert_eq!(lengths, [60, 1514, 70]);
    assert_eq!(packets[2].1, [3; 70]);
}

#[test]
fn device_error_on_a_damaged_file_names_the_offset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pcap");
    let builder = FileBuilder { big_endian: false };
    let mut file = builder.classic(0xa1b2_c3d4, 1);
    file.extend(builder.record(0, 0, 4, 4));
    file.extend(b"good");
    file.extend(builder.record(0, 0, 4, 4));
    fs::write(&path, file).unwrap();
    let mut arena = arena(4);
    let config = PcapConfig::default().read(path.clone());
    let mut device = PcapDevice::open(&config, &mut arena).unwrap();
    let mut burst = Burst::new();
    let error = device.receive(&mut arena, &mut burst, 8).unwrap_err();
    assert!(error.to_string().contains("byte 60"), "{error}");
    assert_eq!(burst.len(), 1, "the record before the damage is received");
    fs::remove_file(&path).unwrap();
    let error = PcapDevice::open(&config, &mut arena).err().unwrap();
    assert!(error.to_string().contains("in.pcap"), "{error}");
}
