//! Routing daemons that get the addresses of a service.

mod bird;
mod exabgp;
mod frr;

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidegate_device::tap::StateInterface;

use self::bird::Bird;
use self::exabgp::ExaBgp;
use self::frr::Frr;
use crate::Failure;

/// Routing daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RoutingDaemon {
    /// BIRD 2: its control socket enables and disables the protocols that hold the routes
    Bird,
    /// FRR: vtysh adds and removes static routes
    Frr,
    /// ExaBGP: it starts this command as a process, and reads its standard output
    Exabgp,
}

/// Options of the routing daemon.
#[derive(Args, Debug)]
pub(super) struct RoutingOptions {
    /// Routing daemon that announces the addresses
    #[arg(long, value_enum, value_name = "DAEMON", help_heading = "Routing daemon")]
    to: RoutingDaemon,
    /// Name of the interface that the routes of BIRD and FRR need. It is up while the addresses are
    /// announced, and the kernel removes it with this process, however the process ends
    #[arg(long, value_name = "NAME", default_value = "tidegate0", help_heading = "Routing daemon")]
    interface: String,
    /// Control socket of BIRD
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "/run/bird/bird.ctl",
        help_heading = "Routing daemon"
    )]
    bird: PathBuf,
    /// Static protocol of BIRD that holds the routes; may be repeated
    /// [default: tidegate4, tidegate6, by the families of the addresses]
    #[arg(long, value_name = "NAME", help_heading = "Routing daemon")]
    protocol: Vec<String>,
    /// Program that talks to FRR
    #[arg(long, value_name = "PROGRAM", default_value = "vtysh", help_heading = "Routing daemon")]
    vtysh: PathBuf,
    /// Next hop that ExaBGP announces, at most one per address family [default: self]
    #[arg(long, value_name = "ADDRESS", help_heading = "Routing daemon")]
    next_hop: Vec<IpAddr>,
}

/// Control of one routing daemon.
trait RoutingControl {
    /// Checks that the daemon can be controlled, and withdraws what an earlier process left.
    fn prepare(&mut self) -> Result<(), Failure>;

    /// Announces the addresses.
    fn announce(&mut self) -> Result<(), Failure>;

    /// Withdraws the addresses.
    fn withdraw(&mut self) -> Result<(), Failure>;
}

/// Announcement of the addresses by a routing daemon.
pub(super) struct Announcement {
    control: Box<dyn RoutingControl>,
    /// Interface that the routes depend on; ExaBGP needs none.
    interface: Option<StateInterface>,
}

impl RoutingOptions {
    /// True if standard output is for the routing daemon alone.
    pub(super) fn takes_output(&self) -> bool {
        self.to == RoutingDaemon::Exabgp
    }

    /// Lines to add to the configuration of the routing daemon.
    pub(super) fn example(&self, addresses: &[IpAddr]) -> String {
        match self.to {
            RoutingDaemon::Bird => {
                bird::example(&self.protocols(addresses), &self.interface, addresses)
            }
            RoutingDaemon::Frr => frr::example(),
            RoutingDaemon::Exabgp => exabgp::example(addresses),
        }
    }

    /// Takes control of the routing daemon; nothing is announced yet.
    pub(super) fn open(&self, addresses: &[IpAddr]) -> Result<Announcement, Failure> {
        let interface = match self.to {
            RoutingDaemon::Exabgp => None,
            _ => Some(StateInterface::create(&self.interface).map_err(|error| {
                format!(
                    "--interface {}: {error}; end the other `tidegate announce`, or give another name",
                    self.interface
                )
            })?),
        };
        let control: Box<dyn RoutingControl> = match self.to {
            RoutingDaemon::Bird => {
                let example = self.example(addresses);
                Box::new(Bird::new(self.bird.clone(), self.protocols(addresses), example))
            }
            RoutingDaemon::Frr => {
                Box::new(Frr::new(self.vtysh.clone(), &self.interface, addresses))
            }
            RoutingDaemon::Exabgp => {
                let out = Box::new(std::io::stdout());
                Box::new(ExaBgp::new(out, addresses, &self.next_hop))
            }
        };
        let mut announcement = Announcement { control, interface };
        announcement.control.prepare()?;
        if self.takes_output() {
            exabgp::read_replies()?;
        }
        Ok(announcement)
    }

    /// Names of BIRD's protocols.
    fn protocols(&self, addresses: &[IpAddr]) -> Vec<String> {
        if !self.protocol.is_empty() {
            return self.protocol.clone();
        }
        let families = [
            ("tidegate4", addresses.iter().any(IpAddr::is_ipv4)),
            ("tidegate6", addresses.iter().any(IpAddr::is_ipv6)),
        ];
        families.into_iter().filter(|(_, is_used)| *is_used).map(|(name, _)| name.into()).collect()
    }
}

impl Announcement {
    /// True if the routing daemon forgets the addresses when it starts anew while this process runs.
    pub(super) fn needs_refresh(&self) -> bool {
        self.interface.is_some()
    }

    /// Announces or withdraws the addresses.
    ///
    /// # Errors
    /// The routing daemon does not obey. Withdrawn addresses are withdrawn even then if their routes
    /// are over the interface.
    pub(super) fn set(&mut self, is_announced: bool) -> Result<(), Failure> {
        if is_announced {
            self.control.announce()?;
            return Ok(self.interface.as_ref().map_or(Ok(()), |one| one.set_up(true))?);
        }
        // The interface first: nothing of that waits for the daemon.
        let interface = self.interface.as_ref().map_or(Ok(()), |one| one.set_up(false));
        self.control.withdraw()?;
        Ok(interface?)
    }
}

/// Prefix of one address, as routing daemons write it.
fn prefix(address: &IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}
