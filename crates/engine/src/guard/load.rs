//! Load of the kernel's own queues.
//!
//! * Served packets: datagrams that processes received, and incoming TCP segments, from the SNMP
//!   counters of the network namespace.
//! * Late losses: drops at sockets (socket diagnostics), at listeners with a full accept queue,
//!   and at the backlogs of the processors (`softnet_stat`).
//! * Fill of the fullest queue: socket memory as a percentage of its limit.
//! * Imminent livelock without losses yet: receive work that exceeded its time budget
//!   (`softnet_stat`) while processes wait for a processor (`/proc/pressure/cpu`). This only
//!   starts the guard: both can have other causes, and persist when the guard does all it can.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use tidegate_gate::admission::Pressure;

use super::queues::{SocketQueues, WatchedPort};

/// Fraction of the time that processes waited for a processor, in percent, that means overload.
const STALLED_CPU_PERCENT: u64 = 50;

/// A `/proc` file that is read repeatedly.
struct ProcFile {
    file: File,
    text: Vec<u8>,
}

impl ProcFile {
    fn open(path: &str) -> io::Result<Self> {
        let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
        Ok(Self { file: File::open(path).map_err(with_path)?, text: vec![0; 16 << 10] })
    }

    fn read(&mut self) -> io::Result<&str> {
        let mut len = 0;
        loop {
            match self.file.read_at(&mut self.text[len..], len as u64)? {
                0 => break,
                count => len += count,
            }
            if len == self.text.len() {
                // A machine with very many processors.
                self.text.resize(2 * len, 0);
            }
        }
        std::str::from_utf8(&self.text[..len]).map_err(io::Error::other)
    }
}

/// Cumulative counters of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KernelCounters {
    served: u64,
    sockets_dropped: u64,
    listeners_dropped: u64,
    backlog_dropped: u64,
    squeezed: u64,
    stalled_us: u64,
}

/// Reader of the kernel's load.
pub struct KernelLoad {
    watch: Vec<WatchedPort>,
    queues: SocketQueues,
    snmp: ProcFile,
    snmp6: Option<ProcFile>,
    netstat: ProcFile,
    softnet: ProcFile,
    /// CPU pressure (PSI); `None` if the kernel is built or booted without PSI.
    psi: Option<ProcFile>,
    previous: KernelCounters,
    read_at: Instant,
}

impl KernelLoad {
    /// Opens the load sources of the calling thread's network namespace, for the sockets on the
    /// ports `watch`.
    ///
    /// # Errors
    /// If `/proc` or socket diagnostics are not available.
    pub fn open(watch: Vec<WatchedPort>) -> io::Result<Self> {
        let mut load = Self {
            watch,
            queues: SocketQueues::open()?,
            snmp: ProcFile::open("/proc/thread-self/net/snmp")?,
            // Missing without IPv6.
            snmp6: ProcFile::open("/proc/thread-self/net/snmp6").ok(),
            netstat: ProcFile::open("/proc/thread-self/net/netstat")?,
            softnet: ProcFile::open("/proc/thread-self/net/softnet_stat")?,
            psi: ProcFile::open("/proc/pressure/cpu").ok(),
            previous: KernelCounters::default(),
            read_at: Instant::now(),
        };
        load.read(true)?;
        Ok(load)
    }

    /// Returns the pressure since the last call. `limiting` is true if admission refuses packets
    /// already.
    ///
    /// # Errors
    /// If the kernel's counters cannot be read.
    pub fn read(&mut self, limiting: bool) -> io::Result<Pressure> {
        let queues = self.queues.read(&self.watch)?;
        let mut now =
            KernelCounters { sockets_dropped: queues.dropped, ..KernelCounters::default() };
        self.read_counters(&mut now)?;
        let elapsed_us = self.read_at.elapsed().as_micros() as u64;
        self.read_at = Instant::now();
        let previous = std::mem::replace(&mut self.previous, now);
        Ok(pressure(&previous, &now, elapsed_us, queues.level_percent, limiting))
    }

    fn read_counters(&mut self, totals: &mut KernelCounters) -> io::Result<()> {
        let (tcp, udp) = (
            self.watch.iter().any(|watch| watch.is_tcp()),
            self.watch.iter().any(|watch| !watch.is_tcp()),
        );
        let snmp = self.snmp.read()?;
        if udp {
            totals.served += column(snmp, "Udp:", "InDatagrams");
        }
        if tcp {
            totals.served += column(snmp, "Tcp:", "InSegs");
        }
        if let Some(snmp6) = self.snmp6.as_mut().filter(|_| udp) {
            totals.served += row(snmp6.read()?, "Udp6InDatagrams");
        }
        if tcp {
            let netstat = self.netstat.read()?;
            totals.listeners_dropped = column(netstat, "TcpExt:", "ListenDrops");
        }
        let softnet = self.softnet.read()?;
        totals.backlog_dropped = hexadecimal_sum(softnet, 1);
        totals.squeezed = hexadecimal_sum(softnet, 2);
        if let Some(file) = &mut self.psi {
            totals.stalled_us = stalled_us(file.read()?);
        }
        Ok(())
    }
}

