//! `tidegate trace`: one flow through admission, stack and program, with times.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tidegate::capture::{CaptureDirection, CaptureRecord};
use tidegate_device::trace::Summary;
use tidegate_wire::{DropReason, Medium};

use super::session::Session;
use super::{CaptureInfo, POLL_INTERVAL, drop_reason, filter};
use crate::output::{log, print_line};
use crate::process::stop_flag;
use crate::{Failure, control};

/// Bytes of each frame to copy: all headers.
const SNAP_BYTES: usize = 256;
/// Size of the ring of a core.
const RING_BYTES: usize = 1 << 20;

/// Flags of `trace`.
#[derive(Args)]
#[command(after_help = "\
A line for each step: seconds since the first one, microseconds since the step before, and the step:
  received   a frame has arrived, at the time of its burst
  refused    admission or the gate has dropped the frame, with the reason
  dropped    the stack has dropped the frame, with the reason
  done       the stack has processed the frame
  notified   the program has been notified that it can read
  sent       a frame has been passed to the device

Examples:
  tidegate trace /run/dns.ctl udp 192.0.2.53:53
  tidegate trace /run/http.ctl tcp '[2001:db8::80]:80' '[2001:db8::1]:40000' --json")]
pub(crate) struct Trace {
    /// Control socket of the server or daemon, as given to its --control
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Protocol of the flow: udp or tcp
    #[arg(value_name = "PROTOCOL")]
    protocol: Protocol,
    /// Address and port of the server
    #[arg(value_name = "LOCAL")]
    local: SocketAddr,
    /// Address and port of the client; without it, all clients
    #[arg(value_name = "PEER")]
    peer: Option<SocketAddr>,
    /// End after this many frames
    #[arg(short, long, value_name = "COUNT")]
    count: Option<u64>,
    /// Print each step as a JSON object
    #[arg(long)]
    json: bool,
}

/// Transport protocol of a flow.
#[derive(Clone, Copy, PartialEq)]
enum Protocol {
    Udp,
    Tcp,
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Udp, Self::Tcp]
            .into_iter()
            .find(|protocol| protocol.name() == text)
            .ok_or_else(|| format!("'{text}' is neither udp nor tcp"))
    }
}

/// Step of a packet.
#[derive(Serialize)]
struct Step<'a> {
    /// Time since 1970.
    time_ns: u64,
    step: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<usize>,
    text: String,
}

/// Times of the steps printed so far.
#[derive(Default)]
struct Steps {
    first_ns: Option<u64>,
    last_ns: u64,
}

impl Steps {
    fn print(&mut self, step: &Step<'_>, as_json: bool) -> Result<(), Failure> {
        if as_json {
            return print_line!("{}", serde_json::to_string(step)?);
        }
        let first_ns = *self.first_ns.get_or_insert(step.time_ns);
        let since_first = Duration::from_nanos(step.time_ns.saturating_sub(first_ns));
        let last_ns = if self.last_ns == 0 { first_ns } else { self.last_ns };
        let since_last = step.time_ns.saturating_sub(last_ns) as f64 / 1000.0;
        self.last_ns = step.time_ns;
        let Step { step: name, reason, text, .. } = step;
        let reason = reason.map(|reason| format!("{reason} ")).unwrap_or_default();
        print_line!(
            "{:.6} {since_last:>+9.1} us  {name:<9} {reason}{text}",
            since_first.as_secs_f64()
        )
    }
}

