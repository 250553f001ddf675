//! ExaBGP, which starts this process and reads commands from its standard output.
//!
//! ExaBGP keeps the routes of a process that has ended, and starts the process again. So each
//! process withdraws its routes first.

use std::io::{self, BufRead, Write};
use std::net::IpAddr;

use super::{RoutingControl, prefix};
use crate::Failure;

pub(super) struct ExaBgp {
    out: Box<dyn Write>,
    /// Routes with their next hops.
    routes: Vec<String>,
}

impl ExaBgp {
    pub(super) fn new(out: Box<dyn Write>, addresses: &[IpAddr], next_hops: &[IpAddr]) -> Self {
        let route = |address: &IpAddr| {
            let next_hop = next_hops.iter().find(|hop| hop.is_ipv4() == address.is_ipv4());
            let next_hop = next_hop.map_or_else(|| "self".to_owned(), IpAddr::to_string);
            format!("route {} next-hop {next_hop}", prefix(address))
        };
        Self { out, routes: addresses.iter().map(route).collect() }
    }

    fn write(&mut self, verb: &str) -> Result<(), Failure> {
        for route in &self.routes {
            writeln!(self.out, "{verb} {route}")?;
        }
        self.out.flush().map_err(|error| format!("ExaBGP does not read: {error}").into())
    }
}

impl RoutingControl for ExaBgp {
    fn prepare(&mut self) -> Result<(), Failure> {
        self.write("withdraw")
    }

    fn announce(&mut self) -> Result<(), Failure> {
        self.write("announce")
    }

    fn withdraw(&mut self) -> Result<(), Failure> {
        self.write("withdraw")
    }
}

/// Starts the thread that reads ExaBGP's replies. Without ExaBGP at the other end this process ends:
/// nobody would read that the service has failed.
pub(super) fn read_replies() -> io::Result<()> {
    let read = || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if line.contains("error") {
                tracing::warn!("ExaBGP refuses a command: {line}; its own log says why");
            }
        }
        tracing::error!("ExaBGP has ended; start this command from its configuration");
        std::process::exit(1);
    };
    std::thread::Builder::new().name("exabgp".to_owned()).spawn(read).map(drop)
}

/// Lines for ExaBGP's configuration.
pub(super) fn example(addresses: &[IpAddr]) -> String {
    let addresses: String = addresses.iter().map(|one| format!(" --address {one}")).collect();
    format!(
        "process tidegate {{\n  run /usr/bin/tidegate announce --to exabgp{addresses} --check tcp:53;\n  \
         encoder text;\n}}\nneighbor 10.0.0.1 {{\n  api {{ processes [ tidegate ]; }}\n}}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn routes_are_withdrawn_first_and_announced_with_their_next_hop() {
        let written = Written::default();
        let addresses = ["192.0.2.53", "2001:db8::53"].map(|address| address.parse().unwrap());
        let next_hops = ["2001:db8::1".parse().unwrap()];
        let mut control = ExaBgp::new(Box::new(written.clone()), &addresses, &next_hops);
        control.prepare().unwrap();
        control.announce().unwrap();
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "withdraw route 192.0.2.53/32 next-hop self",
                "withdraw route 2001:db8::53/128 next-hop 2001:db8::1",
                "announce route 192.0.2.53/32 next-hop self",
                "announce route 2001:db8::53/128 next-hop 2001:db8::1",
            ]
        );
    }
}
