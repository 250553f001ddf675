//! Frames lost by a device, by drop reason, each counted once.
//!
//! Every device has four loss counters (`struct rte_eth_stats`); their exact meaning depends
//! on the driver. NICs have more counters under driver-specific names ("extended
//! statistics"). Some of these are parts of the four; others count frames that the four
//! omit. Counters of different kinds that may count the same frames are therefore never
//! added up: the larger value is used.

use std::sync::Arc;

use tidegate_wire::{DropCounters, DropReason};

/// Meaning of a loss counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LossKind {
    /// Frames dropped on receive ring overflow (`imissed`).
    Missed,
    /// Frames dropped because no buffer could be allocated (`rx_nombuf`).
    NoBuffer,
    /// Frames with any receive error (`ierrors`).
    Erroneous,
    /// Frames that failed to transmit (`oerrors`).
    Unsent,
    /// Frames dropped on overflow, in the NIC's packet buffer or in the ring.
    Dropped,
    /// Frames with a wrong frame check sequence, and frames that are too short.
    Damaged,
    /// Frames longer than the NIC accepts.
    TooLong,
}

/// The four counters of every device, in the order of the C shim.
const BASIC_COUNTERS: [LossKind; 4] =
    [LossKind::Missed, LossKind::NoBuffer, LossKind::Erroneous, LossKind::Unsent];

/// Extended statistics of lost frames in the drivers of DPDK 22.11. Within one driver, names
/// of the same kind count different frames. Some names are omitted on purpose: drivers count
/// "jabbers" and alignment errors as wrong checksums too, and virtio's "undersize" counts
/// short frames that it delivers.
const XSTAT_NAMES: [(&str, LossKind); 17] = [
    // mlx5
    ("rx_out_of_buffer", LossKind::Dropped),
    ("rx_phy_discard_packets", LossKind::Dropped),
    ("rx_phy_crc_errors", LossKind::Damaged),
    // Intel, qede
    ("rx_crc_errors", LossKind::Damaged),
    ("rx_fragment_errors", LossKind::Damaged),
    ("rx_fragmented_errors", LossKind::Damaged),
    ("rx_undersize_errors", LossKind::Damaged),
    ("rx_undersized_errors", LossKind::Damaged),
    ("rx_undersize_packet_errors", LossKind::Damaged),
    ("rx_oversize_errors", LossKind::TooLong),
    ("rx_oversize_packet_errors", LossKind::TooLong),
    // bnxt, cxgbe, dpaa and liquidio, hns3
    ("rx_fcs_err_frames", LossKind::Damaged),
    ("rx_fcs_error_packets", LossKind::Damaged),
    ("rx_fcs_err", LossKind::Damaged),
    ("rx_oversize_err", LossKind::TooLong),
    ("mac_rx_fcs_err_pkt_num", LossKind::Damaged),
    ("mac_rx_fragment_pkt_num", LossKind::Damaged),
];

/// Counter of the device, which may restart at zero.
#[derive(Debug)]
struct LossCounter {
    kind: LossKind,
    last: u64,
    total: u64,
}

impl LossCounter {
    fn update(&mut self, now: u64) {
        self.total += if now >= self.last { now - self.last } else { now };
        self.last = now;
    }
}

/// Frames lost by a device since it was opened.
#[derive(Debug)]
pub struct LossCounters {
    counters: Vec<LossCounter>,
    /// Index in the extended statistics of each counter after the first four.
    xstat_indices: Vec<usize>,
    /// Losses reported so far, which never decrease.
    reported: DropCounters,
}

impl LossCounters {
    /// Starts counting from the current values: the four basic counters, and the extended
    /// statistics with their names.
    pub fn since(before: [u64; 4], names: &[Arc<str>], statistics: &[u64]) -> Self {
        let kind_of =
            |name: &str| XSTAT_NAMES.iter().find(|known| known.0 == name).map(|known| known.1);
        let mut counters: Vec<_> = BASIC_COUNTERS
            .into_iter()
            .zip(before)
            .map(|(kind, last)| LossCounter { kind, last, total: 0 })
            .collect();
        let mut xstat_indices = Vec::new();
        for (index, (name, &last)) in names.iter().zip(statistics).enumerate() {
            if let Some(kind) = kind_of(name) {
                xstat_indices.push(index);
                counters.push(LossCounter { kind, last, total: 0 });
            }
        }
        Self { counters, xstat_indices, reported: DropCounters::new() }
    }

