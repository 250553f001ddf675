//! The state of an interface, as the kernel's tools show it.

use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::LabError;
use crate::testbed::netns::{VethEnd, output};

/// Files below `/sys/class/net/DEVICE` that change by themselves.
const VARYING: [&str; 4] = ["statistics", "power", "byte_queue_limits", "carrier_"];

/// Queries of ethtool.
const QUERIES: [&str; 5] = ["-k", "-c", "-l", "-g", "-n"];

/// Round trips of one measurement; the median counts.
const ROUND_TRIPS: usize = 100;

/// Time after which a datagram counts as lost.
const LOST_AFTER: Duration = Duration::from_millis(100);

/// Values of an interface by name of the file or of the query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InterfaceState(BTreeMap<String, String>);

impl InterfaceState {
    /// Reads the state of an interface: its files in `/sys`, the queries of ethtool, and
    /// `ip -d link`.
    pub(super) fn of(end: &VethEnd) -> Result<Self, LabError> {
        let mut values = BTreeMap::new();
        let folder = Path::new("/sys/class/net").join(&end.device);
        end.namespace.enter(|| read_folder(&folder, "", &mut values))?;
        for query in QUERIES {
            let mut command = end.namespace.command("ethtool");
            let answer = output(command.args([query, &end.device]), "ethtool")?;
            let text = [answer.stdout, answer.stderr].concat();
            values.insert(query.to_owned(), String::from_utf8_lossy(&text).into_owned());
        }
        let link = end.namespace.ip(&["-d", "link", "show", &end.device])?;
        values.insert("link".to_owned(), link);
        Ok(Self(values))
    }

    /// State without what sockets and links of a process hold: an XDP program, and all multicast
    /// groups.
    pub(super) fn without_sockets(&self) -> Self {
        let mut values = self.0.clone();
        // The driver offers other features while a program is attached.
        values.remove("-k");
        values.remove("flags");
        if let Some(link) = values.get_mut("link") {
            let lines = link.lines().filter(|line| !line.trim_start().starts_with("prog/xdp"));
            let held = [(" xdp ", " "), ("ALLMULTI,", ""), (" allmulti 1 ", " allmulti 0 ")];
            let without = |line: &str| {
                held.iter().fold(line.to_owned(), |line, (with, plain)| line.replace(with, plain))
            };
            *link = lines.map(|line| without(line) + "\n").collect();
        }
        Self(values)
    }

    /// Names of the values that differ.
    pub(super) fn differences(&self, other: &Self) -> Vec<String> {
        let names = self.0.keys().chain(other.0.keys().filter(|name| !self.0.contains_key(*name)));
        names.filter(|name| self.0.get(*name) != other.0.get(*name)).cloned().collect()
    }
}

/// Reads the files of a folder and of its subfolders. Files that cannot be read have no value.
fn read_folder(folder: &Path, prefix: &str, values: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if VARYING.iter().any(|varying| name.contains(varying)) {
            continue;
        }
        // Links lead to other devices.
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                read_folder(&entry.path(), &format!("{name}/"), values);
            }
            Ok(kind) if kind.is_file() => {
                if let Ok(text) = fs::read_to_string(entry.path()) {
                    values.insert(name, text);
                }
            }
            _ => {}
        }
    }
}

/// Median round trip of a datagram to an echo server.
pub(super) fn round_trip(client: &UdpSocket, server: SocketAddr) -> Result<Duration, LabError> {
    let failed = |what: &str| LabError::io(format!("{what} of a round trip"));
    client.set_read_timeout(Some(LOST_AFTER)).map_err(failed("the time limit"))?;
    let mut times: Vec<Duration> = Vec::with_capacity(ROUND_TRIPS);
    let mut reply = [0; 16];
    for number in 0..ROUND_TRIPS as u64 {
        let start = Instant::now();
        client.send_to(&number.to_ne_bytes(), server).map_err(failed("the datagram"))?;
        // Replies of lost round trips are skipped; a lost round trip takes the whole time limit.
        while let Ok(len) = client.recv(&mut reply) {
            if reply[..len] == number.to_ne_bytes() {
                break;
            }
        }
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUND_TRIPS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(values: &[(&str, &str)]) -> InterfaceState {
        InterfaceState(values.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect())
    }

    #[test]
    fn names_what_differs() {
        let before = state(&[("gro_flush_timeout", "0\n"), ("mtu", "1500\n"), ("gone", "")]);
        let after = state(&[("gro_flush_timeout", "200000\n"), ("mtu", "1500\n"), ("new", "")]);
        assert_eq!(before.differences(&before), [""; 0]);
        assert_eq!(before.differences(&after), ["gone", "gro_flush_timeout", "new"]);
    }

    #[test]
    fn state_held_by_sockets_is_ignored() {
        let plain =
            "7: t0: <BROADCAST,UP> mtu 1500 qdisc noqueue\n    promiscuity 0 allmulti 0 x\n";
        let with = "7: t0: <BROADCAST,ALLMULTI,UP> mtu 1500 xdp qdisc noqueue\n    \
                    promiscuity 0 allmulti 1 x\n    prog/xdp id 5\n";
        let plain = state(&[("link", plain), ("flags", "0x1003\n")]);
        let with = state(&[("link", with), ("-k", "tso: off"), ("flags", "0x1203\n")]);
        assert_eq!(with.without_sockets(), plain.without_sockets());
    }
}
