//! FRR, by `vtysh`: static routes over the interface of this process, which FRR uses only while the
//! interface is up.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::{RoutingControl, prefix};
use crate::Failure;

pub(super) struct Frr {
    vtysh: PathBuf,
    /// Configuration lines of the routes.
    routes: Vec<String>,
}

impl Frr {
    pub(super) fn new(vtysh: PathBuf, interface: &str, addresses: &[IpAddr]) -> Self {
        let route = |address: &IpAddr| {
            let family = if address.is_ipv4() { "ip" } else { "ipv6" };
            format!("{family} route {} {interface}", prefix(address))
        };
        Self { vtysh, routes: addresses.iter().map(route).collect() }
    }

    /// Applies the lines of all routes, each after `prefix`; returns the configuration that is in
    /// force then.
    fn configure(&self, prefix: &str) -> Result<String, Failure> {
        let mut command = Command::new(&self.vtysh);
        command.args(["-c", "configure terminal"]);
        for route in &self.routes {
            command.args(["-c", &format!("{prefix}{route}")]);
        }
        command.args(["-c", "end", "-c", "show running-config"]);
        let vtysh = self.vtysh.display();
        let output = command.stdin(Stdio::null()).output().map_err(|error| {
            format!("--vtysh {vtysh}: {error}; install FRR, or give the path of its vtysh")
        })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        Err(self.failure(&format!("{text}{}", String::from_utf8_lossy(&output.stderr))))
    }

    /// Adds the routes. vtysh ends with success even when it could not, so the configuration counts.
    fn add(&self) -> Result<(), Failure> {
        let config = self.configure("")?;
        let is_missing =
            |route: &&String| !config.lines().any(|line| line.trim() == route.as_str());
        match self.routes.iter().find(is_missing) {
            None => Ok(()),
            Some(route) => Err(self.failure(&format!("FRR did not take `{route}`"))),
        }
    }

    fn failure(&self, text: &str) -> Failure {
        format!(
            "{}: {}; FRR has to run with staticd, and this user has to be in the group `frrvty`",
            self.vtysh.display(),
            text.trim()
        )
        .into()
    }
}

impl RoutingControl for Frr {
    fn prepare(&mut self) -> Result<(), Failure> {
        // The interface is down, so the routes are not in use.
        self.add()
    }

    fn announce(&mut self) -> Result<(), Failure> {
        self.add()
    }

    fn withdraw(&mut self) -> Result<(), Failure> {
        self.configure("no ").map(drop)
    }
}

/// Lines for FRR's configuration.
pub(super) fn example() -> String {
    "router bgp 65001\n neighbor 10.0.0.1 remote-as 65000\n address-family ipv4 unicast\n  \
     redistribute static\n"
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Program that appends its arguments to a file, prints `text`, and ends with `status`.
    fn program(folder: &std::path::Path, text: &str, status: u8) -> PathBuf {
        let path = folder.join("vtysh");
        let log = folder.join("log").display().to_string();
        let script = format!("#!/bin/sh\necho \"$*\" >> {log}\necho '{text}'\nexit {status}\n");
        let source = folder.join("script");
        fs::write(&source, script).unwrap();
        // Written by another process: a child of another test could hold our descriptor open for
        // writing, and the kernel runs no such file.
        let install = Command::new("install").args(["-m", "755"]).arg(&source).arg(&path).status();
        assert!(install.unwrap().success());
        path
    }

    #[test]
    fn routes_are_added_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let addresses = ["192.0.2.53", "2001:db8::53"].map(|address| address.parse().unwrap());
        let config = "ip route 192.0.2.53/32 tidegate0\nipv6 route 2001:db8::53/128 tidegate0";
        let mut control = Frr::new(program(folder.path(), config, 0), "tidegate0", &addresses);
        control.announce().unwrap();
        control.withdraw().unwrap();
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        let end = "-c end -c show running-config";
        let expected = [
            "-c configure terminal -c ip route 192.0.2.53/32 tidegate0 \
             -c ipv6 route 2001:db8::53/128 tidegate0",
            "-c configure terminal -c no ip route 192.0.2.53/32 tidegate0 \
             -c no ipv6 route 2001:db8::53/128 tidegate0",
        ];
        let expected = expected.map(|commands| format!("{commands} {end}\n")).concat();
        assert_eq!(log, expected);
    }

    #[test]
    fn refusal_and_missing_program_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let addresses = ["192.0.2.53".parse().unwrap()];
        // vtysh ends with success although it was not let in.
        for (text, status) in [("reason", 1), ("Authentication failure", 0)] {
            let vtysh = program(folder.path(), text, status);
            let mut control = Frr::new(vtysh, "tidegate0", &addresses);
            assert!(control.announce().unwrap_err().to_string().contains("frrvty"));
        }
        let mut control = Frr::new(folder.path().join("none"), "tidegate0", &addresses);
        assert!(control.announce().unwrap_err().to_string().contains("install FRR"));
    }
}
