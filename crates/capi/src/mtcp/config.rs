//! Configuration file of mTCP: lines `key = value`, with comments after `#`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use tidegate::CongestionControl;
use tidegate::host::{HostConfig, HostDevice};

use crate::config::{DEFAULT_SOCKET, EmbeddedHost, StackLocation, value};

/// Numbers that a program can ask for, as the header's `struct mtcp_conf`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtcpConf {
    pub(super) num_cores: i32,
    pub(super) max_concurrency: i32,
    pub(super) max_num_buffers: i32,
    pub(super) rcvbuf_size: i32,
    pub(super) sndbuf_size: i32,
    pub(super) tcp_timewait: i32,
    pub(super) tcp_timeout: i32,
}

/// Default size of mTCP's buffers, in bytes.
const DEFAULT_BUFFER_BYTES: i32 = 8_192;

impl Default for MtcpConf {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            num_cores: i32::try_from(processors).unwrap_or(1),
            max_concurrency: 10_000,
            max_num_buffers: 10_000,
            rcvbuf_size: DEFAULT_BUFFER_BYTES,
            sndbuf_size: DEFAULT_BUFFER_BYTES,
            tcp_timewait: 0,
            tcp_timeout: 30,
        }
    }
}

/// Contents of a configuration file.
#[derive(Debug)]
pub(super) struct MtcpConfig {
    pub(super) numbers: MtcpConf,
    pub(super) congestion_control: CongestionControl,
    pub(super) location: StackLocation,
}

/// Reads a configuration file. `numbers`: those that the program has set.
///
/// # Errors
/// The text has the path, the line, and what is wrong.
pub(super) fn read(path: &Path, numbers: MtcpConf) -> Result<MtcpConfig, String> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text, numbers).map_err(|error| format!("{}: {error}", path.display()))
}

fn parse(text: &str, mut numbers: MtcpConf) -> Result<MtcpConfig, String> {
    let mut host = HostConfig::default();
    let mut congestion_control = CongestionControl::Cubic;
    let (mut socket, mut is_daemon) = (None, false);
    let (mut receive_bytes, mut send_bytes) = (None, None);
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let (key, text) = line.split_once('=').ok_or_else(|| format!("{line:?} has no `=`"))?;
        let (key, text) = (key.trim(), text.trim());
        match key {
            "num_cores" => numbers.num_cores = positive(key, text)?,
            "max_concurrency" => numbers.max_concurrency = positive(key, text)?,
            "max_num_buffers" => numbers.max_num_buffers = positive(key, text)?,
            "rcvbuf" => receive_bytes = Some(positive(key, text)?),
            "sndbuf" => send_bytes = Some(positive(key, text)?),
            "tcp_timeout" => numbers.tcp_timeout = value(key, text)?,
            "tcp_timewait" => numbers.tcp_timewait = value(key, text)?,
            "io" => match text {
                // Of mTCP: any way to the interface that works here.
                "psio" | "dpdk" | "netmap" | "onvm" => {}
                "daemon" => is_daemon = true,
                _ => host.io = value(key, text)?,
            },
            // One interface; the stack has one device.
            "port" => host.iface = text.split_whitespace().next().map(str::to_owned),
            "addr" => host.addresses.push(value(key, text)?),
            "gateway" => host.gateways.push(value::<IpAddr>(key, text)?),
            "socket" => socket = Some(PathBuf::from(text)),
            "cc" => match text {
                "reno" => congestion_control = CongestionControl::NewReno,
                "cubic" => congestion_control = CongestionControl::Cubic,
                _ => return Err(format!("cc = {text:?}: expected reno or cubic")),
            },
            "core_mask" | "num_mem_ch" | "stat_print" | "multiprocess" | "onvm_inst"
            | "onvm_serv" | "onvm_dest" => {}
            _ => return Err(format!("unknown key {key:?}")),
        }
    }
    if let Some(bytes) = receive_bytes.or(send_bytes) {
        numbers.rcvbuf_size = bytes;
    }
    if let Some(bytes) = send_bytes.or(receive_bytes) {
        numbers.sndbuf_size = bytes;
    }
    // As mTCP takes the addresses of its interface.
    host.shared = host.addresses.is_empty() && !matches!(host.io, HostDevice::Tap);
    let location = match is_daemon || socket.is_some() {
        true => {
            let usual = std::env::var_os("TIDEGATE_SOCKET").map(PathBuf::from);
            let socket = socket.or(usual).unwrap_or_else(|| DEFAULT_SOCKET.into());
            StackLocation::daemon(&socket)
        }
        false => StackLocation::Embedded(Box::new(EmbeddedHost { host, ..Default::default() })),
    };
    Ok(MtcpConfig { numbers, congestion_control, location })
}

fn positive(key: &str, text: &str) -> Result<i32, String> {
    match value(key, text)? {
        number @ 1.. => Ok(number),
        number => Err(format!("{key} = {number}: expected a positive number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_mtcp_are_read() {
        let text = "# of a server\nio = dpdk\nnum_cores = 2\nport = eth0 eth1\nrcvbuf = 4096\n\
                    max_concurrency = 77\nmax_num_buffers = 78\ntcp_timeout = -1\n\
                    tcp_timewait = 3  # seconds\nstat_print = eth0\nnum_mem_ch = 4\ncc = reno\n";
        let config = parse(text, MtcpConf::default()).unwrap();
        let expected = MtcpConf {
            num_cores: 2,
            max_concurrency: 77,
            max_num_buffers: 78,
            rcvbuf_size: 4096,
            sndbuf_size: 4096,
            tcp_timewait: 3,
            tcp_timeout: -1,
        };
        assert_eq!(config.numbers, expected);
        assert_eq!(config.congestion_control, CongestionControl::NewReno);
        let StackLocation::Embedded(embedded) = config.location else { panic!("embedded") };
        assert_eq!(embedded.host.iface.as_deref(), Some("eth0"));
        assert!(embedded.host.shared);
    }

    #[test]
    fn keys_of_tidegate_are_read() {
        let parse = |text| parse(text, MtcpConf::default());
        let own = parse("io = xdp\nport = eth0\naddr = 192.0.2.7/24\ngateway = 192.0.2.1\n");
        let StackLocation::Embedded(embedded) = own.unwrap().location else { panic!("embedded") };
        assert!(!embedded.host.shared && embedded.host.gateways.len() == 1);
        let daemon = parse("io = daemon\nsocket = /run/x.sock\n").unwrap().location;
        assert!(matches!(daemon, StackLocation::Daemon { .. }));
        for (text, part) in [("wings = 2", "wings"), ("num_cores = 0", "positive"), ("io", "`=`")] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
