//! What a device says that it lost, by reason and each frame once.
//!
//! Every device has four counters (`struct rte_eth_stats`); what they hold is up to
//! its driver. Cards count more, under names of their driver's ("extended
//! statistics"). Some of those are parts of the four, others tell of frames that the
//! four leave out. So counters of one kind are never added to those of another that
//! may tell of the same frames: the larger counts.

use std::sync::Arc;

use tidegate_wire::{DropCounters, DropReason};

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Frames without room in the ring (`imissed`).
    Missed,
    /// Frames without a buffer (`rx_nombuf`).
    NoBuffer,
    /// Frames with any error (`ierrors`).
    Erroneous,
    /// Frames that could not be sent (`oerrors`).
    Unsent,
    /// Frames without room, on the card or in the ring.
    Dropped,
    /// Frames with a wrong checksum, and those that are too short.
    Damaged,
    /// Frames that are longer than the card takes.
    TooLong,
}

/// The four of every device.
const OF_EVERY_DEVICE: [Kind; 4] = [Kind::Missed, Kind::NoBuffer, Kind::Erroneous, Kind::Unsent];

/// Names that drivers of DPDK 22.11 give to frames that are lost; in any one driver
/// those of one kind tell of different frames. There are more, and they are not here
/// for a reason: "jabbers" and bad alignments are counted as wrong checksums too,
/// and virtio's "undersize" are short frames that it delivers.
const NAMES: [(&str, Kind); 17] = [
    // mlx5
    ("rx_out_of_buffer", Kind::Dropped),
    ("rx_phy_discard_packets", Kind::Dropped),
    ("rx_phy_crc_errors", Kind::Damaged),
    // Intel's, qede
    ("rx_crc_errors", Kind::Damaged),
    ("rx_fragment_errors", Kind::Damaged),
    ("rx_fragmented_errors", Kind::Damaged),
    ("rx_undersize_errors", Kind::Damaged),
    ("rx_undersized_errors", Kind::Damaged),
    ("rx_undersize_packet_errors", Kind::Damaged),
    ("rx_oversize_errors", Kind::TooLong),
    ("rx_oversize_packet_errors", Kind::TooLong),
    // bnxt, cxgbe, dpaa and liquidio, hns3
    ("rx_fcs_err_frames", Kind::Damaged),
    ("rx_fcs_error_packets", Kind::Damaged),
    ("rx_fcs_err", Kind::Damaged),
    ("rx_oversize_err", Kind::TooLong),
    ("mac_rx_fcs_err_pkt_num", Kind::Damaged),
    ("mac_rx_fragment_pkt_num", Kind::Damaged),
];

/// A counter of the device's, which may begin anew.
#[derive(Debug)]
struct Counter {
    kind: Kind,
    last: u64,
    total: u64,
}

impl Counter {
    fn update(&mut self, now: u64) {
        self.total += if now >= self.last { now - self.last } else { now };
        self.last = now;
    }
}

/// What a device lost since its port was opened.
#[derive(Debug)]
pub struct Losses {
    counters: Vec<Counter>,
    /// Where among the statistics each counter behind the first four is.
    places: Vec<usize>,
    /// What was said so far, which never becomes less.
    told: DropCounters,
}

impl Losses {
    /// Begins to count behind what was lost before: the four of every device, and
    /// statistics with their names.
    pub fn since(before: [u64; 4], names: &[Arc<str>], statistics: &[u64]) -> Self {
        let kind_of = |name: &str| NAMES.iter().find(|known| known.0 == name).map(|known| known.1);
        let mut counters: Vec<_> = OF_EVERY_DEVICE
            .into_iter()
            .zip(before)
            .map(|(kind, last)| Counter { kind, last, total: 0 })
            .collect();
        let mut places = Vec::new();
        for (place, (name, &last)) in names.iter().zip(statistics).enumerate() {
            if let Some(kind) = kind_of(name) {
                places.push(place);
                counters.push(Counter { kind, last, total: 0 });
            }
        }
        Self { counters, places, told: DropCounters::new() }
    }

    /// Takes note of what the device says now. Statistics that it does not tell stay
    /// as they were.
    pub fn update(&mut self, now: [u64; 4], statistics: &[u64]) {
        let (basic, extended) = self.counters.split_at_mut(OF_EVERY_DEVICE.len());
        basic.iter_mut().zip(now).for_each(|(counter, value)| counter.update(value));
        for (counter, &place) in extended.iter_mut().zip(&self.places) {
            if let Some(&value) = statistics.get(place) {
                counter.update(value);
            }
        }
        let of = |kind| -> u64 {
            self.counters.iter().filter(|counter| counter.kind == kind).map(|one| one.total).sum()
        };
        let too_long = of(Kind::TooLong);
        for (reason, lost) in [
            (DropReason::PortRingFull, of(Kind::Missed).max(of(Kind::Dropped))),
            (DropReason::NoBuffer, of(Kind::NoBuffer)),
            (
                DropReason::PortFrameDamaged,
                of(Kind::Damaged).max(of(Kind::Erroneous).saturating_sub(too_long)),
            ),
            (DropReason::FrameTooLong, too_long),
            (DropReason::TransmitFailed, of(Kind::Unsent)),
        ] {
            let said = self.told.get(reason);
            self.told.add(reason, lost.saturating_sub(said));
        }
    }

