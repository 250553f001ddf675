//! Defaults of the system that a script was written for.

use std::collections::HashMap;

use tidegate_stack::{CongestionControl, Keepalive, TcpOptions};

/// System that a script was written for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum System {
    #[default]
    Linux,
    FreeBsd,
}

/// Settings from the flags of the library and from `sysctl` commands of the script.
#[derive(Clone, Debug)]
pub struct Profile {
    pub system: System,
    pub mtu: usize,
    /// File of `NAME=VALUE` lines, to which the script's `sysctl` commands are appended.
    pub sysctl_file: Option<String>,
    /// File for the states of all sockets.
    pub state_file: Option<String>,
}

impl Profile {
    /// Parses flags such as `freebsd,mtu=1280,sysctl=/tmp/file`.
    pub fn parse(flags: &str) -> Self {
        let mut profile =
            Self { system: System::Linux, mtu: 1500, sysctl_file: None, state_file: None };
        for flag in flags.split(',') {
            match flag.split_once('=') {
                Some(("mtu", mtu)) => profile.mtu = mtu.parse().unwrap_or(1500),
                Some(("sysctl", path)) => profile.sysctl_file = Some(path.to_owned()),
                Some(("states", path)) => profile.state_file = Some(path.to_owned()),
                _ if flag == "freebsd" => profile.system = System::FreeBsd,
                _ => {}
            }
        }
        profile
    }

    fn sysctls(&self) -> HashMap<String, String> {
        let path = self.sysctl_file.as_deref();
        let text = path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
    }

    /// Options of a new socket.
    pub fn socket_options(&self) -> TcpOptions {
        let sysctls = self.sysctls();
        let number = |name: &str| sysctls.get(name).and_then(|value| value.parse::<u32>().ok());
        match self.system {
            // The window scale follows from the largest buffer, which the window itself does not
            // reach: see `established_receive_buffer`.
            System::FreeBsd => TcpOptions::default()
                .receive_buffer_bytes(number("kern.ipc.maxsockbuf").unwrap_or(2_097_152))
                .send_buffer_bytes(number("net.inet.tcp.sendspace").unwrap_or(32_768))
                .ecn(number("net.inet.tcp.ecn.enable") == Some(1)),
            System::Linux => {
                let third = |name: &str, default| {
                    let value = sysctls.get(name).and_then(|v| v.split_whitespace().last());
                    value.and_then(|v| v.parse().ok()).unwrap_or(default)
                };
                let options = TcpOptions::default()
                    .receive_buffer_bytes(third("net.ipv4.tcp_rmem", 15 << 20))
                    .send_buffer_bytes(third("net.ipv4.tcp_wmem", 4 << 20))
                    .ecn(number("net.ipv4.tcp_ecn") == Some(1));
                match sysctls.get("net.ipv4.tcp_congestion_control").map(String::as_str) {
                    Some("reno") => options.congestion_control(CongestionControl::NewReno),
                    _ => options,
                }
            }
        }
    }

    /// `SO_RCVBUF` of a socket before its connection is established.
    pub fn receive_buffer(&self) -> Option<u32> {
        let number = |value: &String| value.parse().ok();
        let sysctl = self.sysctls().get("net.inet.tcp.recvspace").and_then(number);
        (self.system == System::FreeBsd).then(|| sysctl.unwrap_or(65_536))
    }

    /// `SO_RCVBUF` of an established connection: FreeBSD rounds it up to a multiple of the MSS.
    pub fn established_receive_buffer(&self, buffer_bytes: u32, mss_bytes: u16) -> u32 {
        match self.system {
            System::FreeBsd if mss_bytes > 0 => buffer_bytes.next_multiple_of(mss_bytes.into()),
            _ => buffer_bytes,
        }
    }

    /// Keep-alive parameters of `SO_KEEPALIVE`.
    pub fn keepalive(&self) -> Keepalive {
        let sysctls = self.sysctls();
        let number = |name: &str, default| {
            sysctls.get(name).and_then(|value| value.parse::<u32>().ok()).unwrap_or(default)
        };
        match self.system {
            System::Linux => Keepalive::default(),
            System::FreeBsd => Keepalive::default()
                .idle_ms(number("net.inet.tcp.keepidle", 7_200_000))
                .interval_ms(number("net.inet.tcp.keepintvl", 75_000))
                .probes(number("net.inet.tcp.keepcnt", 8).min(255) as u8),
        }
    }
}
