//! C structures and functions of the shim.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

/// Maximum number of frames in one burst, as in the shim.
pub const BURST_FRAMES: usize = 128;
const DRIVER_NAME_BYTES: usize = 32;
/// Bytes of a statistic's name, padded with zeros.
pub const STATISTIC_NAME_BYTES: usize = 64;

pub const CHECKSUM_UNKNOWN: u8 = 0;
pub const CHECKSUM_VERIFIED: u8 = 1;
pub const CHECKSUM_UDP: u8 = 2;
pub const CHECKSUM_TCP: u8 = 3;
pub const CHECKSUM_TCP_TSO: u8 = 4;

/// `struct dpdk_packet`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Packet {
    pub data: *mut u8,
    pub len: u32,
    pub checksum: u8,
    pub is_v6: u8,
    pub link_bytes: u8,
    pub network_bytes: u8,
    pub is_frame: u8,
    pub transport_bytes: u8,
    pub segment_bytes: u16,
}

impl Packet {
    pub const NONE: Self = Self {
        data: ptr::null_mut(),
        len: 0,
        checksum: CHECKSUM_UNKNOWN,
        is_v6: 0,
        link_bytes: 0,
        network_bytes: 0,
        is_frame: 0,
        transport_bytes: 0,
        segment_bytes: 0,
    };
}

/// `struct dpdk_burst`.
#[repr(C)]
pub struct Burst {
    pub mbufs: [*mut c_void; BURST_FRAMES],
    pub packets: [Packet; BURST_FRAMES],
}

/// `struct dpdk_memory`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Memory {
    pub base: *mut u8,
    pub bytes: usize,
    pub frames: u32,
    pub shift: u32,
    pub page_bytes: usize,
}

/// `struct dpdk_pool`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Pool {
    mempool: *mut c_void,
    mbufs: *mut c_void,
    memory: Memory,
    lcore: c_uint,
}

/// `struct dpdk_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Info {
    pub mtu: u16,
    pub queues: u16,
    pub queues_max: u16,
    pub burst: u16,
    pub mac: [u8; 6],
    pub receive_checksum: u8,
    pub transmit_checksum: u8,
    pub has_rss: u8,
    pub takes_frames: u8,
    pub cuts: u8,
    pub driver: [c_char; DRIVER_NAME_BYTES],
}

/// `struct dpdk_device`, which only the shim reads.
#[repr(C)]
pub struct EthDev {
    _opaque: [u8; 0],
}

/// `struct dpdk_queues`.
#[repr(C)]
pub struct Queues {
    pub device: *mut EthDev,
    pub first: u16,
    descriptors: u16,
    pub level: u32,
    pub pool: Pool,
    links: *mut c_void,
    slot: c_uint,
}

unsafe extern "C" {
    pub fn rte_version() -> *const c_char;
    pub fn dpdk_keep_log();
    pub fn dpdk_take_log(to: *mut u8, capacity: usize) -> usize;
    pub fn dpdk_start(argc: c_int, argv: *mut *mut c_char) -> c_int;
    pub fn dpdk_open(
        name: *const c_char,
        frame_shift: u32,
        opened: *mut *mut EthDev,
        step: *mut *const c_char,
    ) -> c_int;
    pub fn dpdk_describe(device: *const EthDev, info: *mut Info);
    pub fn dpdk_step(device: *const EthDev) -> *const c_char;
    pub fn dpdk_plan(device: *mut EthDev, queues: u16, users: c_uint, segmentation: c_int)
    -> c_int;
    pub fn dpdk_join(
        device: *mut EthDev,
        memory: *const Memory,
        descriptors: u16,
        queues: *mut Queues,
    ) -> c_int;
    pub fn dpdk_run(device: *mut EthDev) -> c_int;
    pub fn dpdk_restart(device: *mut EthDev) -> c_int;
    pub fn dpdk_close(device: *mut EthDev);
    pub fn dpdk_leave(queues: *mut Queues, frames: c_uint) -> c_int;
    pub fn dpdk_free(device: *mut EthDev);
    pub fn dpdk_link_is_up(device: *const EthDev) -> c_int;
    pub fn dpdk_losses(device: *const EthDev, losses: *mut u64);
    pub fn dpdk_statistic_names(
        device: *const EthDev,
        names: *mut [u8; STATISTIC_NAME_BYTES],
        capacity: c_uint,
    ) -> c_uint;
    pub fn dpdk_statistics(device: *const EthDev, values: *mut u64, count: c_uint) -> c_int;
    pub fn dpdk_receive(queues: *mut Queues, queue: u16, burst: *mut Burst) -> c_uint;
    pub fn dpdk_release(burst: *mut Burst, from: c_uint, count: c_uint);
    pub fn dpdk_transmit(
        queues: *mut Queues,
        packets: *const Packet,
        count: c_uint,
        rejects_next: *mut u8,
    ) -> c_uint;
    pub fn dpdk_give(pool: *mut Pool, frames: *const *mut u8, count: c_uint) -> c_uint;
    pub fn dpdk_take(
        pool: *mut Pool,
        frames: *mut *mut u8,
        count: c_uint,
        level: *mut c_uint,
    ) -> c_uint;
    pub fn dpdk_has_interrupts(device: *const EthDev) -> c_int;
    pub fn dpdk_watch(queues: *const Queues, epoll: c_int) -> c_int;
    pub fn dpdk_set_interrupts(queues: *const Queues, on: c_int) -> c_int;
    pub fn dpdk_take_interrupts(epoll: c_int);
}
