//! Memory that `trim_heap` returns. A single test, since resident memory is per process.
#![cfg(target_env = "gnu")]

use tidegate_memory::trim_heap;

const BLOCKS: usize = 4096;
const BLOCK_BYTES: usize = 16 << 10;

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn trim_heap_returns_free_memory_between_live_blocks() {
    let before = resident_bytes();
    let block = |n: usize| (vec![7; BLOCK_BYTES], Box::new(n));
    let (blocks, kept): (Vec<Vec<u8>>, Vec<_>) = (0..BLOCKS).map(block).unzip();
    let full = resident_bytes() - before;
    assert!(full > BLOCKS * BLOCK_BYTES / 2, "the blocks added only {full} resident bytes");
    drop(blocks);
    trim_heap();
    let left = resident_bytes() - before;
    // Each live box holds a page or two.
    assert!(left < full * 2 / 3, "{left} of {full} bytes are still resident");
    assert!(kept.iter().enumerate().all(|(n, one)| n == **one));
}