fn pressure(
    previous: &KernelCounters,
    now: &KernelCounters,
    elapsed_us: u64,
    level_percent: u32,
    limiting: bool,
) -> Pressure {
    let since = |count: fn(&KernelCounters) -> u64| count(now).saturating_sub(count(previous));
    let stalled = since(|totals| totals.stalled_us) * 100 >= elapsed_us * STALLED_CPU_PERCENT;
    let near_livelock = !limiting && stalled && since(|totals| totals.squeezed) > 0;
    Pressure {
        served: since(|totals| totals.served),
        late_drops: since(|totals| totals.sockets_dropped)
            + since(|totals| totals.listeners_dropped)
            + since(|totals| totals.backlog_dropped)
            + u64::from(near_livelock),
        level_percent,
        backlog_percent: 0,
        rx_missed_permille: 0,
    }
}

/// Value of a column with headings: `Udp: InDatagrams ...`, then `Udp: 7 ...`.
fn column(text: &str, group: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let found = names.split_whitespace().zip(values.split_whitespace());
    found.filter(|(other, _)| *other == name).find_map(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// Value after a name, on a line of its own.
fn row(text: &str, name: &str) -> u64 {
    let rows = text.lines().filter_map(|line| line.split_once(char::is_whitespace));
    let mut found = rows.filter(|(other, _)| *other == name);
    found.find_map(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

/// Sum of a column of hexadecimal numbers.
fn hexadecimal_sum(text: &str, column: usize) -> u64 {
    let cell = |line: &str| u64::from_str_radix(line.split_whitespace().nth(column)?, 16).ok();
    text.lines().filter_map(cell).sum()
}

/// Time in microseconds since boot in which some task waited (Documentation/accounting/psi).
fn stalled_us(text: &str) -> u64 {
    let some = text.lines().find(|line| line.starts_with("some"));
    let total = some.and_then(|line| line.rsplit_once("total="));
    total.and_then(|(_, total)| total.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn parses_proc_files() {
        let snmp = "Ip: A\nIp: 1\nUdp: InDatagrams NoPorts\nUdp: 37 4\nUdpLite: InDatagrams\n";
        assert_eq!(column(snmp, "Udp:", "InDatagrams"), 37);
        assert_eq!(column(snmp, "Udp:", "Nothing"), 0);
        assert_eq!(column("", "Udp:", "InDatagrams"), 0);
        assert_eq!(row("Udp6InDatagrams    \t37198\nUdp6NoPorts 1\n", "Udp6InDatagrams"), 37_198);
        let softnet = "0008924c 00000001 0000000a\n007246e9 000000ff 00000001\n";
        assert_eq!((hexadecimal_sum(softnet, 1), hexadecimal_sum(softnet, 2)), (256, 11));
        let psi = "some avg10=67.93 avg60=74.20 avg300=76.44 total=1067300531\nfull total=0\n";
        assert_eq!(stalled_us(psi), 1_067_300_531);
        assert_eq!(stalled_us(""), 0);
    }

    #[test]
    fn imminent_livelock_counts_once_and_only_before_limiting() {
        let before = KernelCounters::default();
        let stalled = KernelCounters { stalled_us: 600, ..before };
        let near = KernelCounters { squeezed: 3, ..stalled };
        let lost = |now, limiting| pressure(&before, now, 1000, 0, limiting).late_drops;
        assert_eq!(lost(&near, false), 1);
        assert_eq!(lost(&near, true), 0);
        assert_eq!(lost(&stalled, false), 0, "a busy machine is no livelock");
        let dropped = KernelCounters {
            served: 9,
            sockets_dropped: 1,
            listeners_dropped: 2,
            backlog_dropped: 4,
            ..before
        };
        let expected =
            Pressure { served: 9, late_drops: 7, level_percent: 80, ..Pressure::default() };
        assert_eq!(pressure(&before, &dropped, 1000, 80, true), expected);
        assert_eq!(pressure(&dropped, &before, 1000, 80, true).late_drops, 0, "sockets closed");
    }

    #[test]
    fn counts_received_datagrams_as_served() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).unwrap();
            let target = socket.local_addr().unwrap();
            let watch = vec![format!("udp/{}", target.port()).parse().unwrap()];
            let mut load = KernelLoad::open(watch).unwrap();
            for _ in 0..10 {
                socket.send_to(b"hello", target).unwrap();
                socket.recv(&mut [0; 10]).unwrap();
            }
            assert!(load.read(false).unwrap().served >= 10);
        }
    }
}