    /// Adds what was lost so far, by reason.
    pub fn add_to(&self, drops: &mut DropCounters) {
        drops.merge(&self.told);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that counts these, and has lost some before.
    struct Bench {
        losses: Losses,
    }

    impl Bench {
        fn new<const N: usize>(names: [&str; N]) -> Self {
            let names = names.map(Arc::from);
            Self { losses: Losses::since([100; 4], &names, &[1000; N]) }
        }

        /// What is in the table after so many more.
        fn after(&mut self, basic: [u64; 4], statistics: &[u64]) -> Vec<(&'static str, u64)> {
            let statistics: Vec<_> = statistics.iter().map(|more| 1000 + more).collect();
            self.losses.update(basic.map(|more| 100 + more), &statistics);
            let mut drops = DropCounters::new();
            self.losses.add_to(&mut drops);
            drops.nonzero().map(|(reason, lost)| (reason.name(), lost)).collect()
        }
    }

    #[test]
    fn what_every_device_counts_has_a_reason() {
        let mut bench = Bench::new([]);
        assert!(bench.after([0; 4], &[]).is_empty());
        let expected = [
            ("port_ring_full", 1),
            ("port_frame_damaged", 3),
            ("no_buffer", 2),
            ("transmit_failed", 4),
        ];
        assert_eq!(bench.after([1, 2, 3, 4], &[]), expected);
    }

    #[test]
    fn parts_of_the_errors_are_told_apart_and_not_counted_twice() {
        let names = ["rx_good_packets", "rx_crc_errors", "rx_oversize_errors", "rx_jabber_errors"];
        let mut bench = Bench::new(names);
        // A driver that adds them up, as those of Intel's cards do.
        let expected = [("port_frame_damaged", 5), ("frame_too_long", 3)];
        assert_eq!(bench.after([0, 0, 8, 0], &[70, 4, 3, 1]), expected);
        // One that does not.
        let mut bench = Bench::new(names);
        let expected = [("port_frame_damaged", 4), ("frame_too_long", 3)];
        assert_eq!(bench.after([0, 0, 0, 0], &[70, 4, 3, 4]), expected);
    }

    #[test]
    fn frames_that_a_card_had_no_room_for_are_added_to_none_that_say_so_too() {
        let names = ["rx_out_of_buffer", "rx_phy_discard_packets"];
        let mut bench = Bench::new(names);
        assert_eq!(bench.after([5, 0, 0, 0], &[5, 7]), [("port_ring_full", 12)]);
    }

    /// The four and the others are read one after the other.
    #[test]
    fn a_loss_that_was_told_stays_told() {
        let mut bench = Bench::new(["rx_oversize_errors"]);
        assert_eq!(bench.after([0, 0, 4, 0], &[0]), [("port_frame_damaged", 4)]);
        let later = [("port_frame_damaged", 4), ("frame_too_long", 1)];
        assert_eq!(bench.after([0, 0, 4, 0], &[1]), later);
    }

    #[test]
    fn counters_may_begin_anew() {
        let mut bench = Bench::new(["rx_crc_errors"]);
        assert_eq!(bench.after([9, 0, 0, 0], &[6]).len(), 2);
        bench.losses.update([2, 0, 0, 0], &[1]);
        bench.losses.update([3, 0, 0, 0], &[4]);
        let mut drops = DropCounters::new();
        bench.losses.add_to(&mut drops);
        assert_eq!(drops.get(DropReason::PortRingFull), 12);
        assert_eq!(drops.get(DropReason::PortFrameDamaged), 10);
    }

    #[test]
    fn statistics_that_are_not_told_stay_as_they_were() {
        let mut bench = Bench::new(["rx_crc_errors"]);
        assert_eq!(bench.after([0; 4], &[6]), [("port_frame_damaged", 6)]);
        assert_eq!(bench.after([0; 4], &[]), [("port_frame_damaged", 6)]);
        assert_eq!(bench.after([0; 4], &[7]), [("port_frame_damaged", 7)]);
    }

    #[test]
    fn no_name_stands_twice() {
        for (at, (name, _)) in NAMES.iter().enumerate() {
            assert!(NAMES[..at].iter().all(|other| other.0 != *name), "{name}");
        }
    }
}
