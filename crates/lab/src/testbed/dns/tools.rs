//! Packaged programs that ask a DNS server: kxdpgun of Knot DNS and dnsperf of DNS-OARC.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::error::LabError;
use crate::testbed::dns::servers::check_installed;
use crate::testbed::netns::{VethPair, run_to_end};

/// Time for a tool to start.
const START_TIME: Duration = Duration::from_millis(1_500);

/// Queries of one thread of dnsperf that wait for answers.
const DNSPERF_WAITING_QUERIES: usize = 1_000;

/// A tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DnsTool {
    /// Sends by AF_XDP at a given rate, and does not wait for answers.
    Kxdpgun,
    /// Sends by kernel sockets, a thread for each core with a socket for each core, and waits for
    /// answers.
    Dnsperf,
}

/// A tool's view of a server.
pub(crate) struct DnsToolRun<'a> {
    /// The tool is in `a`, the server in `b`.
    pub(crate) pair: &'a VethPair,
    /// Cores of the tool, of which kxdpgun takes the first.
    pub(crate) cores: &'a [usize],
    /// Address of the kernel's stack in `a`.
    pub(crate) source: Ipv4Addr,
    /// Address of the server.
    pub(crate) target: IpAddr,
    /// File of queries in dnsperf's format.
    pub(crate) queries: &'a Path,
}

/// Packets per second that a tool sent, and that the server sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DnsToolRates {
    pub(crate) sent_pps: f64,
    pub(crate) answered_pps: f64,
}

impl DnsTool {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Kxdpgun, Self::Dnsperf];

    /// Name of the program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kxdpgun => "kxdpgun",
            Self::Dnsperf => "dnsperf",
        }
    }

    /// Checks that the tool is installed.
    pub(crate) fn check_installed(self) -> Result<(), LabError> {
        let package = match self {
            Self::Kxdpgun => "knot-dnsutils",
            Self::Dnsperf => "dnsperf",
        };
        check_installed(self.name(), package)
    }

    /// Runs the tool and counts the packets of both devices for `measured`. kxdpgun sends
    /// `rate_pps`; dnsperf as fast as answers come.
    ///
    /// # Errors
    /// If the tool fails.
    pub(crate) fn measure(
        self,
        run: &DnsToolRun<'_>,
        rate_pps: f64,
        measured: Duration,
    ) -> Result<DnsToolRates, LabError> {
        let DnsToolRun { pair, cores, source, target, queries } = run;
        let (a, b) = (&pair.a, &pair.b);
        let seconds = format!("{:.0}", (START_TIME + measured).as_secs_f64().ceil() + 1.0);
        let (address, queries) = (target.to_string(), queries.display().to_string());
        let mut command = a.namespace.command_on_cores(cores, self.name());
        match self {
            Self::Kxdpgun => {
                command.args(["-t", &seconds, "-b", "10", "-i", &queries]);
                command.args(["-Q", &format!("{rate_pps:.0}"), "-F", &cores[0].to_string()]);
                command.args(["-I", &a.device, "-l", &source.to_string(), &address]);
            }
            Self::Dnsperf => {
                let (threads, waiting) = (cores.len(), DNSPERF_WAITING_QUERIES * cores.len());
                command.args(["-s", &address, "-d", &queries, "-l", &seconds]);
                command.args(["-q", &waiting.to_string(), "-T", &threads.to_string()]);
                command.args(["-c", &threads.pow(2).to_string()]);
            }
        }
        let reading = || Ok::<_, LabError>((a.tx_packets()?, b.tx_packets()?));
        thread::scope(|scope| {
            let tool = scope.spawn(|| run_to_end(&mut command, "knot-dnsutils dnsperf"));
            thread::sleep(START_TIME);
            let before = reading();
            thread::sleep(measured);
            let after = reading();
            tool.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let ((sent, answered), (sent_then, answered_then)) = (before?, after?);
            let per_second = |packets: u64| packets as f64 / measured.as_secs_f64();
            Ok(DnsToolRates {
                sent_pps: per_second(sent_then - sent),
                answered_pps: per_second(answered_then - answered),
            })
        })
    }
}