    /// Updates the totals from current values. Extended statistics missing from `statistics`
    /// keep their values.
    pub fn update(&mut self, now: [u64; 4], statistics: &[u64]) {
        let (basic, extended) = self.counters.split_at_mut(BASIC_COUNTERS.len());
        basic.iter_mut().zip(now).for_each(|(counter, value)| counter.update(value));
        for (counter, &index) in extended.iter_mut().zip(&self.xstat_indices) {
            if let Some(&value) = statistics.get(index) {
                counter.update(value);
            }
        }
        let total = |kind| -> u64 {
            self.counters.iter().filter(|counter| counter.kind == kind).map(|one| one.total).sum()
        };
        let too_long = total(LossKind::TooLong);
        for (reason, lost) in [
            (DropReason::DeviceRingFull, total(LossKind::Missed).max(total(LossKind::Dropped))),
            (DropReason::NoBuffer, total(LossKind::NoBuffer)),
            (
                DropReason::DeviceFrameDamaged,
                total(LossKind::Damaged).max(total(LossKind::Erroneous).saturating_sub(too_long)),
            ),
            (DropReason::FrameTooLong, too_long),
            (DropReason::TransmitFailed, total(LossKind::Unsent)),
        ] {
            let reported = self.reported.get(reason);
            self.reported.add(reason, lost.saturating_sub(reported));
        }
    }

    /// Adds the losses since the device was opened to `drops`, by reason.
    pub fn add_to(&self, drops: &mut DropCounters) {
        drops.merge(&self.reported);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses of a device whose counters were not zero when it was opened.
    struct Testbed {
        losses: LossCounters,
    }

    impl Testbed {
        fn new<const N: usize>(names: [&str; N]) -> Self {
            let names = names.map(Arc::from);
            Self { losses: LossCounters::since([100; 4], &names, &[1000; N]) }
        }

        /// Drop counters after the given increases.
        fn drops_after(&mut self, basic: [u64; 4], statistics: &[u64]) -> Vec<(&'static str, u64)> {
            let statistics: Vec<_> = statistics.iter().map(|more| 1000 + more).collect();
            self.losses.update(basic.map(|more| 100 + more), &statistics);
            let mut drops = DropCounters::new();
            self.losses.add_to(&mut drops);
            drops.nonzero().map(|(reason, lost)| (reason.name(), lost)).collect()
        }
    }

    #[test]
    fn basic_counters_map_to_drop_reasons() {
        let mut testbed = Testbed::new([]);
        assert!(testbed.drops_after([0; 4], &[]).is_empty());
        let expected = [
            ("device_ring_full", 1),
            ("device_frame_damaged", 3),
            ("no_buffer", 2),
            ("transmit_failed", 4),
        ];
        assert_eq!(testbed.drops_after([1, 2, 3, 4], &[]), expected);
    }

    #[test]
    fn error_details_are_not_counted_twice() {
        let names = ["rx_good_packets", "rx_crc_errors", "rx_oversize_errors", "rx_jabber_errors"];
        let mut testbed = Testbed::new(names);
        // A driver that includes the details in `ierrors`, as Intel's drivers do.
        let expected = [("device_frame_damaged", 5), ("frame_too_long", 3)];
        assert_eq!(testbed.drops_after([0, 0, 8, 0], &[70, 4, 3, 1]), expected);
        // A driver that does not include them.
        let mut testbed = Testbed::new(names);
        let expected = [("device_frame_damaged", 4), ("frame_too_long", 3)];
        assert_eq!(testbed.drops_after([0, 0, 0, 0], &[70, 4, 3, 4]), expected);
    }

    #[test]
    fn missed_and_dropped_counters_are_not_added() {
        let names = ["rx_out_of_buffer", "rx_phy_discard_packets"];
        let mut testbed = Testbed::new(names);
        assert_eq!(testbed.drops_after([5, 0, 0, 0], &[5, 7]), [("device_ring_full", 12)]);
    }

    /// Basic counters and extended statistics are read one after the other.
    #[test]
    fn reported_losses_never_decrease() {
        let mut testbed = Testbed::new(["rx_oversize_errors"]);
        assert_eq!(testbed.drops_after([0, 0, 4, 0], &[0]), [("device_frame_damaged", 4)]);
        let later = [("device_frame_damaged", 4), ("frame_too_long", 1)];
        assert_eq!(testbed.drops_after([0, 0, 4, 0], &[1]), later);
    }

    #[test]
    fn counters_may_restart_at_zero() {
        let mut testbed = Testbed::new(["rx_crc_errors"]);
        assert_eq!(testbed.drops_after([9, 0, 0, 0], &[6]).len(), 2);
        testbed.losses.update([2, 0, 0, 0], &[1]);
        testbed.losses.update([3, 0, 0, 0], &[4]);
        let mut drops = DropCounters::new();
        testbed.losses.add_to(&mut drops);
        assert_eq!(drops.get(DropReason::DeviceRingFull), 12);
        assert_eq!(drops.get(DropReason::DeviceFrameDamaged), 10);
    }

    #[test]
    fn missing_statistics_keep_their_values() {
        let mut testbed = Testbed::new(["rx_crc_errors"]);
        assert_eq!(testbed.drops_after([0; 4], &[6]), [("device_frame_damaged", 6)]);
        assert_eq!(testbed.drops_after([0; 4], &[]), [("device_frame_damaged", 6)]);
        assert_eq!(testbed.drops_after([0; 4], &[7]), [("device_frame_damaged", 7)]);
    }

    #[test]
    fn xstat_names_are_unique() {
        for (at, (name, _)) in XSTAT_NAMES.iter().enumerate() {
            assert!(XSTAT_NAMES[..at].iter().all(|other| other.0 != *name), "{name}");
        }
    }
}
