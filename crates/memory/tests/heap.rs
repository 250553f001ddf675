//! What the heap gives back. One test, since memory is of the whole process.
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
fn what_is_free_between_things_in_use_goes_back() {
    let before = resident_bytes();
    let block = |n: usize| (vec![7; BLOCK_BYTES], Box::new(n));
    let (blocks, kept): (Vec<Vec<u8>>, Vec<_>) = (0..BLOCKS).map(block).unzip();
    let full = resident_bytes() - before;
    assert!(full > BLOCKS * BLOCK_BYTES / 2, "{full} bytes are no peak");
    drop(blocks);
    trim_heap();
    let left = resident_bytes() - before;
    // Each of those that are kept holds a page or two.
    assert!(left < full * 2 / 3, "{left} of {full} bytes are left");
    assert!(kept.iter().enumerate().all(|(n, one)| n == **one));
}
