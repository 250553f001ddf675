//! How the kernel's own queues do.
//!
//! * What was served: the datagrams that programs took and the segments that
//!   came in, from the SNMP counters of the network namespace.
//! * What was lost late: by sockets (socket diagnostics), by listeners that do
//!   not accept, and by the backlogs of the processors (`softnet_stat`).
//! * How full the fullest queue is: the memory of a socket against its limit.
//! * Whether a livelock is near although nothing was lost yet: receive work
//!   that did not get done in its time (`softnet_stat`), and at the same time
//!   programs that wait for a processor (`/proc/pressure/cpu`). That only makes
//!   the guard begin: both can have other causes, and go on when the guard
//!   does all it can.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use tidegate_gate::admission::Pressure;

use super::queues::{SocketQueues, Watch};

/// Programs waited for a processor for this part of the time, in percent.
const STALL_PERCENT: u64 = 50;

/// A file of `/proc` that is read again and again.
struct ProcFile {
    file: File,
    text: Vec<u8>,
}

impl ProcFile {
    fn open(path: &str) -> io::Result<Self> {
        let told = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
        Ok(Self { file: File::open(path).map_err(told)?, text: vec![0; 16 << 10] })
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

/// What the kernel has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    served: u64,
    sockets_dropped: u64,
    listeners_dropped: u64,
    backlog_dropped: u64,
    squeezed: u64,
    stalled_us: u64,
}

/// Reads the kernel's signals.
pub struct Signals {
    watch: Vec<Watch>,
    queues: SocketQueues,
    snmp: ProcFile,
    snmp6: Option<ProcFile>,
    netstat: ProcFile,
    softnet: ProcFile,
    /// Kernels may be built or started without it.
    pressure: Option<ProcFile>,
    before: Totals,
    read_at: Instant,
}

impl Signals {
    /// The signals of the calling thread's network namespace, for the sockets
    /// of these ports.
    ///
    /// # Errors
    /// When `/proc` or socket diagnostics are not there.
    pub fn open(watch: Vec<Watch>) -> io::Result<Self> {
        let mut signals = Self {
            watch,
            queues: SocketQueues::open()?,
            snmp: ProcFile::open("/proc/thread-self/net/snmp")?,
            // Not there without IPv6.
            snmp6: ProcFile::open("/proc/thread-self/net/snmp6").ok(),
            netstat: ProcFile::open("/proc/thread-self/net/netstat")?,
            softnet: ProcFile::open("/proc/thread-self/net/softnet_stat")?,
            pressure: ProcFile::open("/proc/pressure/cpu").ok(),
            before: Totals::default(),
            read_at: Instant::now(),
        };
        signals.read(true)?;
        Ok(signals)
    }

    /// How things went since the last call. `limiting` says whether something
    /// is refused already.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn read(&mut self, limiting: bool) -> io::Result<Pressure> {
        let queues = self.queues.read(&self.watch)?;
        let mut now = Totals { sockets_dropped: queues.dropped, ..Totals::default() };
        self.read_counters(&mut now)?;
        let elapsed_us = self.read_at.elapsed().as_micros() as u64;
        self.read_at = Instant::now();
        let before = std::mem::replace(&mut self.before, now);
        Ok(pressure(&before, &now, elapsed_us, queues.level_percent, limiting))
    }

    fn read_counters(&mut self, totals: &mut Totals) -> io::Result<()> {
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
        if let Some(file) = &mut self.pressure {
            totals.stalled_us = stalled_us(file.read()?);
        }
        Ok(())
    }
}

fn pressure(
    before: &Totals,
    now: &Totals,
    elapsed_us: u64,
    level_percent: u32,
    limiting: bool,
) -> Pressure {
    let since = |count: fn(&Totals) -> u64| count(now).saturating_sub(count(before));
    let stalled = since(|totals| totals.stalled_us) * 100 >= elapsed_us * STALL_PERCENT;
    let near = !limiting && stalled && since(|totals| totals.squeezed) > 0;
    Pressure {
        served: since(|totals| totals.served),
        lost_late: since(|totals| totals.sockets_dropped)
            + since(|totals| totals.listeners_dropped)
            + since(|totals| totals.backlog_dropped)
            + u64::from(near),
        level_percent,
        unseen_permille: 0,
    }
}

/// The number below a heading: `Udp: InDatagrams ...`, then `Udp: 7 ...`.
fn column(text: &str, group: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let found = names.split_whitespace().zip(values.split_whitespace());
    found.filter(|(other, _)| *other == name).find_map(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// The number behind a name on a line of its own.
fn row(text: &str, name: &str) -> u64 {
    let rows = text.lines().filter_map(|line| line.split_once(char::is_whitespace));
    let mut found = rows.filter(|(other, _)| *other == name);
    found.find_map(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

/// The sum of a column of hexadecimal numbers.
fn hexadecimal_sum(text: &str, column: usize) -> u64 {
    let cell = |line: &str| u64::from_str_radix(line.split_whitespace().nth(column)?, 16).ok();
    text.lines().filter_map(cell).sum()
}

/// Time in which some program waited, since boot (Documentation/accounting/psi).
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
    fn files_are_read_as_the_kernel_writes_them() {
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
    fn a_livelock_that_is_near_counts_once_and_only_at_the_start() {
        let before = Totals::default();
        let stalled = Totals { stalled_us: 600, ..before };
        let near = Totals { squeezed: 3, ..stalled };
        let lost = |now, limiting| pressure(&before, now, 1000, 0, limiting).lost_late;
        assert_eq!(lost(&near, false), 1);
        assert_eq!(lost(&near, true), 0);
        assert_eq!(lost(&stalled, false), 0, "a busy machine is no livelock");
        let dropped = Totals {
            served: 9,
            sockets_dropped: 1,
            listeners_dropped: 2,
            backlog_dropped: 4,
            ..before
        };
        let expected =
            Pressure { served: 9, lost_late: 7, level_percent: 80, ..Pressure::default() };
        assert_eq!(pressure(&before, &dropped, 1000, 80, true), expected);
        assert_eq!(pressure(&dropped, &before, 1000, 80, true).lost_late, 0, "sockets closed");
    }

    #[test]
    fn what_a_program_takes_is_served() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).unwrap();
            let target = socket.local_addr().unwrap();
            let watch = vec![format!("udp/{}", target.port()).parse().unwrap()];
            let mut signals = Signals::open(watch).unwrap();
            for _ in 0..10 {
                socket.send_to(b"hello", target).unwrap();
                socket.recv(&mut [0; 10]).unwrap();
            }
            assert!(signals.read(false).unwrap().served >= 10);
        }
    }
}
