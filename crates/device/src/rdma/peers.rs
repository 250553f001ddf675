//! Peers, as a switch learns them: where frames for a hardware address go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use tidegate_wire::MacAddr;

use super::sys::Gid;

/// Most hardware addresses that are known. Frames for others go to the group.
const MAX_PEERS: usize = 4096;
/// Most ports that are known.
const MAX_PORTS: usize = 1024;

/// Queue pairs by hardware address, and paths to their ports.
pub(super) struct Peers<P> {
    queue_pairs: HashMap<MacAddr, (Gid, u32)>,
    /// `None` while the path is being looked for.
    paths: HashMap<Gid, Option<P>>,
}

impl<P: Copy> Peers<P> {
    pub(super) fn new() -> Self {
        Self { queue_pairs: HashMap::new(), paths: HashMap::new() }
    }

    /// Notes that a frame from `mac` came from a queue pair of the port `gid`. Returns true if the
    /// path to that port is to be looked for.
    pub(super) fn learn(&mut self, mac: MacAddr, gid: Gid, queue_pair: u32) -> bool {
        if !mac.is_valid_unicast() {
            return false;
        }
        let is_full = self.queue_pairs.len() >= MAX_PEERS;
        match self.queue_pairs.entry(mac) {
            Entry::Vacant(_) if is_full => return false,
            entry => _ = entry.insert_entry((gid, queue_pair)),
        }
        if self.paths.contains_key(&gid) || self.paths.len() >= MAX_PORTS {
            return false;
        }
        self.paths.insert(gid, None);
        true
    }

    /// Notes the path to a port. Without one it is looked for again at the next frame.
    pub(super) fn set_path(&mut self, gid: Gid, path: Option<P>) {
        match path {
            Some(_) => _ = self.paths.insert(gid, path),
            None => _ = self.paths.remove(&gid),
        }
    }

    /// Path and queue pair of a hardware address; `None` for the group.
    pub(super) fn find(&self, mac: MacAddr) -> Option<(P, u32)> {
        let (gid, queue_pair) = self.queue_pairs.get(&mac)?;
        let path = (*self.paths.get(gid)?)?;
        Some((path, *queue_pair))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(last: u16) -> MacAddr {
        let [high, low] = last.to_be_bytes();
        MacAddr([2, 0, 0, 0, high, low])
    }

    #[test]
    fn frames_go_to_the_group_until_the_path_is_known() {
        let mut peers = Peers::new();
        assert!(peers.learn(mac(1), [1; 16], 7));
        assert!(!peers.learn(mac(2), [1; 16], 8), "the path is being looked for");
        assert_eq!(peers.find(mac(1)), None);
        peers.set_path([1; 16], Some('a'));
        assert_eq!(peers.find(mac(1)), Some(('a', 7)));
        assert_eq!(peers.find(mac(2)), Some(('a', 8)));
        assert_eq!(peers.find(mac(3)), None);
    }

    #[test]
    fn peer_moves_to_another_queue_pair() {
        let mut peers = Peers::new();
        peers.learn(mac(1), [1; 16], 7);
        peers.set_path([1; 16], Some('a'));
        assert!(!peers.learn(mac(1), [1; 16], 9));
        assert_eq!(peers.find(mac(1)), Some(('a', 9)));
        assert!(peers.learn(mac(1), [2; 16], 9));
        assert_eq!(peers.find(mac(1)), None, "the path to the other port is not known yet");
    }

    #[test]
    fn port_without_path_is_looked_for_again() {
        let mut peers = Peers::<char>::new();
        assert!(peers.learn(mac(1), [1; 16], 7));
        peers.set_path([1; 16], None);
        assert!(peers.learn(mac(1), [1; 16], 7));
    }

    #[test]
    fn tables_are_bounded_and_known_peers_stay() {
        let mut peers = Peers::new();
        for number in 0..=u16::MAX {
            let mut gid = [0; 16];
            gid[..2].copy_from_slice(&number.to_be_bytes());
            if peers.learn(mac(number), gid, 1) {
                peers.set_path(gid, Some(number));
            }
        }
        assert_eq!(peers.find(mac(0)), Some((0, 1)));
        assert_eq!((peers.queue_pairs.len(), peers.paths.len()), (MAX_PEERS, MAX_PORTS));
        assert!(!peers.learn(MacAddr([1, 0, 0, 0, 0, 0]), [9; 16], 1), "no address of a host");
    }
}