impl Trace {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let stop = stop_flag(None)?;
        if self.peer.is_some_and(|peer| peer.is_ipv4() != self.local.is_ipv4()) {
            return Err("both addresses of a flow are of one family".into());
        }
        let info = control::capture_info(&self.socket)?;
        let medium = if info.is_ip { Medium::Ip } else { Medium::Ethernet };
        let program = filter::compile(&self.expression(), medium)?;
        let mut session =
            Session::start(&self.socket, &info, &program, (SNAP_BYTES, true), RING_BYTES)?;
        log(format_args!("tracing at {} (pid {})", info.program, info.pid));
        let offset_ns = session.wall_offset_ns();
        let mut left = self.count.unwrap_or(u64::MAX);
        let mut steps = Steps::default();
        while left > 0 {
            if stop.load(Ordering::Relaxed) {
                session.end();
            }
            let has_ended = session.has_ended();
            let read = session.read(|_, record| {
                let is_frame = record.direction != CaptureDirection::Notified;
                for step in self.steps_of(medium, &info, record, offset_ns) {
                    steps.print(&step, self.json)?;
                }
                left -= u64::from(is_frame);
                Ok(left > 0)
            })?;
            if read == 0 {
                if has_ended {
                    break;
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        let lost: u64 = session.counts().iter().map(|core| core.lost).sum();
        if lost > 0 {
            log(format_args!("{lost} steps lost because this command was slow"));
        }
        Ok(())
    }

    /// Filter expression of the flow, in both directions.
    fn expression(&self) -> String {
        let (protocol, local, port) = (self.protocol.name(), self.local.ip(), self.local.port());
        let end = |way: &str, address: SocketAddr| {
            format!("{way} host {} and {way} port {}", address.ip(), address.port())
        };
        match self.peer {
            None => format!(
                "{protocol} and ((dst host {local} and dst port {port}) \
                 or (src host {local} and src port {port}))"
            ),
            Some(peer) => format!(
                "{protocol} and (({} and {}) or ({} and {}))",
                end("dst", self.local),
                end("src", peer),
                end("src", self.local),
                end("dst", peer)
            ),
        }
    }

    /// Steps that a record tells of.
    fn steps_of<'i>(
        &self,
        medium: Medium,
        info: &'i CaptureInfo,
        record: &CaptureRecord<'_>,
        offset_ns: i128,
    ) -> Vec<Step<'i>> {
        let wall_ns = |ns| Session::wall_time(offset_ns, ns).as_nanos() as u64;
        let (time_ns, done_ns) = (wall_ns(record.time_ns), wall_ns(record.done_ns));
        let bytes = Some(record.original_bytes);
        let text = Summary::new(medium, record.data).to_string();
        match record.direction {
            CaptureDirection::Notified => {
                let text = String::from_utf8_lossy(record.data).into_owned();
                if !self.concerns(&text) {
                    return Vec::new();
                }
                vec![Step { time_ns, step: "notified", reason: None, bytes: None, text }]
            }
            CaptureDirection::Transmitted => {
                vec![Step { time_ns, step: "sent", reason: None, bytes, text }]
            }
            CaptureDirection::Received | CaptureDirection::Loopback => {
                let reason = drop_reason(info, record);
                let end = match reason {
                    Some(name) if is_before_stack(name) => "refused",
                    Some(_) => "dropped",
                    None => "done",
                };
                let sentence = reason.and_then(DropReason::from_name).map(DropReason::sentence);
                let sentence = sentence.unwrap_or_default().to_owned();
                vec![
                    Step { time_ns, step: "received", reason: None, bytes, text },
                    Step { time_ns: done_ns, step: end, reason, bytes: None, text: sentence },
                ]
            }
        }
    }

    /// True if a notification is one of the flow's socket: protocol, local address, peer.
    fn concerns(&self, text: &str) -> bool {
        let mut words = text.split(' ');
        let is_protocol = words.next() == Some(self.protocol.name());
        let mut address = || words.next().and_then(|word| word.parse::<SocketAddr>().ok());
        let is_local = address().is_some_and(|local| {
            local.port() == self.local.port()
                && (local.ip().is_unspecified() || local.ip() == self.local.ip())
        });
        let is_peer = match (address(), self.peer) {
            (Some(peer), Some(wanted)) => peer == wanted,
            _ => true,
        };
        is_protocol && is_local && is_peer
    }
}

/// True for reasons of admission and of the gate.
fn is_before_stack(reason: &str) -> bool {
    reason.starts_with("admission_") || reason == "input_queue_full"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(peer: Option<&str>) -> Trace {
        Trace {
            socket: PathBuf::new(),
            protocol: Protocol::Tcp,
            local: "[fd00::2]:80".parse().unwrap(),
            peer: peer.map(|peer| peer.parse().unwrap()),
            count: None,
            json: false,
        }
    }

    #[test]
    fn notifications_of_other_flows_are_left_out() {
        let one = trace(Some("[fd00::1]:9"));
        for (text, all_clients, one_client) in [
            ("tcp [fd00::2]:80 [fd00::1]:9", true, true),
            ("tcp [::]:80", true, true),
            ("tcp [fd00::2]:80 [fd00::1]:8", true, false),
            ("udp [fd00::2]:80", false, false),
            ("tcp [fd00::3]:80", false, false),
            ("nonsense", false, false),
        ] {
            assert_eq!((trace(None).concerns(text), one.concerns(text)), (all_clients, one_client));
        }
    }
}
