//! Which sockets move to Tidegate.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use tidegate::IpCidr;

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// Which sockets move. By default all of them do that are not about loopback.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    /// Ports to listen on, or all.
    listen: Option<Vec<Ports>>,
    /// Networks to connect or send to, or all that the stack reaches.
    connect: Option<Vec<IpCidr>>,
}

/// A rule file, as it is written.
#[derive(Deserialize, Serialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Written {
    listen: Option<Vec<String>>,
    connect: Option<Vec<String>>,
}

/// One line of `listen`: `6379`, `80-90`, `udp:53`, `tcp:7000-7010`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    protocol: Option<Protocol>,
    first: u16,
    last: u16,
}

impl Ports {
    fn parse(text: &str) -> Option<Self> {
        let (protocol, ports) = match text.split_once(':') {
            Some(("tcp", ports)) => (Some(Protocol::Tcp), ports),
            Some(("udp", ports)) => (Some(Protocol::Udp), ports),
            Some(_) => return None,
            None => (None, text),
        };
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last).then_some(Self { protocol, first, last })
    }

    fn has(self, protocol: Protocol, port: u16) -> bool {
        self.protocol.is_none_or(|own| own == protocol) && (self.first..=self.last).contains(&port)
    }
}

impl Rules {
    /// # Errors
    /// Names the file, and what in it cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path);
        text.map_err(|error| error.to_string())
            .and_then(|text| Self::parse(&text))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let written: Written = toml::from_str(text).map_err(|error| error.to_string())?;
        let ports = |text: &String| {
            Ports::parse(text).ok_or_else(|| {
                format!("listen {text:?}: expected a port, ports as \"80-90\", or \"udp:53\"")
            })
        };
        let network = |text: &String| {
            text.parse().map_err(|error| format!("connect {text:?}: {error}; as \"192.0.2.0/24\""))
        };
        let listen = written.listen.map(|all| all.iter().map(ports).collect()).transpose()?;
        let connect = written.connect.map(|all| all.iter().map(network).collect()).transpose()?;
        Ok(Self { listen, connect })
    }

    /// Whether a socket that listens on this address moves.
    pub(crate) fn moves_listener(&self, protocol: Protocol, local: SocketAddr) -> bool {
        let is_listed = |all: &Vec<Ports>| all.iter().any(|one| one.has(protocol, local.port()));
        !is_loopback(local.ip()) && self.listen.as_ref().is_none_or(is_listed)
    }

    /// Whether a socket that connects or sends there moves, if the stack
    /// reaches it.
    pub(crate) fn moves_to(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        let is_listed = |all: &Vec<IpCidr>| all.iter().any(|network| network.contains(peer));
        !is_loopback(peer) && self.connect.as_ref().is_none_or(is_listed)
    }
}

/// Whether it stays inside this host.
pub(crate) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moves(rules: &Rules, protocol: Protocol, local: &str) -> bool {
        rules.moves_listener(protocol, local.parse().unwrap())
    }

    #[test]
    fn without_rules_all_but_loopback_moves() {
        let rules = Rules::default();
        assert!(moves(&rules, Protocol::Tcp, "0.0.0.0:80"));
        assert!(moves(&rules, Protocol::Udp, "[::]:53"));
        for local in ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
            assert!(!moves(&rules, Protocol::Tcp, local), "{local}");
        }
        assert!(rules.moves_to("192.0.2.1".parse().unwrap()));
        assert!(!rules.moves_to("::1".parse().unwrap()));
    }

    #[test]
    fn only_what_is_listed_moves() {
        let rules = Rules::parse(
            "listen = ['6379', '80-90', 'udp:53']\nconnect = ['192.0.2.0/24', '2001:db8::/32']",
        )
        .unwrap();
        for (protocol, local, expected) in [
            (Protocol::Tcp, "0.0.0.0:6379", true),
            (Protocol::Tcp, "0.0.0.0:6380", false),
            (Protocol::Tcp, "[::]:85", true),
            (Protocol::Tcp, "[::]:91", false),
            (Protocol::Udp, "[::]:53", true),
            (Protocol::Tcp, "[::]:53", false),
        ] {
            assert_eq!(moves(&rules, protocol, local), expected, "{protocol:?} {local}");
        }
        assert!(rules.moves_to("::ffff:192.0.2.9".parse().unwrap()));
        assert!(rules.moves_to("2001:db8:1::".parse().unwrap()));
        assert!(!rules.moves_to("198.51.100.1".parse().unwrap()));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, named) in [
            ("listen = ['http']", "http"),
            ("listen = ['9-3']", "9-3"),
            ("listen = ['sctp:9']", "sctp"),
            ("connect = ['example.org']", "example.org"),
            ("lisen = []", "lisen"),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
